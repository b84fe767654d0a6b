"""Chooses how many tokens to draft: a fixed number, or one based on measured costs and acceptance.

Owns the choice; measures nothing itself. A policy chooses gamma before a step drafts anything, and learns
only from sums over finished steps. So the decision to verify token i cannot depend on token i or later
tokens, and a varying gamma stays lossless (a rule that reads q_i(x_i) would bias the output).

    throughput(batch, g) = batch * (1 + sum_{k<=g} alpha_1 ... alpha_k) / seconds(batch, g)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import exp, log
from operator import mul
from typing import Protocol


def rare_sizes(sizes: Sequence[int]) -> list[int]:
    """Select from ascending batch sizes the ones that suffice for a rarely used gamma.

    A step with another batch size runs with the next larger selected size; at most a third of its rows are
    then empty.

    >>> rare_sizes([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16])
    [1, 2, 3, 4, 6, 8, 12, 16]
    """
    kept = [*sizes[-1:]]
    while smaller := [size for size in sizes if size < kept[-1]]:
        kept.append(min((size for size in smaller if 3 * size >= 2 * kept[-1]), default=smaller[-1]))
    return kept[::-1]


class GammaPolicy(Protocol):
    """Chooses gamma for a decode step, the same for all rows."""

    def choose(self, batch: int) -> int:
        """Return the drafts per row for the next step of `batch` rows; 0 disables speculation."""
        ...

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from the sums of a finished step.

        drafted: for k = 1, 2, ..., the number of rows that reached depth k.
        accepted: the number of those rows that accepted depth k.
        """


class FixedGamma:
    """Always chooses the same gamma."""

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def choose(self, batch: int) -> int:
        """Return gamma."""
        return self._gamma

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Ignore the sums."""


class AdaptiveGamma:
    """Chooses the gamma with the highest throughput predicted from measured costs and recent acceptance.

    seconds: measured duration of a step by (batch, gamma), for gamma 0..max and some batch sizes; other sizes
    are interpolated. The durations of the run's steps correct these values. The choice depends only on
    ratios of durations between gammas. To measure these, another gamma, mostly a neighbour of the gamma in
    use, is tried for a few steps.

    The acceptance at each depth is a decayed ratio of sums, shrunk towards the acceptance of the previous
    depth (depth 1: towards `prior`). So a depth that is not drafted is assumed to have the acceptance of the
    deepest drafted one. If the latest rows contradict the estimate, prompts or weights have changed, and
    older counts are dropped.

    Trials have a budget. Each step adds a share `BUDGET` of its time, and a trial begins when the budget
    covers its expected loss. A trial can lose more than expected, for example if a draft model must first
    read tokens that it has missed; the next trial then waits until the budget covers that loss, too. The
    first trials of each neighbour do not wait. A part of the budget is for all gammas in turn, in case wrong
    costs of the neighbours hide a better one; the neighbours do not wait for it.

    The gamma in use changes only if this promises `margin` more throughput. Doing without drafts need only be
    faster, so that drafts that do not pay are given up at once.

    >>> costs = {(1, 0): 1.0, (1, 1): 1.2, (1, 2): 1.4, (64, 0): 4.0, (64, 1): 8.0, (64, 2): 12.0}
    >>> policy = AdaptiveGamma(costs)
    >>> policy.choose(1), policy.choose(64)
    (2, 0)
    """

    MEMORY, RECENT = 256, 8  # number of rows after which counts, and latest counts, have decayed to 1/e
    SURPRISE = 3.0  # log likelihood ratio, nats, of the latest rows: their acceptance against the estimate
    PRIOR_ROWS, SHRINK_ROWS = (
        16.0,
        2.0,
    )  # weight in rows of `prior`, and of each depth's acceptance in the estimate of the next depth
    PACE, MIN_LESSON = 0.1, 0.1  # weight of one step in the pace, minimum weight in the cost of another gamma
    MEASURED = 1  # weight in steps of the initially measured cost, so that the first steps correct it most
    OUTLIER = 1.5  # slower steps count as if they took this many times the expected duration
    BUDGET, MAX_STEPS = 0.005, 16  # share of the time for trials; bound of savings and debts, in steps
    FREE_TRIALS, MIN_INTERVAL = 2, 8  # free trials of a neighbour; minimum steps between two trials
    SHARES = 0.75, 0.25  # of the budget, for neighbours, and for gammas in turn, which neighbours might hide

    def __init__(
        self, seconds: Mapping[tuple[int, int], float], *, prior: float = 0.75, margin: float = 0.02
    ) -> None:
        self._batches = sorted({batch for batch, _ in seconds})
        self._max = max(gamma for _, gamma in seconds)
        self._seconds = dict(seconds)
        self._expected: dict[int, list[float]] = {}  # batch -> seconds by gamma
        self._prior, self._margin = prior, margin
        self._counts = [[0.0, 0.0] for _ in range(self._max)]  # by depth: rows reached, rows accepted
        self._latest = [[0.0, 0.0] for _ in range(self._max)]
        if self._counts:
            self._counts[0] = [self.PRIOR_ROWS, self.PRIOR_ROWS * prior]

        self._last: dict[int, int] = {}  # choice by batch bucket
        self._pace: dict[int, float] = {}  # log of measured over expected seconds, by batch bucket

        self._saved = [0.0, 0.0]  # seconds saved for trials of neighbours, and of any gamma
        self._since = 0  # steps since the last trial began
        self._trial = 0, 0  # (bucket, gamma) of the last trial
        self._left = 0  # remaining steps of this trial
        self._purse = 0  # what the last trial was paid from
        self._far = 0  # trials of any gamma so far, which take gammas in turn
        self._trials: Counter[tuple[int, int]] = Counter()  # trials begun, by (bucket, gamma)
        self._lessons: Counter[tuple[int, int]] = Counter()  # cost corrections, by (bucket, gamma)
        self._upwards = False  # whether the last trial was of a larger gamma
        self._before: tuple[int, int] | None = None  # (bucket, gamma) of the previous step

    @property
    def alphas(self) -> list[float]:
        """Estimated acceptance at depth k, given that depth k - 1 was accepted, for k = 1..max."""
        rates, rate = [], self._prior
        for reached, accepted in self._counts:
            rate = (accepted + self.SHRINK_ROWS * rate) / (reached + self.SHRINK_ROWS)
            rates.append(rate)
        return rates

    def seconds(self, batch: int, gamma: int) -> float:
        """Return the interpolated duration of a step; proportional to `batch` above the largest measured."""
        return self._costs(batch)[gamma]

    def throughput(self, batch: int, gamma: int) -> float:
        """Predict tokens per second."""
        return batch * self._speeds(batch)[gamma]

    def choose(self, batch: int) -> int:
        """Choose gamma by the rule that the class describes; arguments as in `GammaPolicy.choose`."""
        bucket, speeds = _bucket(batch), self._speeds(batch)
        best = speeds.index(max(speeds))
        last = self._last.get(bucket, best)
        if best and speeds[best] < (1 + self._margin) * speeds[last]:
            best = last
        self._last[bucket] = best

        # Every step adds to the budget of trials; both savings and debts are bounded.
        self._since += 1
        cost = self._costs(batch)[best]
        bound = self.MAX_STEPS * cost
        for purse, share in enumerate(self.SHARES):
            saved = max(self._saved[purse], -bound) + share * self.BUDGET * cost
            self._saved[purse] = min(saved, bound)

        # A trial continues for its number of steps.
        if self._left and self._trial[0] == bucket:
            self._left -= 1
            return self._trial[1]
        return self._explore(batch, best, speeds)

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from the sums of a finished step; arguments as in `GammaPolicy.observe`."""
        estimates, surprised = self.alphas, False
        for depth, sums in enumerate(zip(drafted, accepted, strict=True)):
            if not sums[0]:
                break
            self._counts[depth] = _decayed(self._counts[depth], sums, self.MEMORY)
            self._latest[depth] = rows, good = _decayed(self._latest[depth], sums, self.RECENT)
            evidence = min(rows, self.RECENT) * _divergence(good / rows, estimates[depth])
            surprised = surprised or evidence > self.SURPRISE

        # Prompts or weights have changed, so keep only the latest rows.
        if surprised:
            self._latest[len(drafted) :] = [[0.0, 0.0] for _ in self._latest[len(drafted) :]]
            self._counts = [list(counts) for counts in self._latest]

    def timed(self, batch: int, gamma: int, seconds: float) -> None:
        """Learn from the duration of a step during which no request joined the batch.

        The first step after a change of gamma is not used: it includes the cost of the change.
        """
        bucket = _bucket(batch)
        before, self._before = self._before, (bucket, gamma)
        pace = self._pace.get(bucket)
        if before != (bucket, gamma):
            # The loss in the first step of a trial is subtracted from the budget.
            if pace is not None and gamma != self._last.get(bucket):
                self._saved[self._purse] -= max(0.0, seconds / exp(pace) - self._costs(batch)[gamma])
            return

        # Steps with the gamma in use update the pace. Other steps correct their gamma's cost relative to it.
        ratio = min(log(seconds / self._costs(batch)[gamma]), (pace or 0.0) + log(self.OUTLIER))
        if gamma == self._last.get(bucket):
            self._pace[bucket] = ratio if pace is None else pace + self.PACE * (ratio - pace)
        elif pace is not None:
            lesson = max(self.MIN_LESSON, 1 / (1 + self.MEASURED + self._lessons[bucket, gamma]))
            self._lessons[bucket, gamma] += 1
            low, high, fraction = self._neighbours(batch)
            for node, weight in ((low, 1 - (fraction or 0)), (high, fraction or 0)):
                self._seconds[node, gamma] *= exp(lesson * weight * (ratio - pace))
            self._expected.clear()

    def measured(self, seconds: Mapping[tuple[int, int], float]) -> None:
        """Add measured durations of more batch sizes, each for all gammas."""
        self._seconds |= seconds
        self._batches = sorted({batch for batch, _ in self._seconds})
        self._expected.clear()

    def speedup(self, batch: int, gamma: int) -> float:
        """Predict the ratio of the throughput with gamma to the throughput without drafts."""
        speeds = self._speeds(batch)
        return speeds[gamma] / speeds[0]

    def _explore(self, batch: int, used: int, speeds: Sequence[float]) -> int:
        """Return a gamma to try, mostly `used` + 1 or `used` - 1 in turn; `used` if no trial is due."""
        self._left = 0
        if self._since < self.MIN_INTERVAL:
            return used

        # Neighbours do not wait until a trial of a much slower gamma can be paid for.
        bucket, upwards = _bucket(batch), used < self._max and not (self._upwards and used)
        near, far = min(used + 1, self._max) if upwards else max(used - 1, 0), self._far % (self._max + 1)
        costs = self._costs(batch)
        for purse, gamma in ((1, far), (0, near)):
            # A deeper draft needs enough rows to estimate its acceptance; shallower depths are already known.
            steps = max(2, self.RECENT // batch) if gamma == used + 1 else 2
            lost = steps * costs[gamma] * max(0.0, 1 - speeds[gamma] / speeds[used])
            lost = min(lost, self.MAX_STEPS * costs[used])
            free = gamma == near and self._trials[bucket, gamma] < self.FREE_TRIALS
            if gamma == used or (lost > self._saved[purse] and not free):
                continue

            if not free:
                self._saved[purse] -= lost
            self._far += purse
            self._upwards, self._purse = gamma > used, purse
            self._trial, self._left, self._since = (bucket, gamma), steps - 1, 0
            self._trials[bucket, gamma] += 1
            return gamma
        self._far += far == used
        return used

    def _speeds(self, batch: int) -> list[float]:
        """Predict the tokens per second of one row, by gamma."""
        tokens = accumulate(accumulate(self.alphas, mul, initial=1.0))
        return [count / cost for count, cost in zip(tokens, self._costs(batch), strict=True)]

    def _costs(self, batch: int) -> list[float]:
        """Return the expected seconds of a step of `batch` rows, by gamma."""
        if batch not in self._expected:
            low, high, fraction = self._neighbours(batch)
            scale, fraction = (batch / low, 0.0) if fraction is None else (1.0, fraction)
            self._expected[batch] = [
                scale * ((1 - fraction) * self._seconds[low, gamma] + fraction * self._seconds[high, gamma])
                for gamma in range(self._max + 1)
            ]
        return self._expected[batch]

    def _neighbours(self, batch: int) -> tuple[int, int, float | None]:
        """Return the measured sizes around `batch`, and the position of `batch` between them.

        The position is 0 at the smaller and 1 at the larger size; None if `batch` exceeds all sizes.
        """
        below = max((b for b in self._batches if b <= batch), default=self._batches[0])
        above = min((b for b in self._batches if b >= batch), default=None)
        if above is None:
            return below, below, None
        return below, above, (batch - below) / (above - below) if above > below else 0.0


def break_even_acceptance(
    seconds: Mapping[tuple[int, int], float],
) -> dict[tuple[int, int], float | None]:
    """Compute the acceptance per draft token at which drafts neither gain nor lose time.

    It is the root a in [0, 1] of this equation, with c = seconds(batch, gamma) / seconds(batch, 0):

        1 + a + ... + a^gamma = c

    This assumes the same acceptance a at every depth, given that the previous depth was accepted.

    Args:
        seconds: duration of a step by (batch, gamma), such as `EmbeddedEngine.costs`. Must have gamma = 0 for
            every batch. Only ratios matter, so any unit can be used.

    Returns:
        Acceptance by (batch, gamma) for gamma >= 1; 0.0 if drafts cost no time; None if drafts lose time even
        when all are accepted.

    Raises:
        ValueError: a duration is not positive, or a batch lacks gamma = 0.

    >>> break_even_acceptance({(1, 0): 10.0, (1, 1): 12.5, (8, 0): 10.0, (8, 1): 21.0})
    {(1, 1): 0.25, (8, 1): None}
    """
    if any(value <= 0 for value in seconds.values()):
        raise ValueError(f"durations of steps must be positive, got {dict(seconds)}.")
    lacking = {batch for batch, _ in seconds} - {batch for batch, gamma in seconds if gamma == 0}
    if lacking:
        raise ValueError(f"no duration without drafts for batches {sorted(lacking)}: measure gamma = 0, too.")

    return {
        (batch, gamma): _geometric_root(gamma, value / seconds[batch, 0])
        for (batch, gamma), value in seconds.items()
        if gamma
    }


def _geometric_root(degree: int, target: float) -> float | None:
    """Solve 1 + a + ... + a^degree = target for a in [0, 1]; return None if the target exceeds degree + 1."""
    if target > degree + 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        if sum(middle**power for power in range(degree + 1)) < target:
            low = middle
        else:
            high = middle
    return round((low + high) / 2, 9)


def _bucket(batch: int) -> int:
    """Return the bucket of a batch (1, 2, 3 to 4, 5 to 8, ... rows); it is the same for 8 and 7 rows."""
    return (batch - 1).bit_length()


def _decayed(counts: Sequence[float], sums: tuple[int, int], memory: int) -> list[float]:
    """Add a step's sums to the counts of a depth, which decay; a step of `memory` rows removes old counts."""
    reached, accepted = sums
    weight = max(0.0, 1 - reached / memory)
    return [counts[0] * weight + reached, counts[1] * weight + accepted]


def _divergence(seen: float, estimate: float) -> float:
    """Return the KL divergence of two coins, in nats; `estimate` is clamped to avoid 0 and 1."""
    estimate = min(max(estimate, 1e-9), 1 - 1e-9)
    pairs = (seen, estimate), (1 - seen, 1 - estimate)
    return sum(share * log(share / expected) for share, expected in pairs if share > 0)
