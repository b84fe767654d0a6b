"""The ledger under any order of events, refused ones included, against a model of it."""

from __future__ import annotations

import sqlite3
import tempfile
from collections import Counter
from copy import deepcopy
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlpipe.loop.ledger import Ledger
from rlpipe.types import Group, Prompt, Trajectory, TrajectoryStatus

pytestmark = pytest.mark.property

MASKED, COMPLETE = TrajectoryStatus.MASKED, TrajectoryStatus.COMPLETE


class LedgerMachine(RuleBasedStateMachine):
    """states: index -> state of each prompt known. members: index -> {trajectory: (state, step)}."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.sqlite"
        self.ledger = Ledger(self.path)
        self.states: dict[int, str] = {}
        self.members: dict[int, dict[str, tuple[str, int | None]]] = {}
        self.groups: dict[int, Group] = {}
        self.next, self.step = 0, 0
        self.saved = None

    def teardown(self) -> None:
        self.ledger.close()
        self.folder.cleanup()

    def those(self, *states: str) -> list[int]:
        return [i for i, s in self.states.items() if s in states]

    @rule()
    def admit(self) -> None:
        self.ledger.admitted(self.next, prompt(self.next), version=self.step)
        self.states[self.next], self.members[self.next] = "admitted", {}
        self.next += 1

    @precondition(lambda self: self.those("admitted"))
    @rule(data=st.data(), size=st.integers(1, 3))
    def generate(self, data, size) -> None:
        index = data.draw(st.sampled_from(self.those("admitted")))
        names = prompt(index).trajectory_ids(size)
        self.ledger.generating(prompt(index), names)
        self.states[index], self.members[index] = "generating", dict.fromkeys(names, ("generating", None))

    @precondition(lambda self: self.those("generating"))
    @rule(data=st.data())
    def play_again(self, data) -> None:
        index = data.draw(st.sampled_from(self.those("generating")))
        self.ledger.reopen(f"g{index}")
        self.states[index], self.members[index] = "admitted", {}

    @precondition(lambda self: self.those("generating"))
    @rule(data=st.data())
    def complete(self, data) -> None:
        index = data.draw(st.sampled_from(self.those("generating")))
        statuses = [data.draw(st.sampled_from([MASKED, COMPLETE])) for _ in self.members[index]]
        group = group_of(index, statuses)
        self.ledger.completed(group)
        self.states[index], self.groups[index] = "complete", group
        self.members[index] = {t.trajectory_id: (str(t.status), None) for t in group.trajectories}

    @precondition(lambda self: self.those("complete"))
    @rule(data=st.data())
    def train(self, data) -> None:
        batch = data.draw(st.lists(st.sampled_from(self.those("complete")), min_size=1, unique=True))
        self.step += 1
        self.ledger.trained([self.groups[i] for i in batch], self.step)
        for index in batch:
            useful = [t for t in self.groups[index].trajectories if t.status is COMPLETE]
            self.states[index] = "trained" if useful else "dropped"
            self.members[index] |= {t.trajectory_id: ("trained", self.step) for t in useful}

    @precondition(lambda self: self.those("admitted", "generating", "complete"))
    @rule(data=st.data())
    def drop(self, data) -> None:
        index = data.draw(st.sampled_from(self.those("admitted", "generating", "complete")))
        self.ledger.dropped(f"g{index}", "test")
        self.end_untrained(index)

    def end_untrained(self, index: int) -> None:
        self.states[index] = "dropped"
        for name, (state, _) in self.members[index].items():
            if state in ("generating", "complete"):
                self.members[index][name] = ("dropped", None)

    @precondition(lambda self: self.those("complete"))
    @rule(data=st.data())
    def drop_some_siblings(self, data) -> None:
        index = data.draw(st.sampled_from(self.those("complete")))
        group = self.groups[index]
        complete = [t for t in group.trajectories if t.status is COMPLETE]
        lost = data.draw(st.lists(st.sampled_from(complete), unique_by=id)) if complete else []
        self.ledger.trajectories_dropped(lost, "test")
        self.members[index] |= {t.trajectory_id: ("dropped", None) for t in lost}
        left = [t for t in group.trajectories if t not in lost]
        self.groups[index] = Group(prompt=group.prompt, trajectories=left)

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
        with pytest.raises(AssertionError, match="is not 'generating'"):
            self.ledger.completed(self.groups[data.draw(st.sampled_from(sorted(self.groups)))])

    @precondition(lambda self: self.those("trained", "dropped"))
    @rule(data=st.data())
    def what_has_ended_cannot_end_again(self, data) -> None:
        index = data.draw(st.sampled_from(self.those("trained", "dropped")))
        with pytest.raises(AssertionError, match="cannot become 'dropped'"):
            self.ledger.dropped(f"g{index}", "test")

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def admitting_twice_is_refused(self, data) -> None:
        index = data.draw(st.sampled_from(sorted(self.states)))
        with pytest.raises(sqlite3.IntegrityError):
            self.ledger.admitted(index, prompt(index), version=0)

    @rule()
    def drop_the_unfinished(self) -> None:
        flying = self.those("admitted", "generating", "complete")
        assert self.ledger.drop_unfinished("test") == len(flying)
        for index in flying:
            self.end_untrained(index)

    @rule()
    def save(self) -> None:
        copy = self.path.with_name("copy.sqlite")
        copy.unlink(missing_ok=True)
        self.ledger.save(copy)
        self.saved = deepcopy((self.states, self.members, self.groups, self.next, self.step))

    @precondition(lambda self: self.saved)
    @rule()
    def restore(self) -> None:
        self.ledger.restore(self.path.with_name("copy.sqlite"))
        self.states, self.members, self.groups, self.next, self.step = deepcopy(self.saved)

    @rule()
    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.path)

    @invariant()
    def every_prompt_is_in_the_one_state_the_model_has(self) -> None:
        assert self.ledger.counts() == dict(Counter(self.states.values()))
        assert self.ledger.admitted_count() == self.next
        flying = self.those("admitted", "generating", "complete")
        assert [index for index, *_ in self.ledger.unfinished()] == sorted(flying)

    @invariant()
    def every_trajectory_is_there_once_and_trained_at_most_once(self) -> None:
        with sqlite3.connect(f"file:{self.path}?mode=ro", uri=True) as reader:
            found = reader.execute("SELECT trajectory_id, state, step FROM trajectories").fetchall()
        reader.close()
        expected = [(name, *fate) for members in self.members.values() for name, fate in members.items()]
        assert sorted(found, key=str) == sorted(expected, key=str)

    @invariant()
    def no_invariant_is_reported_broken(self) -> None:
        left = set(self.ledger.violations(ended=True))
        emptied = {f"g{i}" for i in self.those("trained") if not self.groups[i].trajectories}
        assert not emptied
        flying = self.those("admitted", "generating", "complete")
        assert len(left) == bool(flying) and all(what.startswith("a prompt did not end") for what in left)


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
