"""Mistakes that need files, a machine or a run to be made; the others are rows of `helpers/mistakes.py`."""

import json
import shutil

import pytest

from tests.helpers.cli import ROOT, run

pytestmark = pytest.mark.integration


def refused(tmp_path, *overrides, **extra) -> str:
    arguments = ["+recipe=swe_rl", f"run.dir={tmp_path}/run", *overrides]
    result = run(*arguments, cwd=tmp_path, timeout=60, fresh=False, **extra)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr, result.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    return result.stderr + result.stdout


def test_checkpoint_without_mtp_layer_while_speculating(tmp_path):
    model = tmp_path / "no_mtp"
    shutil.copytree(ROOT / "models" / "tiny", model)
    config = json.loads((model / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    (model / "config.json").write_text(json.dumps(config))
    message = refused(tmp_path, f"model.path={model}")
    assert "spec.mode=rejection" in message and str(model) in message and "spec.mode=none" in message


def test_model_path_that_is_no_checkpoint(tmp_path):
    assert "config.json does not exist" in refused(tmp_path, f"model.path={tmp_path}")


def test_malformed_jsonl_is_located_by_file_and_line(tmp_path):
    lines = (ROOT / "data" / "swe" / "train.jsonl").read_text().splitlines()[:3]
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join([lines[0], lines[1][:50], lines[2]]))
    message = refused(tmp_path, f"env.train_file={bad}")
    assert f"{bad}:2" in message


def test_empty_data_set(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    message = refused(tmp_path, f"env.train_file={empty}")
    assert str(empty) in message and "empty" in message


def test_missing_sandbox_tool_names_the_package(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    message = refused(tmp_path, PATH=str(tools))
    assert "bwrap" in message and "bubblewrap" in message


def test_checkpoint_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    result = run("+recipe=swe_rl", f"run.dir={tmp_path}/file/run", cwd=tmp_path, timeout=60, fresh=False)
    assert result.returncode != 0
    assert "not writable" in result.stderr and "run.dir" in result.stderr and "Traceback" not in result.stderr


def test_no_data_parallel_rank(tmp_path):
    assert "trainer.dp" in refused(tmp_path, "trainer.dp=0")


def test_a_directory_that_holds_a_run_is_not_reused_when_told_never(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "step_3").mkdir()
    assert "already holds a run" in refused(tmp_path, "run.resume=never")
