"""kill -9 at random moments, over and over: each run ends, nothing is lost and nothing repeated.

Here controller, ledger, backlog and checkpoints are the real ones; rollout workers, environments and the
trainer are played by `DyingCluster`. With Ray, Megatron and sandboxes: test_worker_death.py.
"""

import json
import random
import sqlite3
from collections import Counter

import pytest

from rlpipe.config.pipeline import Stale
from rlpipe.loop.backlog import MASKED
from rlpipe.loop.ledger import Ledger
from tests.helpers.dying_cluster import (
    INSTANCES,
    DyingCluster,
    Faults,
    at_file_operation,
    controller,
    die,
    finish,
    state_of,
)
from tests.helpers.processes import in_a_process

pytestmark = pytest.mark.chaos

STEPS = 6
POLICIES = [
    {"max_staleness": 0},
    {"max_staleness": 2},
    {"max_staleness": 1, "filter_equal_rewards": True},
    {"max_staleness": 1, "stale": Stale.DROP, "oversample": 1.5},
    {"max_staleness": 1, "stale": Stale.KEEP},
]
FAULTS = Faults(worker=0.1, environment=0.1, trainer=0.08)


def check_the_end(directory, pipeline):
    """The oracle: what the trainer learnt, against what the ledger tells."""
    learnt = state_of(directory, STEPS)["learnt"]
    assert len(learnt) == STEPS * 3 and max(Counter(learnt).values()) == 1
    ledger = Ledger(directory / "ledger.sqlite")
    assert ledger.violations(ended=True, epoch=INSTANCES) == []
    ledger.close()
    with sqlite3.connect(directory / "ledger.sqlite") as db:
        rows = db.execute(
            "SELECT group_id, step FROM prompts WHERE step NOTNULL ORDER BY step, idx"
        ).fetchall()
        ages = db.execute("SELECT MAX(version - oldest_version) FROM trajectories WHERE state = 'trained'")
        assert [name for name, _ in rows] == learnt
        assert [step for _, step in rows] == [n // 3 + 1 for n in range(STEPS * 3)]
        if pipeline.get("stale") is not Stale.KEEP:
            assert (ages.fetchone()[0] or 0) <= pipeline["max_staleness"]
        lost = [x for (x,) in db.execute("SELECT group_id FROM prompts WHERE reason = ?", (MASKED,))]
        rewarded = db.execute(
            "SELECT COUNT(*) FROM trajectories t JOIN prompts p USING (group_id) "
            "WHERE p.reason = ? AND t.reward NOT NULL",
            (MASKED,),
        ).fetchone()[0]
    assert rewarded == 0, "only a group without any reward is left out"
    if pipeline.get("stale", Stale.WAIT) is Stale.WAIT and "filter_equal_rewards" not in pipeline:
        admitted = (f"g{n:06d}" for n in range(STEPS * 3 + len(lost)))
        assert learnt == [name for name in admitted if name not in lost][: STEPS * 3], "in order"
    steps = [json.loads(line)["training/global_step"] for line in (directory / "metrics.jsonl").open()]
    assert max(Counter(steps).values()) == 1 and steps == sorted(steps)


@pytest.mark.parametrize("seed", range(20))
def test_a_run_killed_again_and_again_trains_each_prompt_once(tmp_path, seed):
    luck = random.Random(seed)
    pipeline = POLICIES[seed % len(POLICIES)]
    save_every = luck.choice([1, 2])
    kills = luck.randint(1, 4)

    def attempt():
        cluster = DyingCluster(luck=random.Random(luck.random()), faults=FAULTS)
        finish(controller(tmp_path, cluster, steps=STEPS, save_every=save_every, **pipeline))

    statuses = []
    while not statuses or statuses[-1]:
        assert len(statuses) < 60, statuses
        luck.random()  # the child's copy of luck is another one each time
        statuses.append(in_a_process(attempt, kill_after=luck.uniform(0, 0.3) if kills else None))
        kills -= statuses[-1] == -9
    check_the_end(tmp_path, pipeline)


@pytest.mark.parametrize("seed", range(10))
def test_a_trainer_lost_again_and_again_is_rebuilt_and_trains_each_prompt_once(tmp_path, seed):
    """In one process: what was learnt, recorded and played behind the newest checkpoint is forgotten."""
    luck = random.Random(seed)
    pipeline = POLICIES[seed % len(POLICIES)]
    faults = Faults(worker=0.1, environment=0.1, lost=0.05)
    cluster = DyingCluster(luck=luck, faults=faults, lose_at=luck.randint(1, 20))
    save_every = luck.choice([1, 2])
    finish(
        controller(tmp_path, cluster, steps=STEPS, save_every=save_every, trainer_restarts=1000, **pipeline)
    )
    assert cluster.losses, "the trainer was never lost"
    check_the_end(tmp_path, pipeline)


def test_a_synchronous_run_whose_trainer_was_lost_ends_with_the_same_bits(tmp_path, undisturbed):
    final, _ = undisturbed
    cluster = DyingCluster(luck=random.Random(3), faults=Faults(lost=0.05), lose_at=9)
    finish(controller(tmp_path, cluster, steps=4, max_staleness=0, trainer_restarts=1000))
    assert cluster.losses and state_of(tmp_path, 4) == final


def test_a_trainer_that_is_lost_too_often_ends_the_run_and_says_so(tmp_path):
    cluster = DyingCluster(luck=random.Random(0), faults=Faults(lost=1.0))
    with pytest.raises(RuntimeError, match=r"lost 3 times \(cluster\.max_trainer_restarts=2\)"):
        finish(controller(tmp_path, cluster, max_staleness=0, trainer_restarts=2))
    assert cluster.losses == 2


def checkpointing(directory, act, number):
    """A synchronous run that does something at a file operation in its checkpoints."""

    def work():
        at_file_operation(number, directory / "checkpoints", act)
        finish(controller(directory, DyingCluster(luck=random.Random(1)), steps=4, max_staleness=0))

    return work


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Final state of the run without faults, and the number of file operations of its checkpoints."""
    directory = tmp_path_factory.mktemp("undisturbed")
    counted = directory / "operations"

    def work():
        seen = at_file_operation(-1, directory / "checkpoints", die)
        finish(controller(directory, DyingCluster(luck=random.Random(1)), steps=4, max_staleness=0))
        counted.write_text(str(seen[0]))

    assert in_a_process(work) == 0
    return state_of(directory, 4), int(counted.read_text())


@pytest.mark.parametrize("offset", range(24))
def test_a_kill_anywhere_in_a_checkpoint_resumes_to_the_same_bits(tmp_path, undisturbed, offset):
    final, operations = undisturbed
    number = random.Random(offset).randrange(operations * offset // 24, operations * (offset + 1) // 24)
    assert in_a_process(checkpointing(tmp_path, die, number)) == -9
    resumed = controller(tmp_path, DyingCluster(luck=random.Random(2)), steps=4, max_staleness=0)
    finish(resumed)
    assert state_of(tmp_path, 4) == final
    assert Ledger(tmp_path / "ledger.sqlite").violations(ended=True, epoch=INSTANCES) == []
    assert not [p for p in (tmp_path / "checkpoints").iterdir() if p.suffix], "something is left of the crash"


def test_a_ledger_that_is_not_rewound_with_its_checkpoint_would_be_noticed(tmp_path, monkeypatch):
    """The oracle above is able to fail."""

    def doomed():
        cluster = DyingCluster(luck=random.Random(1))
        cluster.die_at = 5  # the checkpoint of step 4 may not be there yet, that of step 2 is
        finish(controller(tmp_path, cluster, steps=STEPS, save_every=2, max_staleness=2))

    assert in_a_process(doomed) == -9
    monkeypatch.setattr(Ledger, "restore", lambda self, path: None)
    with pytest.raises((AssertionError, ExceptionGroup)):
        finish(controller(tmp_path, DyingCluster(luck=random.Random(1)), steps=STEPS, max_staleness=2))
        check_the_end(tmp_path, {"max_staleness": 2})
