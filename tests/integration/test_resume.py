"""A run that is interrupted and resumed equals one that is not: real Megatron, verl, engine, environment."""

from __future__ import annotations

import json
import shutil
import sqlite3

import pytest

from tests.helpers.cli import run

pytestmark = pytest.mark.integration

SMALL = ["run.steps=4", "run.save_every=2", "pipeline.prompts_per_step=3", "pipeline.group_size=4"]
SYNCHRONOUS = ["cluster=inline", "run.dir=out", "metrics.report=false", "pipeline.max_staleness=0"]
SYNCHRONOUS += ["metrics.wandb=off"]
LEARNING = ["trainer.lr=1e-3", "trainer.warmup_steps=3", "algo.entropy_coef=0.01", "metrics.probe.every=0"]
VALIDATED = ["val.every=2", "val.instances=4"]
# Clocks, and counts of attempts and of an engine that found the groups of step 3 in the checkpoint.
OF_THE_MOMENT = (
    "time",
    "timing_s/",
    "perf/",
    "env/sandbox/",
    "env/masked_share",
    "rollout/generated",
    "rollout/prefill",
    "spec/gamma",
    "spec/step_seconds/",
)
# The engine's logprobs differ in the last bits with the requests that happen to share a step.
OF_THE_ENGINE = ("rollout/entropy", "rollout_corr/", "training/rollout_", "val/")

CASES = {
    # every token of a multi-turn episode, and a loss that reads no rollout logprob
    "swe_rl": (["algo.correction=none"], OF_THE_MOMENT + OF_THE_ENGINE),
    # one request at a time: the logprobs, and with them the weights of the correction, are equal too
    "reasoning_rl": (["rollout.max_running=1"], OF_THE_MOMENT),
    # two models, each with optimizer and schedule, the weights of OBRS and the calibration it keeps
    "jackpot": (["rollout.max_running=1", "env=reasoning", "decoupled.lr=1e-3"], OF_THE_MOMENT),
}


def files_of_the_trainer(directory):
    """Weights, optimizer, schedule, random states of the last checkpoint (`.metadata` holds paths)."""
    folder = directory / "checkpoints" / "step_4"
    files = (file for part in ("trainer", "hf") for file in folder.glob(f"*{part}/*"))
    return {str(f.relative_to(folder)): f.read_bytes() for f in files if f.name != ".metadata"}


def records(directory, left_out):
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(left_out)} for line in lines]


def lives(directory):
    with sqlite3.connect(directory / "ledger.sqlite") as db:
        prompts = db.execute("SELECT idx, group_id, instance_id, state, step FROM prompts ORDER BY idx")
        members = db.execute("SELECT trajectory_id, state, reward, tokens, step FROM trajectories ORDER BY 1")
        return prompts.fetchall(), members.fetchall()


@pytest.mark.parametrize("recipe", CASES)
def test_a_resumed_synchronous_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, recipe):
    """Killed after step 3: its last checkpoint is that of step 2, and all it recorded behind that stands."""
    own, left_out = CASES[recipe]
    settings = [f"+recipe={recipe}", *SYNCHRONOUS, *SMALL, *LEARNING, *VALIDATED, *own]
    whole, other = tmp_path / "whole", tmp_path / "other"
    whole.mkdir()
    first = run(*settings, cwd=whole, OMP_NUM_THREADS="1")
    assert first.returncode == 0, first.stdout + first.stderr
    shutil.copytree(whole, other)
    shutil.rmtree(other / "out" / "checkpoints" / "step_4")
    second = run(*settings, cwd=other, fresh=True, OMP_NUM_THREADS="1")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "Warning" not in second.stderr
    a, b = files_of_the_trainer(whole / "out"), files_of_the_trainer(other / "out")
    assert a.keys() == b.keys() and {"hf/model.safetensors", "trainer/__0_0.distcp"} <= a.keys()
    assert ("actor_trainer/__0_0.distcp" in a) == (recipe == "jackpot")
    assert [name for name in a if a[name] != b[name]] == []
    for name in (name for name in a if name.endswith("model.safetensors")):
        before = whole / "out" / "checkpoints" / "step_2" / name
        assert a[name] != before.read_bytes(), "nothing was learnt: anything would be equal"
    expected = records(whole / "out", left_out)
    assert records(other / "out", left_out) == expected
    assert (
        len(expected) == 5
        and {"actor/grad_norm", "actor/entropy", "critic/rewards/mean"} <= expected[-1].keys()
    )
    assert lives(other / "out") == lives(whole / "out")
