"""Chooses the number of rollout workers: adds one while the trainer waits, if that makes the run faster.

Owns only the decision, from committed records; `actors/pool.py` executes it. Consider the last `WINDOW` steps
(except the first one after a change, which mixes both sizes). Let w be the share of their time in which the
trainer waited for rollouts, b the share in which a worker was generating, and n the number of workers:

    the last worker added raised tokens a second by less than PAYS        one fewer
    w >= WAITS and b >= BUSY, `pause` steps after the last change         one more, up to cluster.max_workers
    w < IDLE and b * n < (n - 1) * BUSY                                   one fewer, down to rollout.workers

`pause` is WINDOW at first and doubles whenever an added worker is removed again or cannot be started, so
there are at most log2(steps) failed trials. The rate is measured in tokens a second, not in steps a second,
because the length of answers changes while a policy learns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WINDOW, WAITS, BUSY, IDLE, PAYS = 8, 0.2, 0.6, 0.05, 0.05
STEP, WAIT, TOKENS = "timing_s/step", "timing_s/wait_rollout", "perf/total_num_tokens"
GENERATING = "perf/utilisation/rollout"


class Growth:
    """Decides the number of workers. fewest, most: bounds; the run starts with fewest. wanted: the target."""

    def __init__(self, fewest: int, most: int) -> None:
        self._fewest, self._most, self._workers, self.wanted = fewest, max(fewest, most), fewest, fewest
        self.reason = ""
        self._before: float | None = None  # tokens a second before the last worker was added
        self._pause, self._grew, self._requested = WINDOW, False, 0
        self._steps = 0  # steps since the last change
        self._records: list[list[float]] = []

    def requested(self, change: int) -> None:
        """Record that a user added workers, or drained some (change < 0); then call `set_current`."""
        self._requested += change

    def set_current(self, workers: int) -> None:
        """Record the number of workers; call it when none is joining or leaving."""
        # Never undo a user's change: do not add drained workers again, or remove added ones.
        if self._requested < 0:
            self._most, self._fewest = min(self._most, workers), min(self._fewest, workers)
        elif self._requested > 0:
            self._fewest += self._requested

        # The number changed for another reason than the last decision, so its effect cannot be measured.
        if self._requested or workers not in (self._workers, self.wanted):
            self._before, self._grew = None, False

        if self._requested or workers != self._workers:
            self._workers = self.wanted = workers
            self._steps = self._requested = 0

    def refused(self) -> None:
        """Record that the target cannot be reached now, to try again later."""
        self.wanted, self._before, self._grew, self._steps = self._workers, None, False, 0
        self._pause *= 2

    def see(self, record: Mapping[str, Any]) -> None:
        """Update the target from a committed record."""
        figures = [record.get(name) for name in (STEP, WAIT, GENERATING, TOKENS)]
        if self.wanted != self._workers or None in figures:
            return

        # The first record after a change mixes both sizes, so WINDOW + 1 records are needed.
        self._records, self._steps = [*self._records, figures][-WINDOW:], self._steps + 1
        if self._steps <= WINDOW:
            return

        # Compute shares of time and the rate over the window.
        steps, workers = self._records, self._workers
        seconds = sum(step for step, *_ in steps)
        waited = sum(wait for _, wait, *_ in steps) / seconds
        busy = sum(step * share for step, _, share, _ in steps) / seconds
        rate = sum(tokens for *_, tokens in steps) / seconds

        # First check whether the last added worker made the run faster, then whether to change the number
        # again.
        before, self._before = self._before, None
        if before is not None and rate < (1 + PAYS) * before and workers > self._fewest:
            self._shrink(f"{rate:.3g} trained tokens a second, and {before:.3g} with one worker fewer")
        elif waited >= WAITS and busy >= BUSY and workers < self._most and self._steps > self._pause:
            self.wanted, self._before, self._grew = workers + 1, rate, True
            self.reason = f"the trainer waits {waited:.0%} of its time, workers generate {busy:.0%}"
        elif waited < IDLE and busy * workers < (workers - 1) * BUSY and workers > self._fewest:
            self._shrink(f"the trainer waits {waited:.0%} of its time, workers generate {busy:.0%}")

    def _shrink(self, reason: str) -> None:
        self.wanted, self.reason = self._workers - 1, reason
        # If the added worker did not make the run faster, wait longer before the next one.
        self._pause *= 2 if self._grew else 1
        self._grew = False
