"""Acceptance theory: the expected number of accepted drafts, from probabilities only.

Benches, studies and tests compare their measurements with these pure functions, which sample nothing. Counts
of what an engine did are in `rlpipe.metrics`. p is the target, q the draft. Two kinds of sequences are
verified:

- drafted tokens (what an engine verifies): `chain_reach_drafted`, `block_reach_drafted`;
- tokens of the target (rollout data, replayed later): `chain_reach_target`, `block_reach_target`.

A *reach* is [..., gamma]: the expectation of its entry at depth j is Pr(num_accepted >= j). So its sum over
depths is an unbiased estimate of the number of accepted drafts, and 1 + this sum estimates the acceptance
length. Averages of products of per-depth alphas over contexts are exact only if alphas do not depend on the
drafted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from rlpipe.spec.tree import Tree
from rlpipe.spec.verify.block import running_weights


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Compute TV(p, q) = 1/2 sum_v |p_v - q_v| (Bebop Eq. 7). [..., V], [..., V] -> [...]."""
    return (p - q).abs().sum(-1) / 2


def rejection_alpha(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the acceptance probability of a draft sampled from q: sum_v min(p_v, q_v) = 1 - TV.

    Bebop Eq. 2, 44-47.

    p, q: [..., V]. Returns [...].

    >>> rejection_alpha(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])).item()
    0.75
    """
    return torch.minimum(p, q).sum(-1)


def target_only_alpha(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the acceptance probability of the draft argmax_v q_v: p(argmax q) (Bebop Eq. 1, 18).

    It is at most max_v p_v, for any draft (Bebop Eq. 19). p, q: [..., V]. Returns [...].
    """
    return p.gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1)


def target_only_alpha_sampled(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return target-only's alpha if the draft is sampled: E_{d ~ q}[p(d)] = sum_v p_v q_v. [..., V] -> [...].

    It is never above `rejection_alpha`, as p q <= min(p, q). So verify a sampled draft with its q.
    """
    return (p * q).sum(-1)


def rejection_margin(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return alpha_RS - alpha_TO = (1 - p(argmax q)) - TV(p, q); rejection is better if it is positive.

    Bebop Eq. 48. p, q: [..., V]. Returns [...]. The margin is 0 if the draft's distance from the target
    equals the target's probability of all tokens except the draft's greedy token.

    >>> p = torch.tensor([0.5, 0.5])
    >>> [round(rejection_margin(p, torch.tensor([a, 1 - a])).item(), 3) for a in (0.6, 1.0)]
    [0.4, 0.0]
    """
    return rejection_alpha(p, q) - target_only_alpha(p, q)


def entropy(p: torch.Tensor) -> torch.Tensor:
    """Compute H(p) = -sum_v p_v log p_v in nats (Bebop Eq. 4). [..., V] -> [...]."""
    return torch.special.entr(p).sum(-1)


def target_only_bounds(p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bound max_v p_v by H(p); it is target-only's alpha if the draft has the target's argmax.

    Lower bound: exp(-H) (Bebop Eq. 19-21), as if p were uniform over exp(H) tokens, its effective support.
    Upper bound: Fano's inequality, H <= h(e) + e log(V - 1) for max p = 1 - e, solved by bisection.
    p: [..., V].

    >>> low, high = target_only_bounds(torch.tensor([0.25] * 4, dtype=torch.float64))
    >>> round(low.item(), 6), round(high.item(), 6)
    (0.25, 0.25)
    """
    nats, vocab = entropy(p), p.shape[-1]
    low, high = torch.full_like(nats, 1 / vocab), torch.ones_like(nats)
    for _ in range(60):
        middle = (low + high) / 2
        error = 1 - middle
        most = torch.special.entr(middle) + torch.special.entr(error) + error * math.log(max(1, vocab - 1))
        low, high = torch.where(most >= nats, middle, low), torch.where(most >= nats, high, middle)
    return (-nats).exp(), high


def mismatch_exponent(p: torch.Tensor, q: torch.Tensor, floor: float = 1e-4) -> torch.Tensor:
    """Fit |q - p| ~ p^beta over the tokens with p > floor by least squares of logs; returns beta, a scalar.

    Bebop's Propositions 2 and 4 assume that beta is 0 for drafts trained by CE or KL (App. D.3,
    |q - p| <= sigma) and 1 for drafts trained by TV (D.4, |q - p| <= delta p). p, q: [N, V].
    """
    some = p > floor
    x, y = p[some].log(), (q - p)[some].abs().clamp(min=1e-12).log()
    return ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()


def pinsker(kl: torch.Tensor) -> torch.Tensor:
    """Return the smallest alpha of rejection for a given KL in nats: 1 - sqrt(KL / 2) (PPOW B.1, Bebop D.3).

    The bound holds for either direction of the KL. Bebop prints it without the root. A negative value is no
    bound.

    >>> pinsker(torch.tensor([0.0, 0.02])).tolist()
    [1.0, 0.8999999761581421]
    """
    return 1 - (kl / 2).sqrt()


def lossy_typical_accepts(
    p: torch.Tensor, drafts: torch.Tensor, epsilon: float, delta: float
) -> torch.Tensor:
    """Return whether Medusa's typical acceptance accepts each draft: p(d) >= min(epsilon, delta exp(-H(p))).

    The rule is lossy: no residual corrects the bias of acceptance, so no engine of rlpipe uses it. The first
    draft is always accepted (greedy first). p: [..., gamma, V], given the drafts before.
    drafts: [..., gamma]. Returns [..., gamma]: True for the leading drafts that are accepted.
    """
    chosen = p.gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    taken = chosen >= (delta * (-entropy(p)).exp()).clamp(max=epsilon)
    taken[..., 0] = True
    return taken.cumprod(-1).bool()


def bayes_cross_entropy(joint: torch.Tensor) -> torch.Tensor:
    """Compute the smallest cross-entropy that any q(y | z) reaches, H(Y | Z), in nats (notes, lemma 3.4).

    joint: [Z, Y] probabilities that add to 1. Features that are added to Z can only lower it.

    >>> bayes_cross_entropy(torch.tensor([[0.5, 0.0], [0.0, 0.5]])).item()
    0.0
    """
    return entropy(joint.flatten()) - entropy(joint.sum(-1))


def reduced_rank(inputs: torch.Tensor, outputs: torch.Tensor, rank: int) -> torch.Tensor:
    """Fit outputs = inputs B by least squares among the maps B of some rank; returns B, [P, D].

    inputs: [N, P], N >= P. outputs: [N, D]. B is the ordinary solution projected on the leading directions of
    its predictions (Izenman 1975). So a draft of limited capacity fits where outputs vary most.
    """
    full = torch.linalg.lstsq(inputs, outputs).solution
    *_, directions = torch.linalg.svd(inputs @ full, full_matrices=False)
    kept = directions[:rank]
    return full @ kept.T @ kept


def dynamic_tree(
    draft: Callable[[tuple[int, ...]], torch.Tensor], *, width: int, depth: int, nodes: int
) -> tuple[Tree, list[int]]:
    """Grow EAGLE-2's tree (arXiv 2406.16858), made of the most confident candidates instead of a fixed shape.

    The confidence of a node is the product of the draft's probabilities on its path. At each of `depth`
    levels the `width` most confident nodes get their `width` likeliest children. In the end, the `nodes` most
    confident of all nodes are retained. A node is never more confident than its parent, so they form a tree.

    draft: maps a prefix of draft tokens to [V] probabilities. Returns the shape and the tokens of nodes 1..N.
    """
    frontier: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    found = []
    for _ in range(depth):
        children = []
        for prefix, confidence in frontier:
            best = draft(prefix).topk(width)
            for p, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                children.append(((*prefix, token), confidence * p))
        found += children
        frontier = sorted(children, key=lambda child: -child[1])[:width]
    kept = sorted(found, key=lambda node: (-node[1], len(node[0])))[:nodes]

    # Nodes are listed level by level, the children of one node next to each other.
    index: dict[tuple[int, ...], int] = {(): 0}
    parents, tokens = [-1], []
    for level in range(1, depth + 1):
        here = [node for node in kept if len(node[0]) == level]
        for path, _ in sorted(here, key=lambda node: (index[node[0][:-1]], -node[1])):
            index[path] = len(parents)
            parents.append(index[path[:-1]])
            tokens.append(path[-1])
    return Tree(tuple(parents)), tokens


def expected_reach(alphas: torch.Tensor) -> torch.Tensor:
    """Return Pr(num_accepted >= j) = prod_{i<=j} alpha_i, for conditional alphas (Bebop Eq. 12).

    alphas: [..., gamma], of one context; alpha_i is given that depths 1..i-1 were accepted.
    Returns [..., gamma].
    """
    return alphas.cumprod(-1)


def acceptance_length(reach: torch.Tensor) -> torch.Tensor:
    """Return the expected tokens per verify step, 1 + sum_j Pr(num_accepted >= j), bonus token included.

    reach: [..., gamma]. Returns [...], between 1 and gamma + 1. Bebop's E[L] (Eq. 12) is smaller by 1.

    >>> acceptance_length(expected_reach(torch.tensor([0.5, 0.5]))).item()
    1.75
    """
    return 1 + reach.sum(-1)


def geometric_length(alpha: torch.Tensor, gamma: int) -> torch.Tensor:
    """Return the acceptance length for one alpha at all depths: sum_{j=0..gamma} alpha^j.

    Leviathan et al. Eq. 1. alpha: any shape, in [0, 1]. The sum equals the closed form
    (1 - alpha^{gamma+1}) / (1 - alpha), but also holds for alpha = 1, where it is gamma + 1.
    """
    return acceptance_length(expected_reach(alpha.unsqueeze(-1).expand(*alpha.shape, gamma)))


def chain_reach_drafted(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the chain's Pr(num_accepted >= j | drafts) = prod_{i<=j} min(1, p_i / q_i).

    Leviathan et al. Alg. 1. p, q: [..., gamma], probabilities of the drafted tokens; q = 0 is treated as in
    `verify_chain`. Returns [..., gamma] float64.
    """
    ratios = torch.stack([running_weights(p[..., i : i + 1], q[..., i : i + 1]) for i in range(p.shape[-1])])
    return ratios.squeeze(-1).movedim(0, -1).cumprod(-1)


def block_reach_drafted(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return the block's Pr(num_accepted >= j | d_1..d_j) = w_j = min(1, w_{j-1} p_j / q_j).

    Sun et al. 2403.10444. Arguments are those of `chain_reach_drafted`. At every depth and for any drafts,
    the result is at least the chain's reach. It is an average over the drafts after depth j; conditional on
    all gamma drafts, the probability differs (see `verify.block`).
    """
    return running_weights(p, q)


def chain_reach_target(
    target_logprobs: torch.Tensor, draft_logprobs: torch.Tensor, alphas: torch.Tensor
) -> torch.Tensor:
    """Return the chain's reach, from tokens x_1..x_gamma that the *target* sampled; exact in expectation.

    Pr(num_accepted >= j) = E_{x ~ P}[ prod_{i<j} min(1, q_i(x_i) / p_i(x_i)) * alpha_j(x_1..x_{j-1}) ]

    This follows from Leviathan et al. Alg. 1 by a change of measure: q min(1, p/q) = p min(1, q/p). The token
    at depth gamma is not used. For target-only, pass a q that is one-hot at the draft's argmax, and
    `target_only_alpha`.

    target_logprobs, draft_logprobs: [..., gamma] of the realised tokens; the draft's may be -inf.
    alphas: [..., gamma], `rejection_alpha` at each depth. Returns [..., gamma].
    """
    ratios = (draft_logprobs - target_logprobs)[..., :-1].clamp(max=0).cumsum(-1).exp()
    return torch.cat([alphas[..., :1], ratios * alphas[..., 1:]], -1)


def block_reach_target(target_logprobs: torch.Tensor, draft_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the block's reach, from tokens that the *target* sampled; exact in expectation.

    Pr(num_accepted >= j) = E_{x ~ P}[ min(1, min_{k<=j} Q(x_1..x_k) / P(x_1..x_k)) ]

    This follows from Sun et al. 2403.10444 by a change of measure:
    Q(x^j) w_j = P(x^j) min_{0<=k<=j} Q(x^k) / P(x^k). It needs no full distributions. No lossless rule on one
    chain accepts more.

    target_logprobs, draft_logprobs: [..., gamma]; the draft's may be -inf. Returns [..., gamma].
    """
    return (draft_logprobs - target_logprobs).cumsum(-1).cummin(-1).values.clamp(max=0).exp()


def step_cost(gamma: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Return the cost of a verify step in units of plain decode steps: gamma * draft_cost + verify_cost.

    draft_cost: of one draft pass. verify_cost: of the target over gamma + 1 tokens; 1 if decoding is bound by
    memory (Leviathan et al. Thm 3.8), more at large batches. The result is also the break-even acceptance
    length: speculation pays if the acceptance length is larger.
    """
    return gamma * draft_cost + verify_cost


def speedup(length: torch.Tensor, gamma: int, draft_cost: float, verify_cost: float = 1.0) -> torch.Tensor:
    """Return the speed-up over plain decoding: length / (gamma * draft_cost + verify_cost).

    length: acceptance length, any shape; with `geometric_length` the result is Leviathan et al. Thm 3.8.
    Costs are those of `step_cost`. A speed-up of 1 is break-even.
    """
    return length / step_cost(gamma, draft_cost, verify_cost)
