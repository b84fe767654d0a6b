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
    """The gamma of highest predicted throughput.

    seconds: measured duration of a step by (batch, gamma), for gamma 0..max and some batch sizes; others
    are interpolated. What steps take in use corrects them: only how gammas compare matters, so the gamma
    in use sets the pace, and its neighbours, tried in turn for two steps at a time, are judged by it. The
    first trials of each follow one another quickly, later ones come every `explore_every` steps.
    Acceptance by depth is a decayed ratio of sums, started at `prior`. A change must promise `margin` more
    throughput. When the deepest draft was not made for `probe_every` steps, some steps make it, so that
    speculation can come back after an update made it worth its cost. Probes that do not bring it back
    come ever more rarely: in each the draft reads what it missed.

    >>> costs = {(1, 0): 1.0, (1, 1): 1.2, (1, 2): 1.4, (64, 0): 4.0, (64, 1): 8.0, (64, 2): 12.0}
    >>> policy = AdaptiveGamma(costs)
    >>> policy.choose(1), policy.choose(64)
    (2, 0)
    """

    MEMORY = 256  # verified rows after which a count has decayed to 1/e: prompts change within a batch's run
    PACE, LESSON = 0.1, 0.1  # weight of one step in the pace, least weight in what another gamma costs
    MEASURED = 1  # so many lessons the cost measured at the start counts for: the first ones weigh more
    EARLY, SOON = 4, 8  # so many trials of a neighbour come so many steps after the one before
    OUTLIER = 1.5  # a step that took longer than this times what was expected counts as that
    PROBE, RARER = 8, 8  # steps of a probe; its interval doubles up to so many times the first
    STALE = 0.75  # what is left of the counts of acceptance when a probe begins

    def __init__(
        self,
        seconds: Mapping[tuple[int, int], float],
        *,
        prior: float = 0.75,
        margin: float = 0.02,
        probe_every: int = 512,
        explore_every: int = 128,
    ) -> None:
        self._batches = sorted({batch for batch, _ in seconds})
        self._max = max(gamma for _, gamma in seconds)
        self._seconds = dict(seconds)
        self._expected: dict[int, list[float]] = {}  # seconds by gamma, of the batches asked for
        self._margin, self._probe_every, self._explore_every = margin, probe_every, explore_every
        self._drafted = [16.0] * self._max
        self._accepted = [16.0 * prior] * self._max
        self._steps, self._deepest = 0, 0  # steps so far, and at the last that drafted to the full depth
        self._probe_after, self._probing = probe_every, 0  # steps without drafts; steps of a probe to go
        self._last: dict[int, int] = {}  # choice by batch bucket
        self._pace: dict[int, float] = {}  # log of measured over expected seconds, by batch bucket
        self._next_trial = min(explore_every, self.SOON * self.EARLY)
        self._trial: tuple[int, int] | None = None  # (bucket, gamma) whose trial has a step to go
        self._trials: Counter[tuple[int, int]] = Counter()  # begun, by (bucket, gamma)
        self._lessons: Counter[tuple[int, int]] = Counter()  # learnt, by (bucket, gamma)
        self._upwards = False  # the side of the last one
        self._before: tuple[int, int] | None = None  # (bucket, gamma) of the step before

    @property
    def alphas(self) -> list[float]:
        """Acceptance at depth k given that depth k - 1 was accepted, k = 1..max."""
        return [a / d for a, d in zip(self._accepted, self._drafted, strict=True)]

    def seconds(self, batch: int, gamma: int) -> float:
        """Measured or interpolated duration of a step; beyond the largest batch, in proportion."""
        return self._costs(batch)[gamma]

    def throughput(self, batch: int, gamma: int) -> float:
        """Predicted tokens per second."""
        return batch * self._speeds(batch)[gamma]

    def choose(self, batch: int) -> int:
        """Choose gamma by the rule of the class; arguments of `GammaPolicy.choose`."""
        self._steps += 1
        if self._probing or self._steps - self._deepest > self._probe_after:
            return self._probe()
        bucket = batch.bit_length()
        if (neighbour := self._explore(bucket)) is not None:
            return neighbour
        speeds = self._speeds(batch)
        best = speeds.index(max(speeds))
        last = self._last.get(bucket, best)
        if speeds[best] < (1 + self._margin) * speeds[last]:
            best = last
        self._last[bucket] = best
        if best == self._max:
            self._probe_after = self._probe_every
        return best

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from a step; arguments of `GammaPolicy.observe`."""
        decay = max(0.0, 1 - next(iter(drafted), 0) / self.MEMORY)  # for rare depths too
        for depth, (reached, kept) in enumerate(zip(drafted, accepted, strict=True)):
            self._drafted[depth] = self._drafted[depth] * decay + reached
            self._accepted[depth] = self._accepted[depth] * decay + kept
        if len(drafted) == self._max:
            self._deepest = self._steps

    def timed(self, batch: int, gamma: int, seconds: float) -> None:
        """What a step took in which nobody joined.

        The first step of a gamma is left out: it also pays for the change.
        """
        bucket = batch.bit_length()
        before, self._before = self._before, (bucket, gamma)
        if before != (bucket, gamma):
            return
        known = self._pace.get(bucket)
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

    def _probe(self) -> int:
        """Draft as deep as possible for some steps: is it still not worth it?"""
        if not self._probing:
            self._probing = self.PROBE
            self._probe_after = min(2 * self._probe_after, self.RARER * self._probe_every)
            self._drafted = [self.STALE * count for count in self._drafted]
            self._accepted = [self.STALE * count for count in self._accepted]
        self._probing -= 1
        return self._max

    def _explore(self, bucket: int) -> int | None:
        """A neighbour of the gamma in use, above and below in turn, for two steps; None while none is due."""
        begun, self._trial = self._trial, None
        if begun and begun[0] == bucket:
            return begun[1]
        if self._steps < self._next_trial or not self._last.get(bucket):  # from 0, the probe does it
            return None
        used = self._last[bucket]
        self._upwards = not self._upwards and used < self._max
        self._trial = trial = bucket, used + (1 if self._upwards else -1)
        early = self._trials[trial] < self.EARLY
        self._next_trial = self._steps + (self.SOON if early else self._explore_every)
        self._trials[trial] += 1
        return trial[1]

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
