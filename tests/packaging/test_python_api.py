"""The Python API: instant to import, checked like the command line, and its notebook runs in a kernel."""

import asyncio
import json
import os
import subprocess
import sys
import threading

import nbformat
import pytest
from nbclient import NotebookClient

import rlpipe
from rlpipe.api.runs import load_run
from rlpipe.loop.event_loop import run_coroutine
from tests.helpers.cli import ROOT, environment

pytestmark = pytest.mark.packaging


def test_import_loads_no_library_and_run_is_the_function_after_its_module_is_imported(tmp_path):
    code = """
import json, sys
import rlpipe
before = sorted(sys.modules)
import rlpipe.run
from rlpipe.run import main
import rlpipe.run as again
from rlpipe import run
print(json.dumps([before, callable(rlpipe.run), rlpipe.run is run is again, main.__module__]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    before, is_callable, one, module = json.loads(done.stdout)
    assert not {"torch", "hydra", "omegaconf", "numpy", "yaml"} & set(before)
    assert is_callable and one and module == "rlpipe.cli.run"


def test_every_name_of_the_api_is_there():
    assert [name for name in rlpipe.__all__ if not callable(getattr(rlpipe, name))] == []
    with pytest.raises(AttributeError, match="no_such"):
        rlpipe.no_such  # noqa: B018


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "needs a recipe"),
        (["+recipe=swe_rl", "spec.gama=2"], "Did you mean spec.gamma"),
        (["+recipe=swe_rl", "run.steps=0"], "run.steps=0"),
    ],
)
def test_compose_refuses_what_the_command_line_refuses(overrides, message):
    with pytest.raises(ValueError, match=message):
        rlpipe.compose(overrides)


@pytest.mark.parametrize("value", [0, "many"])
def test_run_checks_what_was_changed_after_compose(tmp_path, value):
    config = rlpipe.compose(["+recipe=swe_rl", "cluster=inline", f"run.dir={tmp_path}/run"])
    config.spec.gamma = value
    with pytest.raises(ValueError, match=str(value)):
        rlpipe.run(config)
    assert not (tmp_path / "run").exists()


def test_a_coroutine_runs_whether_or_not_a_loop_runs_here():
    async def thread():
        return threading.current_thread()

    async def nested():
        return run_coroutine(thread())

    assert run_coroutine(thread()) is threading.current_thread()
    assert asyncio.run(nested()) is not threading.current_thread()


def test_the_notebook_runs_in_a_kernel_and_records_the_changed_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))))
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / "python_api.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()

    assert "  lr: 0.0001\n" in (tmp_path / "run" / "config.yaml").read_text()
    result = load_run(tmp_path / "run")
    assert result.outcome == "done" and list(result.checkpoints) == [2, 4]
    assert [row["training/global_step"] for row in result.metrics][-1] == 4
    drawn = [out.text for cell in notebook.cells for out in cell.get("outputs", []) if "text" in out]
    assert any("[" in text and "acceptance length" in text for text in drawn)
