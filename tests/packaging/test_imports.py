"""The import rules hold: by import-linter over the source, and by sys.modules of a real process."""

import json
import pkgutil
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rlpipe.envs
import rlpipe.metrics
from tests.helpers.cli import ROOT, environment

pytestmark = pytest.mark.packaging
LINT = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
HEAVY = {"torch", "ray", "verl", "megatron", "transformers", "wandb"}


def lint(folder):
    return subprocess.run(LINT, cwd=folder, capture_output=True, text=True, timeout=120)


def loaded_libraries(modules):
    """Import modules in a new process; return the top-level names of all that it loads."""
    code = f"import json, sys, {', '.join(modules)}; print(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return {name.split(".")[0] for name in json.loads(result.stdout)}


def contracts():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def test_the_layers_and_doors_of_the_package_hold():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout


def test_contributors_read_the_layers_that_hold():
    page = (ROOT / "CONTRIBUTING.md").read_text().partition("## Import rules")[2].split("```")[1]
    layers = next(contract["layers"] for contract in contracts() if contract["type"] == "layers")
    assert " ".join(page.split()) == " > ".join(layers).replace("rlpipe.", "")


def test_the_contract_about_environments_names_all_that_is_not_in_it():
    (named,) = [c["forbidden_modules"] for c in contracts() if "envs.base" in c["name"]]
    there = {f"rlpipe.envs.{m.name}" for m in pkgutil.iter_modules(rlpipe.envs.__path__)}
    contract = {f"rlpipe.envs.{name}" for name in ("base", "contract", "running", "user_loop")}
    assert set(named) == there - contract


def test_layers_are_drawn_and_a_circle_is_named(tmp_path):
    for planted in (False, True):
        (tmp_path / "scripts").mkdir(exist_ok=True)
        shutil.copy(ROOT / "scripts" / "draw_layers", tmp_path / "scripts")
        shutil.copytree(ROOT / "rlpipe", tmp_path / "rlpipe", dirs_exist_ok=True)
        if planted:
            with (tmp_path / "rlpipe" / "types.py").open("a") as file:
                file.write("\nimport rlpipe.launch\n")
        command = [sys.executable, "scripts/draw_layers", "--out", "layers.svg"]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert result.returncode == planted, result.stderr
        assert ("types -> launch" in result.stdout) == planted
        assert (tmp_path / "layers.svg").read_text().count("<rect") > 20


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("rlpipe/types.py", "import rlpipe.config.run"),
        ("rlpipe/envs/base.py", "import rlpipe.rollout.engine"),
        ("rlpipe/rollout/collector.py", "import rlpipe.envs.math"),
        ("rlpipe/loop/controller.py", "import ray"),
        ("rlpipe/algo/advantage.py", "import verl"),
        ("rlpipe/rollout/engine.py", "import megatron.core"),
        ("rlpipe/config/run.py", "import omegaconf"),
        ("rlpipe/metrics/bus.py", "import wandb"),
        ("rlpipe/rollout/sglang/server.py", "import sglang"),
        ("rlpipe/rollout/sglang/engine.py", "import httpx"),
        ("rlpipe/metrics/values.py", "import torch"),
        ("rlpipe/launch.py", "import recipes.tiny_model.make"),
    ],
)
def test_a_planted_import_breaks_a_contract(tmp_path, module, statement):
    shutil.copytree(ROOT / "rlpipe", tmp_path / "rlpipe", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a") as file:
        file.write(f"\n{statement}\n")
    result = lint(tmp_path)
    assert result.returncode == 1
    assert module.removesuffix(".py").replace("/", ".") in result.stdout


def test_types_config_metrics_and_report_load_no_heavy_library():
    metrics = [f"rlpipe.metrics.{m.name}" for m in pkgutil.iter_modules(rlpipe.metrics.__path__)]
    modules = ["rlpipe.types", "rlpipe.models.checkpoint", "rlpipe.config.run", "rlpipe.report", *metrics]
    assert not loaded_libraries(modules) & HEAVY


def test_the_driver_of_a_ray_run_loads_no_library_of_its_actors():
    driver = ["rlpipe.cli.run", "rlpipe.launch", "rlpipe.actors.ray_cluster", "rlpipe.actors.pool"]
    assert not loaded_libraries(driver) & (HEAVY - {"ray"})


def test_a_trainer_on_a_cpu_imports_megatron_without_a_compiler_and_without_wandb():
    """torch.compile and wandb are there for other code afterwards."""
    code = (
        "import json, sys, torch; before = torch.compile\n"
        "from rlpipe.trainer.runtime import import_megatron; import_megatron(compiles=False)\n"
        "print(json.dumps([*sys.modules])); assert torch.compile is before; import wandb"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    loaded = set(json.loads(result.stdout))
    assert "megatron.core.tensor_parallel" in loaded
    assert not loaded & {"wandb", "torch._inductor.compile_fx", "torch._dynamo"}
