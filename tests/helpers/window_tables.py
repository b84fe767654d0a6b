"""Drafter and target given by tables: every window can be enumerated, and its gradient differentiated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rlpipe.drafts.windows.rollout import SampledWindows


class Tables:
    """Logits of drafter and target after every prefix of drafts, in float64.

    draft, target: K + 1 tables, [V**t, V] of the token after t drafts. temperature: divides both.
    """

    def __init__(self, vocab: int, depths: int, *, temperature: float = 1.0, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab, self.depths, self.temperature = vocab, depths, temperature
        sizes = [(2, vocab**t, vocab) for t in range(depths + 1)]
        both = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
        self.draft, self.target = [t[0] for t in both], [t[1] for t in both]

    def windows(self) -> Tensor:
        """All drafts of K tokens: [V**K, K]."""
        return torch.cartesian_prod(*[torch.arange(self.vocab)] * self.depths).view(-1, self.depths)

    def logprobs(self, logits: list[Tensor], tokens: Tensor, rows: int) -> Tensor:
        """[..., K] drafts -> log-probabilities [..., rows, V] before each of them, and after them."""
        found, prefix = [], torch.zeros_like(tokens[..., 0])
        for depth in range(rows):
            found.append((logits[depth][prefix] / self.temperature).log_softmax(-1))
            if depth < self.depths:
                prefix = prefix * self.vocab + tokens[..., depth]
        return torch.stack(found, -2)

    def expected(self, f: Tensor, *, block: bool, draft: list[Tensor] | None = None) -> Tensor:
        """E[f(k)] by the definition of the rule: over all drafts, and over the coins of each. f: [K + 1]."""
        tokens = self.windows()
        q = self.logprobs(draft or self.draft, tokens, self.depths).exp()
        p = self.logprobs(self.target, tokens, self.depths + 1).exp()
        chosen = tokens[..., None]
        q_d, p_d = q.gather(-1, chosen)[..., 0], p[:, : self.depths].gather(-1, chosen)[..., 0]
        law = _block_law(p, q, p_d / q_d) if block else _chain_law(p_d / q_d)
        return (q_d.prod(-1) * (law * f).sum(-1)).sum()

    def gradient(self, f: Tensor, *, block: bool, every: int = 1, step: float = 1e-5) -> Tensor:
        """Central differences of `expected` by every n-th of the logits, nan else: [prefixes, V]."""
        found = []
        for depth in range(self.depths):
            table = torch.full_like(self.draft[depth], torch.nan)
            for index in list(np.ndindex(*table.shape))[::every]:
                values = []
                for sign in (1, -1):
                    draft = [t.clone() for t in self.draft]
                    draft[depth][index] += sign * step
                    values.append(self.expected(f, block=block, draft=draft))
                table[index] = (values[0] - values[1]) / (2 * step)
            found.append(table)
        return torch.cat(found)


def _chain_law(ratio: Tensor) -> Tensor:
    """Pr(k) of token by token verification: [N, K] ratios -> [N, K + 1]."""
    accept, reach, law = ratio.clamp(max=1), torch.ones_like(ratio[:, 0]), []
    for a in accept.unbind(-1):
        law.append(reach * (1 - a))
        reach = reach * a
    return torch.stack([*law, reach], -1)


def _block_law(p: Tensor, q: Tensor, ratio: Tensor) -> Tensor:
    """Pr(k) by Sun et al.'s coins h_i: the largest i whose coin is below h_i."""
    weights, weight = [torch.ones_like(ratio[:, 0])], torch.ones_like(ratio[:, 0])
    for r in ratio.unbind(-1):
        weight = (weight * r).clamp(max=1)
        weights.append(weight)
    depths = ratio.shape[1]
    none, law = torch.ones_like(weight), [None] * (depths + 1)
    for i in range(depths, 0, -1):
        h = weights[i]
        if i < depths:
            mass = (weights[i][:, None] * p[:, i] - q[:, i]).clamp(min=0).sum(-1)
            h = torch.where(mass + 1 - weights[i] > 0, mass / (mass + 1 - weights[i]), 1.0)
        law[i] = none * h
        none = none * (1 - h)
    law[0] = none
    return torch.stack(law, -1)


class TableDrafter:
    """A `WindowDrafter` whose windows all start after the same text; a table of logits for each window.

    draft: K tables [W, V**t, V], leaves of the graph.
    """

    draft_cost, known = 0.2, None

    def __init__(self, tables: Tables, windows: int) -> None:
        self.tables, self.vocab = tables, tables.vocab
        length = tables.depths + 4
        self.owners, self.rows = np.zeros(1, int), np.zeros(1, int)
        self.turns, self.sampled = np.zeros((1, length), int), np.ones((1, length), bool)
        self.draft_tables = [
            t.expand(windows, -1, -1).clone().requires_grad_() for t in tables.draft[: tables.depths]
        ]

    def criticality(self) -> Tensor:
        return torch.zeros(self.turns.shape)

    def start(self, windows: SampledWindows, group: int) -> torch.device:
        self._prefix, self._depth = None, 0
        return torch.device("cpu")

    def draft(self, tokens: Tensor | None) -> Tensor:
        if tokens is None:
            return self.draft_tables[0]
        self._prefix = tokens if self._prefix is None else self._prefix * self.vocab + tokens
        self._depth += 1
        table = self.draft_tables[self._depth]
        return table.gather(1, self._prefix[..., None].expand(-1, -1, self.vocab))

    def first(self) -> Tensor:
        return self.tables.target[0].expand(len(self.draft_tables[0]), -1)

    def read(self, tokens: Tensor) -> Tensor:
        found, prefix = [], torch.zeros_like(tokens[..., 0])
        for depth in range(self.tables.depths):
            prefix = prefix * self.vocab + tokens[..., depth]
            found.append(self.tables.target[depth + 1][prefix])
        return torch.stack(found, 2)

    def greedy(self, tokens: Tensor) -> Tensor:
        raise AssertionError("the objective reads no greedy window")

    def draft_logprobs(self, states: Tensor) -> Tensor:
        return (states / self.tables.temperature).log_softmax(-1)

    target_logprobs = draft_logprobs

    def gradients(self) -> Iterator[Tensor]:
        """The gradient of each table, [W, V**t, V]."""
        return (table.grad for table in self.draft_tables)
