"""The ledger under any order of events, refused ones included, against a model of it."""

from __future__ import annotations

import sqlite3
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlpipe.pipeline.ledger import Ledger
from rlpipe.types import Group, Prompt, Trajectory, TrajectoryStatus

pytestmark = pytest.mark.property

MASKED, COMPLETE = TrajectoryStatus.MASKED, TrajectoryStatus.COMPLETE


class LedgerMachine(RuleBasedStateMachine):
    """states: index -> state of each prompt known. groups: of those that completed; steps: of the trained."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.sqlite"
        self.ledger = Ledger(self.path)
        self.states: dict[int, str] = {}
        self.groups: dict[int, Group] = {}
        self.steps: dict[int, int] = {}
        self.next, self.step = 0, 0

    def teardown(self) -> None:
        self.ledger.close()
        self.folder.cleanup()

    def those(self, state: str) -> list[int]:
        return [i for i, s in self.states.items() if s == state]

    @rule()
    def admit(self) -> None:
        self.ledger.admitted(self.next, prompt(self.next), version=self.step)
        self.states[self.next] = "admitted"
        self.next += 1

    @precondition(lambda self: self.those("admitted"))
    @rule(data=st.data(), statuses=st.lists(st.sampled_from([MASKED, COMPLETE]), min_size=1, max_size=3))
    def complete(self, data, statuses) -> None:
        index = data.draw(st.sampled_from(self.those("admitted")))
        group = group_of(index, statuses)
        self.ledger.completed(group)
        self.states[index], self.groups[index] = "complete", group

    @precondition(lambda self: self.those("complete"))
    @rule(data=st.data())
    def train(self, data) -> None:
        batch = data.draw(st.lists(st.sampled_from(self.those("complete")), min_size=1, unique=True))
        self.step += 1
        self.ledger.trained([self.groups[i] for i in batch], self.step)
        for index in batch:
            useful = any(t.status is COMPLETE for t in self.groups[index].trajectories)
            self.states[index], self.steps[index] = "trained" if useful else "dropped", self.step

    @precondition(lambda self: any(s != "complete" for s in self.states.values()))
    @rule(data=st.data())
    def training_what_is_not_complete_is_refused_whole(self, data) -> None:
        wrong = data.draw(st.sampled_from([i for i, s in self.states.items() if s != "complete"]))
        batch = [self.groups[i] for i in self.those("complete")]
        batch.append(self.groups.get(wrong, group_of(wrong, [COMPLETE])))
        with pytest.raises(AssertionError, match="is not 'complete'"):
            self.ledger.trained(batch, self.step + 1)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def completing_twice_is_refused(self, data) -> None:
        with pytest.raises(AssertionError, match="is not 'admitted'"):
            self.ledger.completed(self.groups[data.draw(st.sampled_from(sorted(self.groups)))])

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def admitting_twice_is_refused(self, data) -> None:
        index = data.draw(st.sampled_from(sorted(self.states)))
        with pytest.raises(sqlite3.IntegrityError):
            self.ledger.admitted(index, prompt(index), version=0)

    @rule()
    def drop_the_unfinished(self) -> None:
        flying = self.those("admitted") + self.those("complete")
        assert self.ledger.drop_unfinished("test") == len(flying)
        self.states |= dict.fromkeys(flying, "dropped")

    @rule(back=st.integers(0, 4))
    def rewind(self, back) -> None:
        first = max(0, self.next - back)
        self.ledger.rewind(first)
        for kept in (self.states, self.groups, self.steps):
            for index in [i for i in kept if i >= first]:
                del kept[index]
        self.next = first

    @rule()
    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.path)

    @invariant()
    def every_prompt_is_in_the_one_state_the_model_has(self) -> None:
        assert self.ledger.counts() == dict(Counter(self.states.values()))

    @invariant()
    def every_trajectory_is_there_once_and_trained_at_most_once(self) -> None:
        with sqlite3.connect(f"file:{self.path}?mode=ro", uri=True) as reader:
            found = reader.execute("SELECT trajectory_id, status, step FROM trajectories").fetchall()
        reader.close()
        expected = [
            (t.trajectory_id, str(t.status), self.steps.get(i) if t.status is COMPLETE else None)
            for i, group in self.groups.items()
            for t in group.trajectories
        ]
        assert sorted(found) == sorted(expected)


def prompt(index: int) -> Prompt:
    return Prompt(instance_id="i", group_id=f"g{index}")


def group_of(index: int, statuses: list[TrajectoryStatus]) -> Group:
    members = [
        Trajectory(trajectory_id=f"g{index}/{k}", group_id=f"g{index}", instance_id="i", status=status)
        for k, status in enumerate(statuses)
    ]
    return Group(prompt=prompt(index), trajectories=members)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
