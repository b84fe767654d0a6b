"""Recipes of environment libraries: two steps with the shipped model, and how several seeds are summed up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.runs import records
from recipes.seeds import measured, summary
from tests.helpers.cli import ROOT, SMALL, run
from tests.helpers.openenv_server import WALK_SCHEMA, openenv_server, walk

pytestmark = pytest.mark.integration
RECIPES = {
    "frozen_lake": ("Answer with one of 4, 2, 6, 8.", "score", 1),
    "guess_number": ("guess the number between 1 and 9", "invalid_move", 1),
    "find_function": ("Find the file that defines", "names_it", 1),
    "walk": ("Answer with move (string).", "steps", 3),
}


@pytest.fixture(scope="module")
def walks() -> Iterator[str]:
    with openenv_server(WALK_SCHEMA, sessions=64, session=walk) as url:
        yield url


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_steps_of_a_recipe_play_its_environment_and_are_rewarded(
    recipe: str, tmp_path: Path, walks: str
) -> None:
    small = [*SMALL, "val.every=2", "val.instances=4", "metrics.wandb=off", "run.dir=out", "cluster=inline"]
    small += [f"env.openenv.url={walks}"]
    small += ["model.path=shipped:models/tiny"] if recipe == "walk" else []  # SmolLM2 takes minutes
    result = run(f"+recipe={recipe}", *small, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stdout + result.stderr

    one = measured(tmp_path / "out")
    assert len(one["train_reward"]) == 2 and [step for step, _, _ in one["validation"]] == [0, 2]
    played = [json.loads(line) for line in (tmp_path / "out/trajectories.jsonl").read_text().splitlines()]
    prompt, number, most = RECIPES[recipe]
    assert played and prompt in str(played[0])
    _, steps = records(tmp_path / "out")
    assert all(0 <= step[f"env/info/{number}"] <= most for step in steps)


@pytest.mark.parametrize(("recipe", "turns"), [("mini_swe", 8), ("vf_harness", 1)])
def test_two_steps_of_a_harness_of_others_are_trained_on_its_own_turns(
    recipe: str, turns: int, tmp_path: Path
) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")  # the recipe's paths begin at the root of a checkout
    small = [*SMALL, "val.every=0", "metrics.wandb=off", "run.dir=out", "pipeline.group_size=2"]
    result = run(f"+recipe={recipe}", *small, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert result.returncode == 0, result.stdout + result.stderr

    _, steps = records(tmp_path / "out")
    assert len(steps) == 2
    for step in steps:
        assert step["env/masked"] == 0 and 1 <= step["env/info/requests"] <= turns
        # The harness sends back what the model wrote, so that an attempt is one conversation.
        assert step["env/info/segments"] == 1 and step["env/info/drift"] == 0


def test_the_gain_over_seeds_has_students_interval() -> None:
    ends = {"seed_0": 0.4, "seed_1": 0.5, "seed_2": 0.6}
    runs = {name: {"validation": [[0, 0.1, 0.0], [9, after, 0.0]]} for name, after in ends.items()}
    gain = summary(runs)["gain"]
    # The standard error of 0.3, 0.4, 0.5 is 0.0577; Student's quantile of two degrees of freedom is 4.303.
    assert gain["mean"] == 0.4 and gain["interval"] == pytest.approx([0.4 - 0.2484, 0.4 + 0.2484], abs=1e-3)


def test_several_held_out_sets_are_summed_up_apart() -> None:
    sets = {"a": [[0, 0.1, 0.0], [9, 0.3, 0.0]], "b": [[0, 0.0, 0.0], [9, 0.5, 0.0]]}
    runs = {f"seed_{seed}": {"validation": sets["a"], "sets": sets} for seed in range(3)}
    assert {name: one["gain"]["mean"] for name, one in summary(runs).items()} == {"a": 0.2, "b": 0.5}
