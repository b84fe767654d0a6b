"""The halves as a user runs them: Megatron, engine and environment, one after another."""

import json

import pytest

from rlpipe.loop.ledger import Ledger
from tests.helpers.cli import run

pytestmark = pytest.mark.integration

SMALL = ["+recipe=swe_rl", "cluster=inline", "run.steps=2", "metrics.report=false", "metrics.wandb=off"]
SIZES = ["pipeline.prompts_per_step=2", "pipeline.group_size=4", "val.every=0", "metrics.probe.every=0"]
LEARNING = ["trainer.lr=1e-3", "trainer.warmup_steps=0", "algo.entropy_coef=0.01"]


def finished(directory, *overrides):
    result = run(*SMALL, *SIZES, *LEARNING, *overrides, cwd=directory, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stdout + result.stderr


def events(directory):
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


def weights(directory, step):
    return (directory / "checkpoints" / f"step_{step}" / "hf" / "model.safetensors").read_bytes()


def counts(directory):
    ledger = Ledger(directory / "ledger.sqlite")
    assert ledger.violations(ended=True) == []
    found = ledger.counts()
    ledger.close()
    return found


def test_a_dumped_run_is_replayed_to_the_last_bit_and_rollouts_run_alone(tmp_path):
    finished(tmp_path, "run.dir=whole", "run.dump=dump", "run.save_every=1")
    finished(tmp_path, "run.dir=again", "run.half=train", "run.dump=dump")
    assert weights(tmp_path / "again", 2) == weights(tmp_path / "whole", 2)
    assert weights(tmp_path / "whole", 1) != weights(tmp_path / "whole", 2), "nothing was learnt"
    (told,) = [e for e in events(tmp_path / "again") if e["kind"].startswith("replay")]
    assert (told["kind"], told["steps"]) == ("replay_equal", 2)
    assert counts(tmp_path / "again") == {"trained": 4}

    finished(tmp_path, "run.dir=played", "run.half=rollout")
    assert counts(tmp_path / "played") == {"dropped": 4}
    assert not (tmp_path / "played" / "checkpoints" / "step_2" / "trainer").exists()
    result = run(
        *SMALL, *SIZES, "run.dir=other", "run.half=train", "run.dump=played/dump", "pipeline.group_size=8",
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 2 and "set pipeline.group_size=4" in result.stderr
