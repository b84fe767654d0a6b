"""The command line answers at once, finds recipes anywhere and refuses what it does not know."""

import json
import subprocess
import sys
from shutil import copytree

import pytest

from rlpipe.cli.main import COMMANDS, main
from rlpipe.loop.checkpoints import CheckpointStore
from rlpipe.models.checkpoint import has_mtp, is_mtp_weight, read_config, read_weights
from tests.helpers.cli import ROOT, environment, run
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.packaging
TINY = ROOT / "models" / "tiny"
HEAVY = {"torch", "ray", "verl", "megatron", "transformers", "wandb", "plotly"}
MODULES = """
import atexit, json, os, sys
def save():
    with open(os.environ["MODULES_FILE"], "w") as file:
        json.dump(sorted(sys.modules), file)
atexit.register(save)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job", "+recipe=swe_rl"], []])
def test_answers_import_no_heavy_library(tmp_path, arguments):
    (tmp_path / "sitecustomize.py").write_text(MODULES)
    names = tmp_path / "modules.json"
    result = run(*arguments, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}", MODULES_FILE=str(names))
    assert result.returncode == (0 if arguments else 2), result.stderr
    loaded = {name.split(".")[0] for name in json.loads(names.read_text())}
    assert "hydra" in loaded
    assert not loaded & HEAVY


def test_without_a_recipe_all_recipes_are_listed(tmp_path):
    result = run(cwd=tmp_path)
    assert result.returncode == 2
    for path in (ROOT / "configs" / "recipe").glob("*.yaml"):
        assert f"rlpipe run +recipe={path.stem}" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", sorted(p.stem for p in (ROOT / "configs" / "recipe").glob("*.yaml")))
def test_every_recipe_composes_and_names_itself(tmp_path, recipe):
    result = run("--cfg", "job", f"+recipe={recipe}", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert f"recipe: {recipe}" in result.stdout.splitlines()


def test_a_recipe_of_the_users_own_is_found_in_a_folder_of_their_own(tmp_path):
    (tmp_path / "mine" / "recipe").mkdir(parents=True)
    recipe = "# @package _global_\nrecipe: own\nrun:\n  steps: 7\n"
    (tmp_path / "mine" / "recipe" / "own.yaml").write_text(recipe)
    result = run("--config-dir", "mine", "--cfg", "job", "+recipe=own", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "recipe: own" in result.stdout
    assert "  steps: 7" in result.stdout.splitlines()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["+recipe=swe_rl", "run.stepz=3"], "stepz"),
        (["+recipe=swe_rl", "run.steps=many"], "many"),
        (["+recipe=no_such"], "no_such"),
    ],
)
def test_what_is_unknown_is_named(tmp_path, arguments, named):
    result = run("--cfg", "job", *arguments, cwd=tmp_path)
    assert result.returncode != 0
    assert named in result.stderr
    assert "Traceback" not in result.stderr


def rlpipe(*arguments, cwd):
    command = [sys.executable, "-m", "rlpipe", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", [command.name for command in COMMANDS])
def test_every_command_prints_its_own_help_under_its_own_name(tmp_path, name):
    asked = rlpipe("help", name, cwd=tmp_path)
    assert asked.returncode == 0, asked.stderr
    assert f"rlpipe {name}" in asked.stdout and "python -m" not in asked.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["repotr", "RUN"], "Did you mean report?"),
        (["+recipe=swe_rl"], "Did you mean `rlpipe run +recipe=swe_rl ...`?"),
        (["run", "+recipe=swe_rl", "--steps=3"], "Did you mean run.steps=3?"),
    ],
)
def test_what_was_meant_is_suggested(tmp_path, arguments, meant):
    refused = rlpipe(*arguments, cwd=tmp_path)
    assert refused.returncode == 2 and meant in refused.stderr


def test_the_version_is_printed_and_the_usage_names_every_command(tmp_path):
    assert rlpipe("--version", cwd=tmp_path).stdout.startswith("rlpipe ")
    usage = rlpipe("help", cwd=tmp_path).stdout
    assert [command.name for command in COMMANDS if f"  {command.name} " not in usage] == []


def test_a_checkpoint_is_exported_and_a_damaged_one_is_not(tmp_path):
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=2)
    for step in (1, 2):
        (files := store.begin(step) / "hf").mkdir()
        (files / "config.json").write_text(str(step))
        store.finish(step, {})
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "newest")]) == 0
    assert (tmp_path / "newest" / "config.json").read_text() == "2"
    assert main(["export", "--step", "1", str(tmp_path / "run"), str(tmp_path / "first")]) == 0
    assert (tmp_path / "first" / "config.json").read_text() == "1"
    (store.path(2) / "hf" / "config.json").write_text("3")
    for out, step in (("damaged", "2"), ("absent", "7"), ("first", "1")):
        assert main(["export", str(tmp_path / "run"), str(tmp_path / out), "--step", step]) == 2
    assert not (tmp_path / "damaged").exists() and not (tmp_path / "absent").exists()


@pytest.mark.parametrize("family", ["mimo", "deepseek_v3", "qwen3_next", "qwen3_5"])
def test_a_checkpoint_is_exported_without_its_mtp_layer(tmp_path, family):
    model = TINY if family == "mimo" else write_random_checkpoint(tmp_path / "model", family)
    store = CheckpointStore(tmp_path / "run" / "checkpoints", keep=1)
    copytree(model, store.begin(1) / "hf")
    store.finish(1, {})
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "plain"), "--without-mtp"]) == 0

    after, before = read_weights(tmp_path / "plain"), read_weights(model)
    assert set(after) == {name for name in before if not is_mtp_weight(name)} < set(before)
    assert not has_mtp(read_config(tmp_path / "plain"))
    assert "mtp" not in (tmp_path / "plain" / "config.json").read_text()

    # A checkpoint without the layer has nothing to leave out.
    copytree(tmp_path / "plain", store.begin(2) / "hf")
    store.finish(2, {})
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again"), "--without-mtp"]) == 2
    assert not (tmp_path / "again").exists()
