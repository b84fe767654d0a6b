"""Each half alone, with the real controller, ledger and dump; what was recorded is trained on again."""

import json
import random

import pytest

from rlpipe.actors.dumped_cluster import DumpingCluster, ReplayCluster
from rlpipe.config.pipeline import Stale
from rlpipe.config.run import for_run_mode
from rlpipe.config.run_mode import RunMode
from rlpipe.loop.dump import Dump, DumpedPrompts
from rlpipe.metrics.values import Mean
from tests.helpers.dying_cluster import DyingCluster, Faults, controller, finish, state_of

pytestmark = pytest.mark.unit

STEPS = 4


class Told(DyingCluster):
    """Its trainer tells of its weight. drift: added to what it learns in each step from `drift_from` on."""

    drift_from: int = 99

    async def train_step(self, groups):
        await super().train_step(groups)
        if self.trainer_version >= self.drift_from:
            self.weight += 1e-12
        return {"actor/pg_loss": Mean(self.weight, 1), "timing_s/adv": Mean(random.random(), 1)}


class RolloutHalf(DyingCluster):
    """As a cluster without a trainer: nothing is learnt, the weights of version 0 stay."""

    async def train_step(self, groups):
        return {}

    async def publish_weights(self, version):
        async def send():
            return {}

        return send


def run_half(directory, cluster, half=RunMode.BOTH, dump=None, **pipeline):
    """Run a half in a directory; returns its controller, closed."""
    run = controller(directory, cluster, steps=STEPS, trainer_restarts=9, **{"max_staleness": 1} | pipeline)
    run.config.run.half, run.config.run.dump = half, str(dump)
    run.config = for_run_mode(run.config)
    if half is RunMode.TRAIN:
        recorded = Dump.open(dump, run.config)
        run.prompts = DumpedPrompts(recorded)
        changed = recorded.settings_changed(run.config)
        run.cluster = ReplayCluster(cluster, recorded, changed=changed, event=run.bus.event)
    else:
        recorded = Dump.create(dump, run.config, 0)
        needed = half is RunMode.ROLLOUT
        run.cluster = DumpingCluster(cluster, recorded, needed=needed, event=run.bus.event)
    ended = []
    try:
        finish(run, then=lambda ledger: ended.append((ledger.violations(ended=True), ledger.counts())))
    finally:
        assert not ended or ended[0][0] == []
    return ended[0][1]


def events(directory, kind):
    lines = map(json.loads, (directory / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["kind"] == kind]


def cluster(kind=Told, seed=0, **faults):
    return kind(luck=random.Random(seed), faults=Faults(**faults))


PIPELINES = {
    "synchronous": {"max_staleness": 0},
    "asynchronous": {"max_staleness": 2},
    "dropping": {"stale": Stale.DROP, "oversample": 1.5},
    "filtering": {"filter_equal_rewards": True},
}


@pytest.mark.parametrize("policy", PIPELINES)
def test_a_replay_reproduces_the_trainer_to_the_last_bit(tmp_path, policy):
    pipeline = PIPELINES[policy]
    run_half(tmp_path / "a", cluster(environment=0.1), dump=tmp_path / "d", **pipeline)
    counts = run_half(tmp_path / "b", cluster(seed=1), RunMode.TRAIN, tmp_path / "d", **pipeline)
    assert counts == {"trained": STEPS * 3}
    assert state_of(tmp_path / "b", STEPS) == state_of(tmp_path / "a", STEPS)
    (equal,) = events(tmp_path / "b", "replay_equal")
    assert equal["steps"] == STEPS and not events(tmp_path / "b", "replay_differs")


def test_the_first_step_that_differs_is_named(tmp_path):
    run_half(tmp_path / "a", cluster(), dump=tmp_path / "d")
    other = cluster()
    other.drift_from = 3
    run_half(tmp_path / "b", other, RunMode.TRAIN, tmp_path / "d")
    (told,) = events(tmp_path / "b", "replay_differs")
    assert (told["step"], told["equal"], told["names"], told["changed"]) == (3, 2, ["actor/pg_loss"], [])
    assert not events(tmp_path / "b", "replay_equal")


def test_rollouts_alone_end_as_dumped_and_can_be_trained_on(tmp_path):
    counts = run_half(tmp_path / "a", cluster(RolloutHalf, environment=0.2), RunMode.ROLLOUT, tmp_path / "d")
    assert counts == {"dropped": STEPS * 3}
    counts = run_half(tmp_path / "b", cluster(), RunMode.TRAIN, tmp_path / "d")
    assert sum(counts.values()) == STEPS * 3 and counts["trained"] >= STEPS * 3 - 1
    learnt = state_of(tmp_path / "b", STEPS)["learnt"]
    assert learnt == [f"g{n:06d}" for n in range(STEPS * 3)]
    told = events(tmp_path / "b", "replay_equal") + events(tmp_path / "b", "replay_differs")
    assert told == [], "nothing was recorded of a trainer"


def test_a_dump_survives_a_trainer_that_is_lost(tmp_path):
    """What was dumped behind the checkpoint is forgotten with it, and dumped again."""
    lossy = cluster()
    lossy.lose_at = 9
    run_half(tmp_path / "a", lossy, dump=tmp_path / "d", max_staleness=0)
    assert lossy.losses == 1
    run_half(tmp_path / "b", cluster(seed=1), RunMode.TRAIN, tmp_path / "d", max_staleness=0)
    assert state_of(tmp_path / "b", STEPS) == state_of(tmp_path / "a", STEPS)
    assert events(tmp_path / "b", "replay_equal")


@pytest.mark.parametrize("half", [RunMode.BOTH, RunMode.ROLLOUT])
def test_a_full_disk_ends_the_dump_and_only_a_run_that_is_about_it(tmp_path, half, monkeypatch):
    def full(self, step, groups):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Dump, "write", full)
    kind = Told if half is RunMode.BOTH else RolloutHalf
    if half is RunMode.ROLLOUT:
        with pytest.raises(ExceptionGroup) as caught:
            run_half(tmp_path / "a", cluster(kind), half, tmp_path / "d")
        assert caught.group_contains(OSError, match="No space left")
    else:
        assert run_half(tmp_path / "a", cluster(kind), half, tmp_path / "d") == {"trained": STEPS * 3}
        assert len(events(tmp_path / "a", "recording_off")) == 1


def test_a_directory_of_one_half_is_not_continued_by_another(tmp_path):
    run_half(tmp_path / "a", cluster(RolloutHalf), RunMode.ROLLOUT, tmp_path / "d")
    with pytest.raises(ValueError, match=r"run\.half=rollout, and run\.half=both"):
        finish(controller(tmp_path / "a", cluster(), steps=STEPS))
