"""The command line answers at once, finds recipes anywhere and refuses what it does not know."""

import json

import pytest

from tests.helpers.cli import ROOT, run

pytestmark = pytest.mark.packaging
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
        assert f"python -m rlpipe.run +recipe={path.stem}" in result.stdout
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
