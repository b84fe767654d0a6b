"""The lines of a certificate: each answers one question by an exact test or a tolerance, if it can be tested.

Statistical lines share the certificate's alpha equally (Bonferroni over all lines that any server can have),
so a correct server fails at least one of them with probability at most alpha. Lines that compare numbers do
not depend on chance: their tolerance is the rounding error of the server's dtype, which the reference
measures.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rlpipe.certify import power
from rlpipe.certify.evidence import Evidence, Samples, later_draws, split_first
from rlpipe.certify.statistics import Draws, combined_p, normal_quantile, permutation_p
from rlpipe.certify.temperature import Estimate, estimate

FIRST, TAIL, LATER = "first tokens", "unlikely tokens", "later tokens"
TEMPERATURE, ACCEPTANCE = "temperature", "acceptance"
LOGPROBS, GREEDY = "log-probabilities", "greedy"
STATISTICAL = (FIRST, TAIL, LATER, TEMPERATURE, ACCEPTANCE)
_FAR = 1e6  # instead of an infinite difference, where a server reports the probability 0


@dataclass(slots=True, kw_only=True)
class Line:
    """A line of a certificate. passed: None if it was not tested; `seen` has the reason.

    p: p-value of a statistical line, which fails if p is below `alpha`. power: text on the smallest fault
    that the line detects. numbers: values by name, for other programs.
    """

    name: str
    question: str
    passed: bool | None
    seen: str
    p: float | None = None
    alpha: float | None = None
    power: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Return whether the line was tested and failed."""
        return self.passed is False

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return asdict(self)


@dataclass(slots=True, kw_only=True)
class Judge:
    """Tests the evidence. alpha: false-alarm rate of all lines together. seed: seed of the simulations.

    with_power: also simulate the power of each line, which takes longer than the tests.
    temperatures: estimates at temperature 1 and at the second temperature, set by the method `temperature`.
    """

    evidence: Evidence
    alpha: float
    seed: int = 0
    with_power: bool = True
    temperatures: dict[float, Estimate] = field(default_factory=dict)

    @property
    def each(self) -> float:
        """Return the false-alarm rate of one statistical line."""
        return self.alpha / len(STATISTICAL)

    def lines(self) -> list[Line]:
        """Return all lines, in the order of the certificate."""
        return [
            self.first_tokens(),
            self.unlikely_tokens(),
            self.later_tokens(),
            self.temperature(),
            self.acceptance(),
            self.log_probabilities(),
            self.greedy(),
        ]

    def _rng(self, number: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, number))

    def _simulations(self, tests: int = 1) -> int:
        """Return how many simulations are needed for a p-value below the alpha of one line.

        tests: number of p-values of the line; the smallest one is multiplied by it (Bonferroni).
        """
        return int(np.ceil(1.25 * tests / self.each))

    def _mixture(self, draws: list[Draws], alpha: float) -> float | None:
        """Return the smallest share of wrong tokens that the tests detect; None without `with_power`."""
        return power.smallest_mixture(draws, alpha, self._rng(10)) if self.with_power else None

    def _statistical(self, name: str, question: str, p: float, seen: str, **fields: Any) -> Line:
        return Line(
            name=name, question=question, passed=p >= self.each, p=p, alpha=self.each, seen=seen, **fields
        )

    def first_tokens(self) -> Line:
        """Test the frequencies of the likely first tokens."""
        draws, _ = split_first(self.evidence.first, self.evidence.at(1.0))
        p = draws.p_value(self._rng(0), max_simulations=self._simulations(2))
        share = self._mixture([draws], self.each)
        return self._statistical(
            FIRST,
            "Does each of a prompt's likely first tokens come as often as the model predicts?",
            p,
            f"{len(draws):,} tokens after {len(draws.probs)} prompts, p = {_p(p)}",
            power=power.mixture_text(share),
            numbers={"tokens": len(draws), "power": share},
        )

    def unlikely_tokens(self) -> Line:
        """Test the frequency of unlikely first tokens, which are missing if the server cuts the tail."""
        _, draws = split_first(self.evidence.first, self.evidence.at(1.0))
        p = draws.p_value(self._rng(1), max_simulations=self._simulations(2))
        expected = draws.probs[draws.row].sum(0)
        seen = np.bincount(draws.cell, minlength=len(expected))
        cut = power.largest_cut(draws, self.each, self._rng(11)) if self.with_power else None
        return self._statistical(
            TAIL,
            "Do unlikely first tokens come as often as the model predicts?",
            p,
            f"{seen[1:].sum()} of {len(draws):,} tokens beyond the likeliest 90%, {expected[1:].sum():.0f} "
            f"expected; beyond the likeliest 99%, {seen[3:].sum()} and {expected[3:].sum():.0f}; p = {_p(p)}",
            power=power.cut_text(cut),
            numbers={"seen": seen.tolist(), "expected": expected.round(2).tolist(), "power": cut},
        )

    def later_tokens(self) -> Line:
        """Test each token after the first, conditional on the earlier tokens."""
        question = "Given the tokens before it, does each later token come as often as the model predicts?"
        if not self.evidence.features.ids_out:
            return _not_judged(LATER, question, "the server returns no token ids")

        draws = later_draws(self.evidence.samples)
        if not draws:
            return _not_judged(LATER, question, "every answer has one token")

        # Test the positions in order; after a failed one, the others need no precise p-values.
        rng, tests = self._rng(2), 2 * len(draws)
        by_position: list[float] = []
        wrong: list[int] = []
        for position, one in enumerate(draws, 2):
            simulations = self._simulations() if wrong else self._simulations(2 * tests)
            by_position.append(one.p_value(rng, max_simulations=simulations))
            wrong += [position] * (by_position[-1] * tests < self.each)

        p = combined_p(by_position)
        share = self._mixture(draws, self.each / tests)
        return self._statistical(
            LATER,
            question,
            p,
            f"{sum(map(len, draws)):,} tokens at positions 2 to {len(draws) + 1}, p = {_p(p)}"
            + (f"; wrong from position {min(wrong)} on" if wrong else ""),
            power=power.mixture_text(share),
            numbers={
                "p_by_position": by_position,
                "first_wrong_position": min(wrong, default=0),
                "power": share,
            },
        )

    def temperature(self) -> Line:
        """Test the second temperature on first tokens, which are never drafted."""
        requested = self.evidence.temperature
        for number, at in enumerate((1.0, requested)):
            samples = self.evidence.at(at)
            self.temperatures[at] = estimate(
                self.evidence.first,
                np.concatenate([np.full(len(one.first), one.prompt) for one in samples]),
                np.concatenate([one.first for one in samples]),
                at,
                self._rng(3 + number),
                alpha=self.each,
                max_simulations=self._simulations(),
            )

        result = self.temperatures[requested]
        # Dividing half the interval by its quantile gives the standard error.
        half = (result.high - result.low) / 2
        size = power.difference(half / normal_quantile(self.each / 2), self.each) / requested
        return self._statistical(
            TEMPERATURE,
            f"Is a temperature of {requested:g} applied, and once?",
            result.p,
            f"the tokens have a temperature of {result.value:.3f} ({result.low:.3f} to {result.high:.3f}), "
            f"p = {_p(result.p)}",
            power=f"a temperature off by {size:.1%} (power .95)",
            numbers={"value": result.value, "low": result.low, "high": result.high, "power": size},
        )

    def acceptance(self) -> Line:
        """Compare the acceptance length with that of the checkpoint's own draft on the same prompts."""
        question = "Are as many drafts accepted as of the checkpoint's own draft?"
        if not self.evidence.accepted or not self.evidence.own_accepted:
            return _not_judged(ACCEPTANCE, question, self.evidence.why_not_accepted)

        # Permute answers only within a prompt, because acceptance differs between prompts.
        server, own = np.concatenate(self.evidence.accepted), np.concatenate(self.evidence.own_accepted)
        strata = tuple(
            np.concatenate([np.full(len(one), i) for i, one in enumerate(part)])
            for part in (self.evidence.accepted, self.evidence.own_accepted)
        )
        assert len(strata) == 2
        p = permutation_p(server, own, strata, self._rng(5), max_simulations=self._simulations())

        (length, error), (own_length, own_error) = _ratio(server), _ratio(own)
        size = power.difference(np.hypot(error, own_error), self.each)
        return self._statistical(
            ACCEPTANCE,
            question,
            p,
            f"tokens for each verify step: {1 + length:.3f}, of the checkpoint's own draft "
            f"{1 + own_length:.3f}; {len(server)} answers of each; p = {_p(p)}",
            power=f"a difference of {size:.2f} (power .95)",
            numbers={"server": 1 + length, "own": 1 + own_length, "power": size},
        )

    def log_probabilities(self) -> Line:
        """Compare reported log-probabilities with the reference, at each temperature."""
        question = "Are log-probabilities those of the distribution that was sampled?"
        groups = [self._with_logprobs(temperature) for temperature in (1.0, self.evidence.temperature)]
        if not any(groups):
            lacks = "token ids" if self.evidence.features.logprobs else "log-probabilities"
            return _not_judged(LOGPROBS, question, f"the server returns no {lacks}")

        # A common fault is to report log-probabilities without the temperature, which are right only at 1.
        # Most samples are of that temperature, so each is judged by itself.
        after = [_Difference.of(group, "after") for group in groups if group]
        before = [_Difference.of(group, "before") for group in groups if group]
        worst = max(after, key=lambda difference: difference.excess)
        fits = worst.excess <= 1
        is_before = not fits and all(difference.excess <= 1 for difference in before)

        return Line(
            name=LOGPROBS,
            question=question,
            passed=fits,
            seen=f"{worst.count:,} values differ from the reference by {worst.median:.2g} in the middle "
            f"and {worst.p99:.2g} at the 99th percentile"
            + ("; those before temperature fit" if is_before else ""),
            power=f"a shift of {worst.bounds[0]:.2g} of half of them, or of {worst.bounds[1]:.2g} of one in "
            "a hundred",
            numbers={"median": worst.median, "p99": worst.p99, "before_temperature": is_before},
        )

    def _with_logprobs(self, temperature: float) -> list[Samples]:
        """Return the samples at a temperature that have a reference and a reported log-probability."""
        samples = [one for one in self.evidence.at(temperature) if one.rows is not None]
        return [one for one in samples if not np.isnan(one.logprobs).all()]

    def greedy(self) -> Line:
        """Test that tokens at temperature 0 are the argmax, or differ from it by no more than rounding."""
        question = "At temperature 0, is each token the likeliest one, or within rounding of it?"

        # Without ids, compare only the texts.
        if not self.evidence.greedy:
            texts = self.evidence.greedy_texts
            wrong = [one.seen for one in texts if not one.equal]
            seen = f"{len(texts) - len(wrong)} of {len(texts)} texts are those of the likeliest tokens"
            if wrong:
                seen += f"; not {wrong[0]!r}"
            return Line(name=GREEDY, question=question, passed=not wrong, seen=seen, power="any other text")

        inside = [np.arange(one.tokens.shape[1]) < one.lengths[:, None] for one in self.evidence.greedy]
        rows = [one.rows for one in self.evidence.greedy]
        gap = np.concatenate([r.gap[m] for r, m in zip(rows, inside, strict=True) if r is not None])
        moved = np.concatenate([r.moved_gap[m] for r, m in zip(rows, inside, strict=True) if r is not None])

        # Rounding may swap two tokens whose logits are almost equal.
        tolerance = max(2 * float(moved.max(initial=0)), 1e-3)
        wrong, ties = int((gap > tolerance).sum()), int(((gap > 0) & (gap <= tolerance)).sum())
        return Line(
            name=GREEDY,
            question=question,
            passed=wrong == 0,
            seen=f"{len(gap):,} tokens: {ties} tie with the likeliest within {tolerance:.2g}, {wrong} do not"
            + (f"; the worst is {gap.max():.2f} below" if wrong else ""),
            power=f"a share of {3 / max(len(gap), 1):.2g} of wrong tokens (power .95)",
            numbers={"tokens": len(gap), "ties": ties, "wrong": wrong, "tolerance": tolerance},
        )


@dataclass(slots=True, kw_only=True)
class _Difference:
    """|reported - reference| of log-probabilities: median and 99th percentile, and the bounds of both."""

    count: int
    median: float
    p99: float
    bounds: tuple[float, float]

    @classmethod
    def of(cls, samples: list[Samples], name: str) -> _Difference:
        """Compare all tokens with a reported value. name: of the reference's values in `Rows`."""
        differences, moved = [], []
        for one in samples:
            assert one.rows is not None
            known = ~np.isnan(one.logprobs)
            apart = np.abs(one.logprobs - getattr(one.rows, name))[known]
            differences.append(apart.clip(max=_FAR))
            moved.append(one.rows.moved_logprob[known])

        # Rounding to the server's dtype changes a value by about `moved`.
        difference, rounding = np.concatenate(differences), np.concatenate(moved)
        return cls(
            count=len(difference),
            median=float(np.median(difference)),
            p99=float(np.quantile(difference, 0.99)),
            bounds=(3 * float(np.median(rounding)) + 1e-4, 5 * float(np.quantile(rounding, 0.99)) + 1e-3),
        )

    @property
    def excess(self) -> float:
        """The larger ratio of a value to its bound."""
        return max(self.median / self.bounds[0], self.p99 / self.bounds[1])


def _ratio(pairs: np.ndarray) -> tuple[float, float]:
    """Return the ratio of two sums over answers, and its standard error."""
    numerator, denominator = pairs.sum(0)
    ratio = numerator / max(denominator, 1)
    residual = pairs[:, 0] - ratio * pairs[:, 1]
    return float(ratio), float(np.sqrt((residual**2).sum()) / max(denominator, 1))


def _not_judged(name: str, question: str, why: str) -> Line:
    return Line(name=name, question=question, passed=None, seen=f"not judged: {why}")


def _p(p: float) -> str:
    return f"{p:.3f}" if p >= 0.001 else f"{p:.1e}"
