"""Alarms: rules over committed records; an event when a rule begins to fail, another when it holds again.

Owns the judging and its memory; the rules are `rlpipe.config.alarms`, what to do is docs/alarms.md. Flow: the
controller shows every record to `Alarms.see`, and the clock to `Alarms.tick`; what rings goes through
`event`, thereby into events.jsonl and as a warning line to the console. An alarm rings once per crossing: it
rings again only after an observation at which its rule held. A resumed run shows the records it kept to
`Alarms.replay`, so that it remembers what the run before it did.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rlpipe.config.alarms import AlarmRule, AlarmsConfig, AlarmTest
from rlpipe.metrics.names import declared

STEP = "training/global_step"
Event = Callable[..., None]


@dataclass(slots=True)
class Watch:
    """One rule and what it remembers. failing: observations in a row; ringing: since its last crossing.

    >>> watch = Watch(AlarmRule(metric="actor/ppo_kl", threshold=0.2))
    >>> [watch.see({"actor/ppo_kl": x}) for x in (0.1, 0.3, 0.4, 0.1)]
    [None, True, None, False]
    """

    rule: AlarmRule
    failing: int = 0
    ringing: bool = False
    value: float = float("nan")
    limit: float = float("nan")
    _first: list[float] = field(default_factory=list)
    _last: deque[float] = field(default_factory=deque)
    _since: list[float] = field(default_factory=list)  # of the metric, since the last reading of `against`
    _best: tuple[float, float] | None = None  # metric and `against` when the latter was highest
    _highest: float = float("-inf")

    def see(self, record: Mapping[str, Any]) -> bool | None:
        """True: rings from now on; False: holds again; None: as before."""
        failed = self._fails(record)
        if failed is None:
            return None
        self.failing = self.failing + 1 if failed else 0
        if failed and not self.ringing and self.failing >= self.rule.patience:
            self.ringing = True
            return True
        if not failed and self.ringing:
            self.ringing = False
            return False
        return None

    def _fails(self, record: Mapping[str, Any]) -> bool | None:
        """Whether the rule fails at this record; None when there is nothing to judge."""
        rule, value = self.rule, record.get(self.rule.metric)
        if rule.test is AlarmTest.DIVERGE:
            return self._diverges(value, record.get(rule.against))
        if not isinstance(value, (int, float)):
            return None
        self.value = value
        if rule.test in (AlarmTest.ABOVE, AlarmTest.BELOW):
            self.limit = rule.threshold
            return value > rule.threshold if rule.test is AlarmTest.ABOVE else value < rule.threshold
        if rule.test is AlarmTest.FALL:
            self._highest = max(self._highest, value)
            self.limit = rule.threshold * self._highest
            return value < self.limit
        if rule.test is AlarmTest.SPIKE:
            usual = median(self._last) if len(self._last) == rule.over else None
            self._last.append(value)
            while len(self._last) > rule.over:
                self._last.popleft()
        else:
            usual = median(self._first) if len(self._first) == rule.over else None
            if usual is None:
                self._first.append(value)
        if usual is None or usual <= 0:
            return None
        self.limit = rule.threshold * usual
        return value < self.limit if rule.test is AlarmTest.DROP else value > self.limit

    def _diverges(self, value: Any, against: Any) -> bool | None:
        if isinstance(value, (int, float)):
            self._since.append(value)
        if not isinstance(against, (int, float)) or not self._since:
            return None
        mean, self._since = sum(self._since) / len(self._since), []
        if self._best is None or against > self._best[1]:
            self._best = mean, float(against)
        self.value, self.limit = mean - self._best[0], self.rule.threshold
        return self.value > self.limit


class Alarms:
    """All rules of a run. event: as `MetricsBus.event`. rung: names of those that ever rang.

    Raises ValueError for a rule on a metric that nobody declares.
    """

    def __init__(self, config: AlarmsConfig, event: Event) -> None:
        self._event = event
        rules = config.rules.items() if config.enabled else ()
        self.watches = {name: Watch(rule) for name, rule in rules if rule.enabled}
        self.rung: set[str] = set()
        for name, watch in self.watches.items():
            for metric in filter(None, (watch.rule.metric, watch.rule.against)):
                try:
                    declared(metric)
                except ValueError as error:
                    raise ValueError(f"metrics.alarms.rules.{name}: {error}") from None
        self._stall = 60 * config.stall_minutes if config.enabled else 0.0
        self._step, self._heard, self._stalled = 0, time.monotonic(), False
        self._patience = 3 * self._stall

    def replay(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Judge records that were committed before; what rang then does not ring again."""
        for record in records:
            self.rung |= {name for name, watch in self.watches.items() if watch.see(record)}

    def see(self, record: Mapping[str, Any]) -> None:
        """Judge a committed record."""
        self._step, self._heard, self._patience = record.get(STEP, self._step), time.monotonic(), self._stall
        if self._stalled:
            self._stalled = False
            self._event("alarm_over", alarm="stall", step=self._step)
        for name, watch in self.watches.items():
            change = watch.see(record)
            if change is True:
                self.rung.add(name)
                self._event(
                    "alarm", alarm=name, step=self._step, **_facts(watch), see=f"docs/alarms.md#{name}"
                )
            elif change is False:
                self._event("alarm_over", alarm=name, step=self._step)

    def tick(self, now: float | None = None) -> None:
        """Judge the silence since the last record; now: of `time.monotonic`."""
        silent = (time.monotonic() if now is None else now) - self._heard
        if self._stall and silent > self._patience and not self._stalled:
            self._stalled = True
            self._event(
                "alarm", alarm="stall", step=self._step, silent_s=round(silent), see="docs/alarms.md#stall"
            )


def _facts(watch: Watch) -> dict[str, Any]:
    rule = watch.rule
    return {"metric": rule.metric, "test": str(rule.test), "value": watch.value, "limit": watch.limit}
