"""How many tokens to draft: fixed, or chosen before each step from measured costs and acceptance.

Owns the choice; measures nothing itself. A policy is asked before a step drafts anything, and is told
only sums of steps that are over. So the decision to verify token i cannot depend on token i or later
ones, which is what keeps a varying gamma lossless (a rule on q_i(x_i) itself biases the output).

    throughput(batch, g) = batch * (1 + sum_{k<=g} alpha_1 ... alpha_k) / seconds(batch, g)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import exp, log
from operator import mul
from typing import Protocol


class GammaPolicy(Protocol):
    """Chooses gamma for a whole decode step."""

    def choose(self, batch: int) -> int:
        """Drafts per row for the next step of `batch` rows; 0 does not speculate."""

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Sums of a finished step: rows that reached depth k, and those of them that accepted it."""


class FixedGamma:
    """Always the same gamma."""

    def __init__(self, gamma: int) -> None:
        self._gamma = gamma

    def choose(self, batch: int) -> int:
        """gamma."""
        return self._gamma

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Nothing is learnt."""


class AdaptiveGamma:
    """The gamma of highest predicted throughput, from costs, which stay, and acceptance, which does not.

    seconds: measured duration of a step by (batch, gamma), for gamma 0..max and some batch sizes; others
    are interpolated. What steps take in use corrects them: only how gammas compare matters, so the gamma
    in use sets the pace, and others, mostly its neighbours, are tried for two steps and judged by it.

    Acceptance by depth is a decayed ratio of sums, drawn to that of the depth before, the first to `prior`:
    a depth that is not drafted is believed to be as good as the last one that is. Where the latest rows
    contradict it, other prompts or other weights have come, and all that is older is forgotten.

    Trials are paid for: each step saves `BUDGET` of its time, and a trial comes when that covers what it is
    expected to lose. Where it lost more, as a draft does that must first read what it has missed, the next
    one waits for that as well. The first trials of each neighbour come without waiting. A change must
    promise `margin` more throughput.

    >>> costs = {(1, 0): 1.0, (1, 1): 1.2, (1, 2): 1.4, (64, 0): 4.0, (64, 1): 8.0, (64, 2): 12.0}
    >>> policy = AdaptiveGamma(costs)
    >>> policy.choose(1), policy.choose(64)
    (2, 0)
    """

    MEMORY, RECENT = 256, 8  # rows that reached a depth after which its counts, and its latest, are 1/e
    SURPRISE = 3.0  # nats: how much more likely latest rows are at their own acceptance than at the believed
    FIRST, DRAWN = 16.0, 2.0  # rows that `prior` counts for at the first depth, and each depth for the next
    PACE, LESSON = 0.1, 0.1  # weight of one step in the pace, least weight in what another gamma costs
    MEASURED = 1  # so many lessons the cost measured at the start counts for: the first ones weigh more
    OUTLIER = 1.5  # a step that took longer than this times what was expected counts as that
    BUDGET, MOST = 0.005, 16  # of the time, for trials; steps whose time is the most that is saved, or owed
    EARLY, SOON = 2, 8  # so many trials of a neighbour are free; least steps from one trial to the next
    FAR = 4  # every so many trials one is of any gamma: two wrong costs must not hide a third

    def __init__(
        self, seconds: Mapping[tuple[int, int], float], *, prior: float = 0.75, margin: float = 0.02
    ) -> None:
        self._batches = sorted({batch for batch, _ in seconds})
        self._max = max(gamma for _, gamma in seconds)
        self._seconds = dict(seconds)
        self._expected: dict[int, list[float]] = {}  # seconds by gamma, of the batches asked for
        self._prior, self._margin = prior, margin
        self._counts = [[0.0, 0.0] for _ in range(self._max)]  # by depth: rows that reached it, and kept it
        self._latest = [[0.0, 0.0] for _ in range(self._max)]
        if self._counts:
            self._counts[0] = [self.FIRST, self.FIRST * prior]
        self._last: dict[int, int] = {}  # choice by batch bucket
        self._pace: dict[int, float] = {}  # log of measured over expected seconds, by batch bucket
        self._saved = 0.0  # seconds for trials
        self._since = 0  # steps since the last trial began
        self._trial = 0, 0  # (bucket, gamma) of the last one
        self._left = 0  # steps it has to go
        self._trials: Counter[tuple[int, int]] = Counter()  # begun, by (bucket, gamma)
        self._lessons: Counter[tuple[int, int]] = Counter()  # learnt, by (bucket, gamma)
        self._upwards = False  # the side of the last one
        self._before: tuple[int, int] | None = None  # (bucket, gamma) of the step before

    @property
    def alphas(self) -> list[float]:
        """Acceptance at depth k given that depth k - 1 was accepted, k = 1..max."""
        rates, rate = [], self._prior
        for reached, kept in self._counts:
            rate = (kept + self.DRAWN * rate) / (reached + self.DRAWN)
            rates.append(rate)
        return rates

    def seconds(self, batch: int, gamma: int) -> float:
        """Measured or interpolated duration of a step; beyond the largest batch, in proportion."""
        return self._costs(batch)[gamma]

    def throughput(self, batch: int, gamma: int) -> float:
        """Predicted tokens per second."""
        return batch * self._speeds(batch)[gamma]

    def choose(self, batch: int) -> int:
        """Choose gamma by the rule of the class; arguments of `GammaPolicy.choose`."""
        bucket, speeds = _bucket(batch), self._speeds(batch)
        best = speeds.index(max(speeds))
        last = self._last.get(bucket, best)
        if speeds[best] < (1 + self._margin) * speeds[last]:
            best = last
        self._last[bucket] = best
        self._since += 1
        cost = self._costs(batch)[best]
        self._saved = min(max(self._saved, -self.MOST * cost) + self.BUDGET * cost, self.MOST * cost)
        if self._left and self._trial[0] == bucket:
            self._left -= 1
            return self._trial[1]
        return self._explore(batch, best, speeds)

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from a step; arguments of `GammaPolicy.observe`."""
        believed, surprised = self.alphas, False
        for depth, (reached, kept) in enumerate(zip(drafted, accepted, strict=True)):
            if not reached:
                break
            self._counts[depth] = _decayed(self._counts[depth], reached, kept, self.MEMORY)
            self._latest[depth] = rows, good = _decayed(self._latest[depth], reached, kept, self.RECENT)
            evidence = min(rows, self.RECENT) * _divergence(good / rows, believed[depth])
            surprised = surprised or evidence > self.SURPRISE
        if surprised:
            self._latest[len(drafted) :] = [[0.0, 0.0] for _ in self._latest[len(drafted) :]]
            self._counts = [list(counts) for counts in self._latest]

    def timed(self, batch: int, gamma: int, seconds: float) -> None:
        """What a step took in which nobody joined.

        The first step of a gamma teaches nothing of its cost: it also pays for the change.
        """
        bucket = _bucket(batch)
        before, self._before = self._before, (bucket, gamma)
        known = self._pace.get(bucket)
        if before != (bucket, gamma):
            if known is not None and gamma != self._last.get(bucket):
                self._saved -= max(0.0, seconds / exp(known) - self._costs(batch)[gamma])
            return
        ratio = min(log(seconds / self._costs(batch)[gamma]), (known or 0.0) + log(self.OUTLIER))
        if gamma == self._last.get(bucket):
            self._pace[bucket] = ratio if known is None else known + self.PACE * (ratio - known)
        elif known is not None:
            lesson = max(self.LESSON, 1 / (1 + self.MEASURED + self._lessons[bucket, gamma]))
            self._lessons[bucket, gamma] += 1
            low, high, part = self._nodes(batch)
            for node, weight in ((low, 1 - (part or 0)), (high, part or 0)):
                self._seconds[node, gamma] *= exp(lesson * weight * (ratio - known))
            self._expected.clear()

    def measured(self, seconds: Mapping[tuple[int, int], float]) -> None:
        """Add what steps of further batch sizes take, each with all gammas."""
        self._seconds |= seconds
        self._batches = sorted({batch for batch, _ in self._seconds})
        self._expected.clear()

    def speedup(self, batch: int, gamma: int) -> float:
        """Predicted throughput of gamma over that of no drafts."""
        speeds = self._speeds(batch)
        return speeds[gamma] / speeds[0]

    def _explore(self, batch: int, used: int, speeds: Sequence[float]) -> int:
        """A gamma whose trial begins, mostly a neighbour, above and below in turn; else the one in use."""
        upwards = used < self._max and not (self._upwards and used)
        near = min(used + 1, self._max) if upwards else max(used - 1, 0)
        turn, place = divmod(self._trials.total(), self.FAR)
        far = turn % (self._max + 1) if place == self.FAR - 1 else used
        gamma = near if far == used else far
        # acceptance of less deep ones is known
        steps = max(2, self.RECENT // batch) if gamma == used + 1 else 2
        costs, trial = self._costs(batch), (_bucket(batch), gamma)
        lost = steps * costs[gamma] * max(0.0, 1 - speeds[gamma] / speeds[used])
        lost = min(lost, self.MOST * costs[used])
        free = gamma == near and self._trials[trial] < self.EARLY
        if gamma == used or self._since < self.SOON or (lost > self._saved and not free):
            self._left = 0
            return used
        if not free:
            self._saved -= lost
        self._upwards, self._trial, self._left, self._since = gamma > used, trial, steps - 1, 0
        self._trials[trial] += 1
        return gamma

    def _speeds(self, batch: int) -> list[float]:
        """Predicted tokens per second of one row, by gamma."""
        tokens = accumulate(accumulate(self.alphas, mul, initial=1.0))
        return [count / cost for count, cost in zip(tokens, self._costs(batch), strict=True)]

    def _costs(self, batch: int) -> list[float]:
        """Expected seconds of a step of `batch` rows, by gamma."""
        if batch not in self._expected:
            low, high, part = self._nodes(batch)
            scale, part = (batch / low, 0.0) if part is None else (1.0, part)
            self._expected[batch] = [
                scale * ((1 - part) * self._seconds[low, gamma] + part * self._seconds[high, gamma])
                for gamma in range(self._max + 1)
            ]
        return self._expected[batch]

    def _nodes(self, batch: int) -> tuple[int, int, float | None]:
        """The measured batches around one, and how far it is from the lower; None beyond the largest."""
        below = max((b for b in self._batches if b <= batch), default=self._batches[0])
        above = min((b for b in self._batches if b >= batch), default=None)
        if above is None:
            return below, below, None
        return below, above, (batch - below) / (above - below) if above > below else 0.0


def _bucket(batch: int) -> int:
    """Batches of 1, 2, 3 to 4, 5 to 8, ... rows; a full one, of a power of two, stays when a row ends."""
    return (batch - 1).bit_length()


def _decayed(counts: Sequence[float], reached: int, kept: int, memory: int) -> list[float]:
    """Counts of a depth after a step: older rows weigh less, or nothing behind a step that fills it."""
    left = max(0.0, 1 - reached / memory)
    return [counts[0] * left + reached, counts[1] * left + kept]


def _divergence(seen: float, believed: float) -> float:
    """KL divergence in nats of one coin from another, which is never quite sure."""
    believed = min(max(believed, 1e-9), 1 - 1e-9)
    pairs = (seen, believed), (1 - seen, 1 - believed)
    return sum(share * log(share / expected) for share, expected in pairs if share > 0)
