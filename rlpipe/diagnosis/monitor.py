"""What looks at a run while it goes on: recorded rollouts, probe, alarms, advice.

Owns their order for the controller, which shows it every batch before the update and every committed record:

    validated(trajectories) -> held-out contexts, where a draft is trained online
    before_update(groups) -> rollouts/step_N.jsonl, probe/step_N.jsonl, probe/* metrics
    see(record)           -> alarm and advice events; `draft_harmed` says when to end the draft's training
    watch()               -> the alarm of a run in which nothing happens
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe.config.alarms import DRAFT_HARMED
from rlpipe.config.spec import SpecMode
from rlpipe.diagnosis.advice import Advisor, Setup
from rlpipe.diagnosis.alarms import Alarms
from rlpipe.diagnosis.probe import Probe, Read
from rlpipe.metrics.jsonl import read_jsonl
from rlpipe.metrics.rollouts import Recorder, RolloutFiles
from rlpipe.metrics.values import Value
from rlpipe.types import Group, Trajectory

if TYPE_CHECKING:
    from rlpipe.config.run import Config

TICK_SECONDS = 10.0
CHAIN_RULES = {SpecMode.REJECTION: "rejection", SpecMode.TARGET_ONLY: "target_only"}


class Monitor:
    """Watches one run. event: `MetricsBus.event`. Raises ValueError for an alarm on an unknown metric."""

    def __init__(self, config: Config, run_dir: Path, event: Callable[..., None]) -> None:
        settings, spec = config.metrics, config.spec
        drafts = spec.needs_mtp and config.rollout.temperature > 0
        recorder = Recorder(event)
        self._rollouts = RolloutFiles(run_dir, settings.rollouts_per_step, recorder)
        self._probe = Probe(settings.probe, run_dir, config.run.steps, recorder) if drafts else None
        self._rule = CHAIN_RULES.get(spec.mode)
        self._online = config.draft.online
        self._records = run_dir / "metrics.jsonl"
        self._alarms = Alarms(settings.alarms, event)
        setup = Setup.from_settings(asdict(config))
        self._advisor = Advisor(setup, event) if settings.advice.enabled else None

    def forget_after(self, step: int) -> None:
        """Remove records that a run which continues after `step` will write again, and remember the rest."""
        if self._records.is_file():
            self._alarms.replay(read_jsonl(self._records)[0])
        self._rollouts.forget_after(step)
        if self._probe is not None:
            self._probe.forget_after(step)

    @property
    def draft_harmed(self) -> bool:
        """Whether training the draft online made it worse where it is not trained (docs/alarms.md)."""
        return self._online and DRAFT_HARMED in self._alarms.rung

    def validated(self, version: int, trajectories: Sequence[Trajectory]) -> None:
        """Played on held-out instances."""
        if self._probe is not None and self._online:
            self._probe.hold_out(trajectories, version)

    async def before_update(self, version: int, groups: Sequence[Group], read: Read) -> dict[str, Value]:
        """Record the batch of update `version` + 1, and read the probe set when that is due."""
        step = version + 1
        self._rollouts.write(step, groups, version)
        if self._probe is None or not self._probe.due(step):
            return {}
        visited = self._rollouts.chosen(groups)
        return await self._probe.measure(step, version, groups, visited, read, rule=self._rule)

    def see(self, record: Mapping[str, Any]) -> None:
        """Judge a committed record."""
        self._alarms.see(record)
        if self._advisor is not None:
            self._advisor.see(record)

    async def watch(self) -> None:
        """Judge the silence between records, until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._alarms.tick()
