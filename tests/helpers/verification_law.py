"""The exact law of what a verifier emits, found from outside by choosing its uniforms.

A verifier is any function with the signature of `verify_chain` or `verify_tree`. All drafts of a small
vocabulary are enumerated. For each, the threshold of every coin and the intervals of the residual's
inverse CDF are found by bisection in float64; then every pattern of passing and failing coins is
judged once and weighed by its probability. So coins and residuals are marginalised exactly and
nothing of the verifier's inside is trusted but one premise: that it depends on its coins only by which
side of their thresholds they lie, and on the residual uniform only by its interval. The premise is
tested with random uniforms, and `PremiseBroken` raised if it does not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from rlpipe.spec.tree import Tree

BISECTIONS = 56


class PremiseBroken(AssertionError):
    """The verifier is no function of thresholds: its law was not computed, and it is not lossless."""


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

    def law(self, prefixes: torch.Tensor) -> torch.Tensor:
        """[B, depth] prefixes -> [B, V], the law of the next token."""
        return self.probs[prefixes.shape[1]][tuple(prefixes.T)].expand(len(prefixes), -1)

    def rows(self, prefixes: torch.Tensor, depths: int) -> torch.Tensor:
        """[B, depths, V]: row i is the law given the first i tokens of each prefix."""
        return torch.stack([self.law(prefixes[:, :i]) for i in range(depths)], 1)

    def joint(self, depths: int) -> torch.Tensor:
        """[V] * depths: the joint law of the first `depths` tokens."""
        law = self.probs[0]
        for depth in range(1, depths):
            law = law.unsqueeze(-1) * self.probs[depth]
        return law


def all_drafts(vocab: int, nodes: int) -> torch.Tensor:
    """[vocab ** nodes, nodes] int64."""
    return torch.tensor(list(product(range(vocab), repeat=nodes)))


def emitted_law(
    verifier: Callable,
    target: Process,
    draft: Process | None,
    drafted_by: Callable[[torch.Tensor], torch.Tensor],
    *,
    gumbel: bool = False,
) -> torch.Tensor:
    """[V] * (gamma + 1): joint law of the first gamma + 1 tokens when a chain verifier judges.

    draft: what the verifier is told (None: nothing). drafted_by: [D, gamma] drafts -> [D], the
    probability with which each was really drafted. Tokens after those that the step emits follow
    the target. gumbel: the last argument of the verifier is uniforms [B, V] for Gumbel-max.
    """
    return _chain_bench(verifier, target, draft, drafted_by, gumbel).law(target)


def accepted_law(verifier: Callable, target: Process, draft: Process) -> torch.Tensor:
    """[D, gamma + 1]: law of num_accepted given each of `all_drafts`, over the coins alone."""
    return _chain_bench(verifier, target, draft, lambda drafts: torch.ones(len(drafts)).double()).accepted()


def _chain_bench(verifier, target, draft, drafted_by, gumbel=False) -> _Bench:
    gamma, vocab = len(target.probs) - 1, target.probs[0].shape[-1]
    drafts = all_drafts(vocab, gamma)
    p = target.rows(drafts, gamma + 1)
    q = None if draft is None else draft.rows(drafts, gamma)

    def judge(rows: torch.Tensor, coins: torch.Tensor, residual: torch.Tensor) -> object:
        return verifier(drafts[rows], None if q is None else q[rows], p[rows], coins, residual)

    return _Bench(
        judge=judge,
        chance=drafted_by(drafts),
        probes=torch.ones(gamma, gamma, dtype=torch.float64).triu(),
        passed=lambda verdict, coin: verdict.num_accepted > coin,
        emitted=lambda verdict, rows: drafts[rows],
        vocab=vocab,
        gumbel=gumbel,
    )


def tree_law(
    verifier: Callable, tree: Tree, target: Process, draft: Process, siblings: str, **options
) -> torch.Tensor:
    """[V] * (max_depth + 1): joint law of the tokens when a tree verifier judges.

    siblings: how children are drawn from `draft`: "replacement", "without" or "top" (its most likely tokens,
    no chance; the verifier is told no draft). Without replacement, a sibling for which nothing is left of
    q is token 0. Further options go to the verifier.
    """
    vocab, size = target.probs[0].shape[-1], tree.num_drafts + 1
    drafts, paths = all_drafts(vocab, tree.num_drafts), tree.paths()
    # Context of node n: the tokens on its path. Rows of leaves are not to be read: NaN.
    contexts = [drafts[:, paths[n][paths[n] >= 0] - 1] for n in range(size)]
    p = torch.stack([target.law(contexts[n]) for n in range(size)], 1)
    q = torch.full_like(p, float("nan"))
    chance = torch.ones(len(drafts), dtype=torch.float64)
    for node in range(size):
        if tree.children(node):
            q[:, node] = draft.law(contexts[node])
            tokens = drafts[:, [child - 1 for child in tree.children(node)]]
            chance *= _sibling_chance(q[:, node], tokens, siblings)

    def judge(rows: torch.Tensor, coins: torch.Tensor, residual: torch.Tensor) -> object:
        told = None if siblings == "top" else q[rows]
        return verifier(tree, drafts[rows], told, p[rows], coins, residual, **options)

    def emitted(verdict, rows: torch.Tensor) -> torch.Tensor:
        return drafts[rows].gather(1, (verdict.path - 1).clamp(min=0))

    bench = _Bench(
        judge=judge,
        chance=chance,
        probes=1 - tree.ancestor_mask()[1:, 1:].double() + torch.eye(tree.num_drafts, dtype=torch.float64),
        passed=lambda verdict, coin: verdict.path[:, tree.depths[coin + 1] - 1] == coin + 1,
        emitted=emitted,
        vocab=vocab,
    )
    return bench.law(target)


def _sibling_chance(q: torch.Tensor, tokens: torch.Tensor, siblings: str) -> torch.Tensor:
    """[D, V], [D, k] -> [D]: probability that the children of a node are these tokens, in this order."""
    if siblings == "top":
        return (
            (q.argsort(dim=-1, descending=True, stable=True)[:, : tokens.shape[1]] == tokens).all(1).double()
        )
    chance, left = torch.ones(len(q), dtype=torch.float64), q
    for token in tokens.split(1, 1):
        mass = left.sum(1, keepdim=True)
        drawn = torch.where(mass > 0, left.gather(1, token) / mass, (token == 0).double())
        chance = chance * drawn.squeeze(1)
        if siblings == "without":
            left = left.scatter(1, token, 0.0)
    return chance


@dataclass(slots=True, kw_only=True)
class _Bench:
    """Drafts, D of them, before a verifier with K coins.

    judge: (rows [R] of drafts, coins [R, K], residual) -> verdict. chance: [D]. probes: [K, K], row k: the
    coins under which coin k decides (its own entry is not used). passed: (verdict, k) -> [R] bool.
    emitted: (verdict, rows) -> [R, depth], tokens of the accepted prefix, anything beyond it.
    """

    judge: Callable
    chance: torch.Tensor
    probes: torch.Tensor
    passed: Callable
    emitted: Callable
    vocab: int
    gumbel: bool = False

    def law(self, target: Process) -> torch.Tensor:
        """[V] * K joint law of the emitted tokens, continued by the target where fewer are emitted."""
        rows, pattern, limit, weight = self._patterns()
        coins, verdict = self._representative(rows, pattern, limit)
        next_law = self._gumbel_law(rows, coins) if self.gumbel else self._inverse_cdf_law(rows, coins)
        self._check_premise(rows, pattern, limit, verdict, next_law)
        tokens, law = self.emitted(verdict, rows), None
        for accepted in range(len(target.probs)):
            here = verdict.num_accepted == accepted
            prefix = torch.zeros(int(here.sum()), dtype=torch.int64)
            for depth in range(accepted):
                prefix = prefix * self.vocab + tokens[here, depth]
            mass = torch.zeros(self.vocab**accepted, self.vocab, dtype=torch.float64)
            mass.index_add_(0, prefix, weight[here, None] * next_law[here])
            mass = mass.view([self.vocab] * (accepted + 1))
            law = mass if law is None else law.unsqueeze(-1) * target.probs[accepted] + mass
        return law

    def accepted(self) -> torch.Tensor:
        """[D, K + 1] law of num_accepted given the drafts."""
        rows, pattern, limit, weight = self._patterns()
        _, verdict = self._representative(rows, pattern, limit)
        law = torch.zeros(len(self.chance), len(self.probes) + 1, dtype=torch.float64)
        return law.index_put_((rows, verdict.num_accepted), weight / self.chance[rows], accumulate=True)

    def _patterns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draft [R], passing coins [R, K], their thresholds [R, K] and probability [R], where not 0."""
        thresholds = self._thresholds()
        bits = torch.tensor(list(product([True, False], repeat=len(self.probes))))
        rows = torch.arange(len(self.chance)).repeat_interleave(len(bits))
        pattern, limit = bits.repeat(len(self.chance), 1), thresholds.repeat_interleave(len(bits), 0)
        weight = self.chance[rows] * torch.where(pattern, limit, 1 - limit).prod(1)
        live = weight > 1e-16
        return rows[live], pattern[live], limit[live], weight[live]

    def _representative(self, rows, pattern, limit) -> tuple[torch.Tensor, object]:
        """Coins in the middle of each pattern's box, and the verdict there."""
        coins = torch.where(pattern, limit / 2, (1 + limit) / 2)
        half = torch.full((len(rows),), 0.5, dtype=torch.float64)
        return coins, self.judge(rows, coins, self._residual(half))

    def _thresholds(self) -> torch.Tensor:
        """[D, K]"""
        rows = torch.arange(len(self.chance))
        half = self._residual(torch.full((len(rows),), 0.5, dtype=torch.float64))
        found = []
        for coin, probe in enumerate(self.probes):
            coins = probe.repeat(len(rows), 1)

            def below(middle, coin=coin, coins=coins):
                coins[:, coin] = middle
                return self.passed(self.judge(rows, coins, half), coin)

            found.append(_bisect(below, len(rows)))
        return torch.stack(found, 1)

    def _residual(self, uniforms: torch.Tensor) -> torch.Tensor:
        return uniforms.unsqueeze(1).expand(-1, self.vocab) if self.gumbel else uniforms

    def _inverse_cdf_law(self, rows: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
        """[R, V] law of next_token; token v holds the uniforms between its edges."""

        def edge(token: int) -> torch.Tensor:
            return _bisect(lambda u: self.judge(rows, coins, u).next_token <= token, len(rows))

        edges = [torch.zeros(len(rows), dtype=torch.float64)]
        edges += [edge(token) for token in range(self.vocab - 1)]
        edges.append(torch.ones(len(rows), dtype=torch.float64))
        return torch.stack(edges, 1).diff(dim=1)

    def _gumbel_law(self, rows: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
        """[R, V] law of next_token, an argmax of scores each increasing in its own uniform.

        Pr(k wins) = integral over u_k of prod_{j != k} t_j(u_k), t_j the highest u_j that still loses to
        u_k. Gauss-Legendre after u_k = x^8, which makes powers of u_k smooth at 0.
        """
        nodes, weights = (torch.from_numpy(a) for a in _gauss_legendre(40))
        count, law = len(nodes), []
        many_rows, many_coins = rows.repeat_interleave(count), coins.repeat_interleave(count, 0)
        own = (nodes**8).repeat(len(rows))
        for k in range(self.vocab):
            wins = torch.ones(len(own), dtype=torch.float64)
            for j in set(range(self.vocab)) - {k}:
                uniforms = torch.zeros(len(own), self.vocab, dtype=torch.float64)
                uniforms[:, k] = own

                def still(middle, j=j, k=k, uniforms=uniforms):
                    uniforms[:, j] = middle
                    return self.judge(many_rows, many_coins, uniforms).next_token == k

                wins = wins * _bisect(still, len(own))
            law.append((wins.view(-1, count) * weights * 8 * nodes**7).sum(1))
        return torch.stack(law, 1)

    def _check_premise(self, rows, pattern, limit, verdict, next_law) -> None:
        generator = torch.Generator().manual_seed(0)
        for _ in range(4):
            where = torch.rand(pattern.shape, generator=generator, dtype=torch.float64)
            coins = torch.where(pattern, where * limit, limit + where * (1 - limit))
            clear = ((coins - limit).abs() > 1e-9).all(1)
            uniforms = torch.rand(len(rows), generator=generator, dtype=torch.float64)
            other = self.judge(rows, coins, self._residual(uniforms))
            same = (other.num_accepted == verdict.num_accepted) & (
                self.emitted(other, rows) == self.emitted(verdict, rows)
            ).all(1)
            if not self.gumbel:
                cdf = next_law.cumsum(1)
                clear &= (cdf - uniforms.unsqueeze(1)).abs().amin(1) > 1e-9
                same &= other.next_token == (cdf <= uniforms.unsqueeze(1)).sum(1)
            if not same[clear].all():
                raise PremiseBroken("the verifier does not depend on its uniforms by thresholds alone")


def _bisect(below: Callable[[torch.Tensor], torch.Tensor], rows: int) -> torch.Tensor:
    """[rows] float64: where `below`, True from 0 up to some point of [0, 1], turns False."""
    low, high = torch.zeros(rows, dtype=torch.float64), torch.ones(rows, dtype=torch.float64)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        passed = below(middle)
        low, high = torch.where(passed, middle, low), torch.where(passed, high, middle)
    return torch.where(
        low >= 1 - 2.0 ** (4 - BISECTIONS), 1.0, torch.where(high < 2.0 ** (4 - BISECTIONS), 0.0, low)
    )


def _gauss_legendre(count: int):
    """Nodes and weights on [0, 1]."""
    import numpy as np

    nodes, weights = np.polynomial.legendre.leggauss(count)
    return (nodes + 1) / 2, weights / 2
