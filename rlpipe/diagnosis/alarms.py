"""Alarms: events that report when a rule over committed records begins to fail, and when it passes again.

Owns the evaluation of the rules and its state. `rlpipe.config.alarms` defines the rules, and docs/alarms.md
explains what to do. Flow: the controller passes every record to `Alarms.see` and the time to `Alarms.tick`.
An alarm is an event in events.jsonl, and a warning on the console. An alarm rings when its rule begins to
fail, and again only after an observation that passed. A resumed run passes its earlier records to
`Alarms.replay`, so that alarms that rang before the restart do not ring again.
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
    """An alarm rule and its state.

    failing: number of successive observations that failed.
    ringing: whether the alarm rang and the rule has not passed since.
    value, limit: value and limit at the last observation.

    >>> watch = Watch(AlarmRule(metric="actor/ppo_kl", threshold=0.2))
    >>> [watch.see({"actor/ppo_kl": x}) for x in (0.1, 0.3, 0.4, 0.1)]
    [None, True, None, False]
    """

    rule: AlarmRule
    failing: int = 0
    ringing: bool = False
    value: float = float("nan")
    limit: float = float("nan")
    _first: list[float] = field(default_factory=list)  # first values of the run, up to `over`
    _last: deque[float] = field(default_factory=deque)  # last values, up to `over`
    _since: list[float] = field(default_factory=list)  # values since the last reading of `against`
    _best: tuple[float, float] | None = None  # metric and `against`, when `against` was highest
    _highest: float = float("-inf")

    def see(self, record: Mapping[str, Any]) -> bool | None:
        """Evaluate the rule; return True if it begins to ring, False if it passes again, else None."""
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
        """Return whether the rule fails at this record; None if the record does not allow a decision."""
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

        # The other tests compare with a median of the last values, or of the run's first values.
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

        if rule.test is AlarmTest.DECLINE:
            self.limit = usual - rule.threshold
            return value < self.limit
        self.limit = rule.threshold * usual
        return value < self.limit if rule.test is AlarmTest.DROP else value > self.limit

    def _diverges(self, value: object, against: Any) -> bool | None:
        """Return whether the metric grew by more than the threshold since `against` was highest."""
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
    """The alarm rules of a run.

    watches: watch of each rule, by the rule's name.
    rung: names of the rules that ever rang.

    Raises ValueError for a rule on a metric that is not declared. event: called like `MetricsBus.event`.
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

        # The first step includes compilation and warm-up, so it may take three times as long.
        self._stall_seconds = 60 * config.stall_minutes if config.enabled else 0.0
        self._timeout_seconds = 3 * self._stall_seconds
        self._step, self._last_record_at, self._stalled = 0, time.monotonic(), False

    def replay(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Evaluate the rules on records of an earlier process, without emitting events."""
        for record in records:
            self.rung |= {name for name, watch in self.watches.items() if watch.see(record)}

    def see(self, record: Mapping[str, Any]) -> None:
        """Evaluate the rules on a committed record."""
        self._step, self._last_record_at = record.get(STEP, self._step), time.monotonic()
        self._timeout_seconds = self._stall_seconds
        if self._stalled:
            self._stalled = False
            self._event("alarm_over", alarm="stall", step=self._step)

        for name, watch in self.watches.items():
            change = watch.see(record)
            if change is True:
                self.rung.add(name)
                self._event(
                    "alarm", alarm=name, step=self._step, **_fields(watch), see=f"docs/alarms.md#{name}"
                )
            elif change is False:
                self._event("alarm_over", alarm=name, step=self._step)

    def tick(self, now: float | None = None) -> None:
        """Raise the alarm if there was no record for too long. now: time by `time.monotonic`."""
        silent = (time.monotonic() if now is None else now) - self._last_record_at
        if self._stall_seconds and silent > self._timeout_seconds and not self._stalled:
            self._stalled = True
            self._event(
                "alarm", alarm="stall", step=self._step, silent_s=round(silent), see="docs/alarms.md#stall"
            )


def _fields(watch: Watch) -> dict[str, Any]:
    """Return the fields of an alarm's event."""
    rule = watch.rule
    return {"metric": rule.metric, "test": str(rule.test), "value": watch.value, "limit": watch.limit}
