"""A G-test of sampled sequences against an exact law, depth by depth.

Token i of a sequence, given the tokens before it and the model in use, is one draw from that model's row.
Counts of next tokens per (model, prefix) are therefore independent multinomials, given how often each
prefix occurred, and

    G_i = 2 sum over models, prefixes and tokens of observed * ln(observed / expected)

Cells may be as small as they like: mean and variance of G_i under the law are simulated from the same
multinomials, and G_i is read as a chi-square of that mean and variance (Satterthwaite), as a standard
normal score (Wilson-Hilferty). Their sum is judged too: with one model it is the G of the joint law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from rlpipe.certify.statistics import normal_score

SIMULATIONS = 500


def g_statistic(counts: np.ndarray, law: np.ndarray) -> np.ndarray:
    """Compute G = 2 sum observed * ln(observed / expected); [..., rows, cells] counts, [rows, cells] law."""
    expected = np.maximum(counts.sum(-1, keepdims=True) * law, 1e-300)
    return 2 * (counts * np.log(np.maximum(counts, 1) / expected)).sum((-2, -1))


class Law:
    """Next-token rows of several models after every prefix of up to `depth` - 1 tokens.

    rows: per depth i, [models, V ** i, V] float64.
    """

    def __init__(self, rows: Sequence[np.ndarray]) -> None:
        self.rows = [row / row.sum(-1, keepdims=True) for row in rows]
        self.vocab = rows[0].shape[-1]

    @classmethod
    def of(cls, logits: Sequence[Callable], prompt: Sequence[int], vocab: int, depth: int) -> Law:
        """From functions of token ids to [T, V] logits, one for each model."""
        rows = [np.zeros((len(logits), vocab**i, vocab)) for i in range(depth)]
        for prefix in product(range(vocab), repeat=depth - 1):
            for model, function in enumerate(logits):
                probs = function([*prompt, *prefix])[len(prompt) - 1 :].double().softmax(-1)
                for i in range(depth):
                    rows[i][model, _number(prefix[:i], vocab)] = probs[i]
        return cls(rows)

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """[count, depth] sequences of the first model."""
        tokens, number = [], np.zeros(count, np.int64)
        for row in self.rows:
            beyond = rng.random((count, 1)) >= row[0, number].cumsum(-1)[:, :-1]
            tokens.append(beyond.sum(1))
            number = number * self.vocab + tokens[-1]
        return np.stack(tokens, 1)

    def divergence(self, other: Law) -> float:
        """KL of `other`'s first model from this one's, in nats per sequence."""
        chance, total = np.ones(1), 0.0
        for ours, theirs in zip(self.rows, other.rows, strict=True):
            total += (chance[:, None] * theirs[0] * np.log(theirs[0] / ours[0])).sum()
            chance = (chance[:, None] * theirs[0]).ravel()
        return total

    def scores(self, tokens: np.ndarray, models: np.ndarray | int = 0) -> list[float]:
        """Standard normal scores of G_i by depth, then of their sum; large when tokens break the law.

        tokens: [n, depth]. models: [n, depth], the model that sampled each.
        """
        rng = np.random.default_rng(0)
        models = np.broadcast_to(models, tokens.shape)
        number, statistics, simulated = np.zeros(len(tokens), np.int64), [], []
        for i, row in enumerate(self.rows):
            prefixes = self.vocab**i
            cell = ((models[:, i] * prefixes) + number) * self.vocab + tokens[:, i]
            counts = np.bincount(cell, minlength=row.size).reshape(-1, self.vocab)
            law, size = row.reshape(-1, self.vocab), counts.sum(1)
            statistics.append(g_statistic(counts, law))
            simulated.append(g_statistic(rng.multinomial(size, law, (SIMULATIONS, len(law))), law))
            number = number * self.vocab + tokens[:, i]
        pairs = zip([*statistics, sum(statistics)], [*simulated, sum(simulated)], strict=True)
        return [normal_score(value, null.mean(), null.var()) for value, null in pairs]


def _number(prefix: Sequence[int], vocab: int) -> int:
    number = 0
    for token in prefix:
        number = number * vocab + token
    return number
