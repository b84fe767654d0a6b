"""The exact law of what a verifier emits, found from outside by choosing its uniforms.

A verifier is any function with the signature of `verify_chain`. For every possible draft, acceptance
thresholds and the intervals of the residual's inverse CDF are found by bisection in float64, so coins
and residuals are marginalised exactly and nothing of the verifier's inside is trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

BISECTIONS = 56


@dataclass(slots=True)
class Process:
    """Context-dependent distributions over sequences of a small vocabulary.

    probs: for each depth i, [V] * i + [V] float64: the law of token i + 1 given the first i.
    """

    probs: list[torch.Tensor]

    @classmethod
    def random(
        cls, vocab: int, depths: int, seed: int, sharpness: float = 1.0, zeros: float = 0.0
    ) -> Process:
        """Softmax of normal logits; a share `zeros` of the tokens gets probability exactly 0."""
        generator = torch.Generator().manual_seed(seed)
        probs = []
        for depth in range(depths):
            shape = [vocab] * (depth + 1)
            logits = sharpness * torch.randn(shape, generator=generator, dtype=torch.float64)
            dead = torch.rand(shape, generator=generator) < zeros
            dead[..., 0] = False
            probs.append(logits.masked_fill(dead, float("-inf")).softmax(-1))
        return cls(probs)

    def rows(self, prefixes: torch.Tensor, depths: int) -> torch.Tensor:
        """[B, depths, V]: row i is the law given the first i tokens of each prefix."""
        laws = [self.probs[i][tuple(prefixes[:, :i].T)] for i in range(depths)]
        return torch.stack([law.expand(len(prefixes), -1) for law in laws], 1)

    def joint(self, depths: int) -> torch.Tensor:
        """[V] * depths: the joint law of the first `depths` tokens."""
        law = self.probs[0]
        for depth in range(1, depths):
            law = law.unsqueeze(-1) * self.probs[depth]
        return law


def emitted_law(
    verifier: Callable,
    target: Process,
    draft: Process | None,
    drafted_by: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """[V] * (gamma + 1): joint law of the first gamma + 1 tokens when `verifier` judges.

    draft: what the verifier is told (None: nothing). drafted_by: [D, gamma] drafts -> [D], the
    probability with which each was really drafted. Tokens after those that the step emits follow
    the target.
    """
    gamma, vocab = len(target.probs) - 1, target.probs[0].shape[-1]
    drafts = torch.tensor(list(product(range(vocab), repeat=gamma)))
    p = target.rows(drafts, gamma + 1)
    q = None if draft is None else draft.rows(drafts, gamma)

    def judge(coins: torch.Tensor, residual: torch.Tensor) -> object:
        return verifier(drafts, q, p, coins, residual)

    def force(accepted: int) -> torch.Tensor:
        """Coins that accept exactly the first `accepted` drafts, wherever that can happen."""
        coins = torch.ones(drafts.shape, dtype=torch.float64)
        coins[:, :accepted] = 0.0
        return coins

    half = torch.full((len(drafts),), 0.5, dtype=torch.float64)
    thresholds = []
    for i in range(gamma):
        low, high = torch.zeros_like(half), torch.ones_like(half)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            coins = force(i)
            coins[:, i] = middle
            passed = judge(coins, half).num_accepted > i
            low, high = torch.where(passed, middle, low), torch.where(passed, high, middle)
        thresholds.append((low + high) / 2)

    law = torch.zeros([vocab] * (gamma + 1), dtype=torch.float64)
    drafted = drafted_by(drafts)
    for accepted in range(gamma + 1):
        chance = drafted.clone()
        for i in range(accepted):
            chance = chance * thresholds[i]
        if accepted < gamma:
            chance = chance * (1 - thresholds[accepted])
        next_law = _residual_law(judge, force(accepted), vocab)
        for index, prefix in enumerate(drafts[:, :accepted].tolist()):
            if chance[index] <= 1e-15:
                continue
            for token in range(vocab):
                here = (*prefix, token)
                tail = torch.tensor(1.0, dtype=torch.float64)
                for depth in range(accepted + 1, gamma + 1):
                    tail = tail.unsqueeze(-1) * target.probs[depth][here]
                law[here] += chance[index] * next_law[index, token] * tail
    return law


def _residual_law(judge: Callable, coins: torch.Tensor, vocab: int) -> torch.Tensor:
    """[D, V] law of next_token over a uniform residual draw; inverse-CDF samplers are monotone in it."""
    edges = [torch.zeros(len(coins), dtype=torch.float64)]
    for token in range(vocab - 1):
        low, high = torch.zeros(len(coins), dtype=torch.float64), torch.ones(len(coins), dtype=torch.float64)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            below = judge(coins, middle).next_token <= token
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        edges.append((low + high) / 2)
    edges.append(torch.ones(len(coins), dtype=torch.float64))
    return torch.stack(edges, 1).diff(dim=1)
