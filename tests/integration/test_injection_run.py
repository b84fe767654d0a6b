"""A run with injected faults: what the trainer sees of them, and what validation does not."""

from __future__ import annotations

import asyncio
import json

import pytest

from rlpipe.actors.rollout_worker import RolloutWorker
from rlpipe.config.injection import InjectionConfig
from rlpipe.config.paths import resolve_model
from rlpipe.config.run import Config
from rlpipe.models.checkpoint import read_weights
from rlpipe.types import Prompt
from rlpipe.weights.payload import pack_weights
from tests.helpers.cli import SMALL, run

pytestmark = pytest.mark.integration


def test_a_run_on_stale_weights_says_so_and_trains_on_tokens_exactly_that_old(tmp_path):
    settings = ["pipeline.max_staleness=0", "run.steps=5", "val.every=0", "run.save_every=0"]
    faults = ["injection.stale_steps=2", "injection.weight_noise=0.02"]
    slow = ["injection.long_turn_share=0.2", "injection.long_turn_tokens=20"]
    overrides = [*SMALL, *settings, *faults, *slow, "algo.correction=obrs"]
    result = run("+recipe=swe_rl", "cluster=inline", "run.dir=out", *overrides, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    trained = [r for r in records if r["training/global_step"] > 0]
    staleness = "training/off_policy/trajectory_staleness"
    ages = [(r[f"{staleness}/min"], r[f"{staleness}/max"]) for r in trained]
    assert ages == [(0, 0), (1, 1), (2, 2), (2, 2), (2, 2)]
    assert any(r.get("rollout_corr/obrs_kl_before", 0) > 1e-4 for r in trained)
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    (told,) = [event for event in events if event["kind"] == "injection"]
    assert told["stale_steps"] == 2 and told["weight_noise"] == 0.02 and told["long_turn_tokens"] == 20


def test_validation_keeps_the_newest_weights(tmp_path):
    config = Config(injection=InjectionConfig(stale_steps=2))
    config.env.name = "reasoning"
    weights = read_weights(resolve_model(config.model.path))

    async def play():
        worker = RolloutWorker(config)
        try:
            for version in (1, 2, 3):
                await worker.update_weights(pack_weights(weights, version))
            (split, *_) = worker._suite.splits()
            [name] = list(worker._suite.instance_ids(split))[:1]
            group = await worker.collect(Prompt(instance_id=name, group_id="g"), 2)
            return group.trajectories, await worker.evaluate([name], 2, 1.0)
        finally:
            await worker.close()

    trained, validated = asyncio.run(asyncio.wait_for(play(), 60))
    assert {v for t in trained for v in t.versions.tolist()} == {-1, 1}
    assert {v for t in validated for v in t.versions.tolist()} == {-1, 3}
