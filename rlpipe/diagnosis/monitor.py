"""Watches a run while it is running: recorded rollouts, probe, alarms, advice.

Owns the order in which these are called. The controller passes every batch before its update, and every
committed record:

    validated(trajectories) -> held-out contexts, if a draft is trained online
    before_update(groups) -> rollouts/step_N.jsonl, probe/step_N.jsonl, probe/* metrics
    split(values)         -> acceptance_split/* metrics of the step, before it is committed
    see(record)           -> alarm and advice events; `draft_harmed`: end the draft's training
    watch()               -> the alarm of a run that commits no records
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe.config.alarms import DRAFT_HARMED
from rlpipe.config.spec import SpecMode
from rlpipe.diagnosis.acceptance_split import EARLY_STEPS, AcceptanceSplit, early_steps
from rlpipe.diagnosis.advice import Advisor, Setup
from rlpipe.diagnosis.alarms import Alarms
from rlpipe.diagnosis.probe import Probe, Read, read_probes
from rlpipe.metrics.jsonl import read_jsonl
from rlpipe.metrics.rollouts import Recorder, RolloutFiles
from rlpipe.metrics.statistics import Interval
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
        self._config = config
        recorder = Recorder(event)
        self._rollouts = RolloutFiles(run_dir, settings.rollouts_per_step, recorder)
        self._probe: Probe | None = None
        if config.probes_draft:
            self._probe = Probe(settings.probe, run_dir, last_step=config.run.steps, recorder=recorder)
        # Looked-up drafts have q = 1, and are verified as in target-only.
        self._rule = CHAIN_RULES.get(spec.mode) if spec.needs_model else "target_only"
        self._run_dir, self._split = run_dir, self._new_split(config)
        self._online = config.draft.online

        self._records = run_dir / "metrics.jsonl"
        self._alarms = Alarms(settings.alarms, event)
        self._advisor: Advisor | None = None
        if settings.advice.enabled:
            self._advisor = Advisor(Setup.from_settings(asdict(config)), event)

    def resume_after(self, step: int) -> None:
        """Restore alarms and split from the records; remove files that the run will write again."""
        self._rollouts.remove_after(step)
        if self._probe is not None:
            self._probe.remove_after(step)
        if not self._records.is_file():
            return

        records = read_jsonl(self._records)[0]
        self._alarms.replay(records)

        # When a run is extended, its early phase stays the same.
        known = [record[EARLY_STEPS] for record in records if record.get(EARLY_STEPS)]
        self._split = self._new_split(self._config, early=int(known[-1]) if known else 0)
        for record in records:
            self._split.see(record)
        for head, tables in read_probes(self._run_dir):
            self._split.probed(head["step"], tables[: head["fixed"]])

    def split(self, values: Mapping[str, Any]) -> dict[str, Value]:
        """Return the split of acceptance at a step. values: all metrics of the step except validation."""
        self._split.see(values)
        return self._split.metrics()

    def _new_split(self, config: Config, early: int = 0) -> AcceptanceSplit:
        slope = config.metrics.probe.slope
        return AcceptanceSplit(
            early=early or early_steps(config.run.steps),
            rule="target_only" if config.spec.mode is SpecMode.TARGET_ONLY else "rejection",
            slope=Interval(*slope) if slope else None,
        )

    @property
    def draft_harmed(self) -> bool:
        """True if online training made the draft worse on held-out contexts (docs/alarms.md)."""
        return self._online and DRAFT_HARMED in self._alarms.rung

    def validated(self, version: int, trajectories: Sequence[Trajectory]) -> None:
        """Choose the probe's held-out contexts from trajectories of held-out instances, on the first call."""
        if self._probe is not None and self._online:
            self._probe.hold_out(trajectories, version)

    async def before_update(self, version: int, groups: Sequence[Group], read: Read) -> dict[str, Value]:
        """Record the batch of update `version` + 1, and read the probe set when it is due.

        Args:
            version: version of the trainer before the update.
            groups: the groups of the update.
            read: computes the tables of trajectories with the trainer's weights.
        Returns:
            probe/* metrics; {} when no probe is due.
        """
        step = version + 1
        self._rollouts.write(step, groups, version)
        if self._probe is None or not self._probe.due(step):
            return {}

        # Staleness is measured on the recorded trajectories, because only these have recorded drafts.
        visited = self._rollouts.recorded(groups)
        metrics = await self._probe.measure(
            step, groups, visited=visited, version=version, read=read, rule=self._rule
        )
        self._split.probed(step, self._probe.fixed)
        return metrics

    def see(self, record: Mapping[str, Any]) -> None:
        """Evaluate alarms and advice on a committed record."""
        self._alarms.see(record)
        if self._advisor is not None:
            self._advisor.see(record)

    async def watch(self) -> None:
        """Check repeatedly whether the run commits records (alarm `stall`), until cancelled."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._alarms.tick()
