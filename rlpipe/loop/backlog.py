"""Tracks prompts between admission and training: the next one, waiting ones, and dropped ones.

    PromptStream -> admit_next -> [a worker generates it] -> finished -> GroupBuffer -> take_batch -> trained
                      ^ gate                                    |                          |
                      +--------- a slot is free ----------------+-- dropped      served: open_gate

Owns gate, buffer and meter, and keeps the ledger consistent with them; the controller moves the groups. The
backlog is the state of the rollouts that a checkpoint must contain: `save` writes the ledger and the groups
that are finished at that moment, and a new backlog continues from there. Prompts that were being generated
are then rolled out again from their seeds. Their tokens so far and the tokens of finished siblings are lost,
but no prompt is lost.

`admit_next` waits for the gate, `take_batch` for groups. Invariant: every admitted prompt is in exactly one
of four states: handed out, in the buffer, taken, ended. The ledger records the state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rlpipe.config.pipeline import PipelineConfig, Stale
from rlpipe.loop.group_buffer import GroupBuffer
from rlpipe.loop.ledger import Ledger
from rlpipe.loop.prompts import PromptStream
from rlpipe.loop.saved_groups import read_groups, write_groups
from rlpipe.loop.selection import SelectionMeter
from rlpipe.loop.staleness import StalenessGate, fresh_part
from rlpipe.metrics.values import Value
from rlpipe.types import Group, Prompt, TrajectoryStatus

LEDGER, GROUPS = "ledger.sqlite", "groups.jsonl.gz"
STALE, EQUAL, DUMPED, MASKED = "stale", "equal rewards", "dumped", "every trajectory masked"


class Backlog:
    """The backlog of one run. First call the ledger's `restore` or `clear`: it has the prompts in flight.

    version: the trainer's version at the start. steps: total steps of the run. event: see `MetricsBus.event`.
    finished: a file that `save` wrote together with this ledger. trains: whether the groups taken are trained
    on; if not, they were dumped for later and are recorded as dumped. Call `start` before any other method.
    Raises ValueError when the training set differs from the one recorded in the ledger.
    """

    def __init__(
        self,
        settings: PipelineConfig,
        prompts: PromptStream,
        ledger: Ledger,
        *,
        version: int,
        steps: int,
        event: Callable[..., None],
        finished: Path | None = None,
        trains: bool = True,
    ) -> None:
        self._trains = trains
        self._settings, self._prompts, self._ledger, self._event = settings, prompts, ledger, event
        self._meter = SelectionMeter(event)
        self._playing: dict[int, int] = {}  # index -> version when it was handed out
        self._taken: list[tuple[int, Group]] = []
        self._filtered = 0  # groups with equal rewards since the last step
        self._version = version  # the trainer's version, which engines may not serve yet

        # In-order training starts at the oldest prompt that has not ended.
        self._next = ledger.admitted_count()
        flying = ledger.unfinished()
        first = min((index for index, *_ in flying), default=self._next)
        self._buffer = GroupBuffer(first, in_order=settings.stale is Stale.WAIT)

        self._gate = StalenessGate(
            max_staleness=settings.max_staleness,
            groups_per_step=settings.prompts_per_step,
            version=version,
            ahead=settings.groups_ahead,
            skipped=self._next - len(flying) - version * settings.prompts_per_step,
            limit=steps * settings.prompts_per_step + settings.groups_ahead - settings.prompts_per_step,
        )

        # Finished groups are read from the file; every other prompt in flight is rolled out again.
        self._again: deque[int] = deque()
        self._restored = dict(read_groups(finished)) if finished else {}
        for index, group_id, instance_id, state in flying:
            self._check_instance(index, instance_id)
            if state == "complete":
                assert index in self._restored, f"the finished group {group_id} was not saved"
                continue
            if state == "generating":
                ledger.reopen(group_id)
            self._again.append(index)

    async def start(self) -> None:
        """Fill the buffer with the restored groups, and drop those that are too stale."""
        for index in self._ledger.ended_from(self._buffer.first):
            await self._buffer.skip(index)

        for index, group in self._restored.items():
            await self._buffer.put(index, group)

        self._restored = {}
        await self._drop_stale()

    async def admit_next(self) -> tuple[int, Prompt]:
        """Wait until staleness allows another prompt; return it, an interrupted one or a new one."""
        if self._again:
            index = self._again.popleft()
        else:
            await self._gate.wait_for_slot(self._next)
            index, self._next = self._next, self._next + 1
            self._ledger.admitted(index, self._prompts[index], self._gate.version)

        prompt = self._prompts[index]
        self._ledger.generating(prompt, prompt.trajectory_ids(self._settings.group_size))
        self._playing[index] = self._gate.version
        return index, prompt

    async def finished(self, index: int, group: Group) -> None:
        """Record a group that came back from its worker: buffer it, or drop it."""
        del self._playing[index]
        self._ledger.completed(group)

        # A group is dropped here if it is masked, too stale, or without an advantage.
        kept = self._fresh(group)
        if all(t.status is TrajectoryStatus.MASKED for t in group.trajectories):
            # A step must never train on an empty group.
            await self._drop(index, MASKED)
        elif kept is None:
            await self._drop(index, STALE)
        elif self._filters(kept):
            self._filtered += 1
            await self._drop(index, EQUAL)
        else:
            await self._buffer.put(index, kept)

    async def take_batch(self) -> list[Group]:
        """Wait for the groups of the next step and return them by index."""
        self._taken = await self._buffer.take_finished_groups(self._settings.prompts_per_step)
        return [group for _, group in self._taken]

    async def trained(self, version: int) -> list[int]:
        """Record that the groups taken were trained, which made `version`, or that they were dumped.

        Returns groups in flight that this version makes too stale.
        """
        self._version = version
        groups = [group for _, group in self._taken]
        if self._trains:
            self._ledger.trained(groups, version)
        else:
            self._ledger.all_dropped(groups, DUMPED)

        # The selection meter compares these groups with all generated ones.
        for group in groups:
            self._meter.trained(group)

        self._taken, self._filtered = [], 0
        if self._settings.stale is not Stale.DROP:
            return []

        await self._drop_stale()

        # Groups in flight that began too many versions ago can no longer be trained.
        late = [i for i, begun in self._playing.items() if version - begun > self._settings.max_staleness]
        for index in late:
            del self._playing[index]
            await self._drop(index, STALE)
        return late

    async def open_gate(self, version: int) -> None:
        """Admit prompts for `version`, now served by every engine."""
        await self._gate.set_version(version)

    def metrics(self) -> dict[str, Value]:
        """Return the metrics of selection and of the prompts in flight."""
        oldest = self._ledger.oldest_admission()
        age = 0 if oldest is None else self._version - oldest
        unfinished = len(self._playing) + len(self._buffer) + len(self._again)
        return self._meter.metrics(unfinished=unfinished, oldest=age)

    def save(self, directory: Path) -> Callable[[], None]:
        """Write the current ledger into a directory; return a function that adds the finished groups.

        The function may be called later and on another thread; it writes the groups
        that were finished when `save` was called.
        """
        assert not self._taken, "a batch is being trained: its groups are neither finished nor trained"

        groups = self._buffer.items()
        self._ledger.save(directory / LEDGER)
        return partial(write_groups, directory / GROUPS, groups)

    def _check_instance(self, index: int, instance_id: str) -> None:
        if self._prompts[index].instance_id != instance_id:
            raise ValueError(
                f"prompt {index} of this run was {instance_id!r} and is now "
                f"{self._prompts[index].instance_id!r}: the training set, env or run.seed changed since the "
                "checkpoint. Restore them, or choose another run.dir."
            )

    def _filters(self, group: Group) -> bool:
        settings = self._settings
        below_limit = self._filtered < settings.filter_limit * settings.prompts_per_step
        return settings.filter_equal_rewards and below_limit and group.has_equal_rewards()

    async def _drop_stale(self) -> None:
        """Drop buffered groups and trajectories that are too stale at the trainer's version."""
        for index, group in self._buffer.items():
            kept = self._fresh(group)
            if kept is None:
                await self._drop(index, STALE)
            elif kept is not group:
                self._buffer.replace(index, kept)

    def _fresh(self, group: Group) -> Group | None:
        """Return the part of a group that may be trained; None when it is empty."""
        if self._settings.stale is not Stale.DROP:
            return group

        kept, stale = fresh_part(group, self._version, self._settings.max_staleness)
        if stale:
            self._meter.lost(group, stale)
            self._ledger.trajectories_dropped(stale, STALE)

        return kept

    async def _drop(self, index: int, reason: str) -> None:
        self._ledger.dropped(self._prompts[index].group_id, reason)
        self._meter.dropped(reason)
        await self._buffer.skip(index)
        await self._gate.release_slot()
