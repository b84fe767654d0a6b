"""Verification of a tree of drafts: a walk from the root, one round of rejection per sibling.

At an accepted node with target row p and draft row q, its children x_1, x_2, ... are verified in order:

    r_1 = p                                       the target given all rejections so far
    accept x_j if u_j * q_j(x_j) < r_j(x_j)       then walk on from x_j with its own p and q
    else r_{j+1} = max(r_j - q_j, 0), normalised
    all children rejected:  next ~ r of the node where the walk ends; at a leaf that is p

q_j is the distribution x_j was sampled from, given its earlier siblings:

    with replacement      q_j = q                                       SpecInfer, Miao et al. 2305.09781
    without               q_j = q without x_1..x_{j-1}, normalised      RRSw, Jeon et al. 2402.14160
    draft_probs = None    q_j = one-hot at x_j (top-k children, say)    target-only in rounds

Each round is rejection sampling of x_j against r_j, so the token that the rounds of a node emit has
distribution p, whatever the number of children: lossless. A chain is the tree with one child per node, and
where q > 0 decides bit for bit as `verify_chain`.
"""

from __future__ import annotations

import torch

from rlpipe.spec.sampling import sample_cdf
from rlpipe.spec.tree import Tree
from rlpipe.spec.verify.common import nonempty, row
from rlpipe.spec.verify.verdict import TreeVerdict


def verify_tree(
    tree: Tree,
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
    residual_uniforms: torch.Tensor,
    *,
    replacement: bool,
) -> TreeVerdict:
    """Verify a static tree of N drafts by rejection sampling; lossless.

    draft_tokens: [B, N] int64, node n at column n - 1. draft_probs: [B, N + 1, V], row n the q at node n
    from which its children were sampled (rows of leaves are not read), or None if the children were
    chosen deterministically. target_probs: [B, N + 1, V], row n the target after node n.
    accept_uniforms: [B, N], residual_uniforms: [B], float64 in [0, 1), independent of each other and of
    the drafts. replacement: whether siblings were sampled independently (True) or without replacement;
    has no effect for draft_probs = None.

    accept_prob: min(1, r_j / q_j) at each node, given that its parent was reached and its earlier
    siblings rejected. A sibling that q cannot produce, because q is 0 there or its earlier siblings
    hold all of q's mass, is verified as a deterministic one: that is lossless however it was chosen.
    Where rounding leaves r without mass, the target row itself is sampled.
    """
    # Every node's rounds are computed; only those of the nodes on the path decide.
    reached = torch.zeros_like(draft_tokens[:, 0])
    residual = torch.zeros_like(target_probs[:, 0])
    accept_prob = []
    for node in range(tree.num_drafts + 1):
        children = tree.children(node)
        if not children:
            continue
        columns = slice(children[0] - 1, children[-1])
        passed, probs, node_residual = _rounds(
            draft_tokens[:, columns],
            None if draft_probs is None else draft_probs[:, node],
            target_probs[:, node],
            coins=accept_uniforms[:, columns],
            replacement=replacement,
        )
        accept_prob += probs

        here = reached == node
        residual = torch.where(here.unsqueeze(1), node_residual, residual)
        first = passed.long().argmax(1) + children[0]
        reached = torch.where(here & passed.any(1), first, reached)

    # At a leaf, which has no rounds, the next token is the target's own.
    target_row = row(target_probs, reached)
    inner = torch.tensor([bool(tree.children(n)) for n in range(tree.num_drafts + 1)], device=reached.device)
    weights = torch.where(inner[reached].unsqueeze(1), residual, target_row)
    next_token = sample_cdf(nonempty(weights, target_row), residual_uniforms)
    return _verdict(tree, reached, next_token, torch.stack(accept_prob, 1))


def verify_tree_greedy(tree: Tree, draft_tokens: torch.Tensor, target_scores: torch.Tensor) -> TreeVerdict:
    """Accept the deepest path of argmax tokens; emits what argmax decoding of the target would emit.

    accepted[n] = accepted[parent(n)] and d_n = argmax p_parent(n)        (LongSpec, greedy verification)

    draft_tokens: [B, N] int64. target_scores: [B, N + 1, V], logits or probabilities, row n after node
    n. Among equally deep paths (repeated siblings) the first one wins. accept_prob: 1.0 or 0.0, whether
    a draft is the argmax after its parent.
    """
    best = target_scores.argmax(-1)
    parents = torch.tensor(tree.parents[1:], device=best.device)
    agrees = draft_tokens == best[:, parents]
    accepted = [torch.ones_like(agrees[:, 0])]
    for node, parent in enumerate(tree.parents[1:], start=1):
        accepted.append(accepted[parent] & agrees[:, node - 1])
    depths = torch.tensor(tree.depths, device=best.device)
    reached = (torch.stack(accepted, 1) * depths).argmax(1)
    next_token = best.gather(1, reached.unsqueeze(1)).squeeze(1)
    return _verdict(tree, reached, next_token, agrees.float())


def rearrange_kv(cache: torch.Tensor, base: torch.Tensor, kv_source: torch.Tensor) -> torch.Tensor:
    """Move the accepted path's keys and values to the slots after the root's, in place.

    After a verify pass node n is in slot base + n; afterwards the accepted node of depth i is in slot
    base + i, as if it had been decoded without drafts. Slots beyond the accepted path are stale.

    cache: [..., B, heads, slots, head_dim]. base: [B] int64, the root's slot. kv_source: [B, D] of a
    `TreeVerdict`. Returns cache.
    """
    depth, heads, width = kv_source.shape[1], cache.shape[-3], cache.shape[-1]
    shape = (*cache.shape[:-2], depth, width)

    def slots(offsets: torch.Tensor) -> torch.Tensor:
        return (base.unsqueeze(1) + offsets)[:, None, :, None].expand(-1, heads, -1, width).expand(shape)

    moved = cache.gather(-2, slots(kv_source))
    return cache.scatter_(-2, slots(torch.arange(1, depth + 1, device=cache.device)), moved)


def _rounds(
    tokens: torch.Tensor,
    draft_row: torch.Tensor | None,
    target_row: torch.Tensor,
    *,
    coins: torch.Tensor,
    replacement: bool,
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Run the rounds of one node's children x_1..x_k, each as if all earlier ones were rejected.

    tokens, coins: [B, k]. draft_row, target_row: [B, V]. Returns passed [B, k] bool, k accept
    probabilities [B], and the target's residual after k rejections, unnormalised [B, V]. Instead of
    normalising r and q, their masses are carried along.
    """
    residual, mass = target_row, 1.0
    siblings, siblings_mass = draft_row, 1.0
    passed, probs = [], []
    for j, token in enumerate(tokens.split(1, 1)):
        r = residual.gather(1, token)
        if siblings is None:
            q = torch.ones_like(r)
        else:
            q = siblings.gather(1, token)
            possible = (q > 0) & (siblings_mass > 0)
            q = torch.where(possible, q / siblings_mass, 1.0)

        passed.append(coins[:, j : j + 1] * (mass * q) < r)
        probs.append((r / (mass * q)).nan_to_num(0.0).clamp(max=1).to(target_row.dtype).squeeze(1))

        # A deterministic sibling, once rejected, is removed; a sampled one takes q off the residual.
        forbidden = residual.scatter(1, token, 0.0)
        if siblings is None:
            residual = forbidden
        else:
            rejected = (residual - siblings * (mass / siblings_mass)).clamp(min=0)
            residual = torch.where(possible, rejected, forbidden)
            if not replacement:
                siblings = siblings.scatter(1, token, 0.0)
                siblings_mass = siblings.sum(1, keepdim=True, dtype=torch.float64)
        mass = residual.sum(1, keepdim=True, dtype=torch.float64)
    return torch.cat(passed, 1), probs, residual


def _verdict(
    tree: Tree, reached: torch.Tensor, next_token: torch.Tensor, accept_prob: torch.Tensor
) -> TreeVerdict:
    """Return the verdict of a walk that ended at node reached [B]."""
    path = tree.paths().to(reached.device)[reached]
    return TreeVerdict(
        num_accepted=(path >= 0).sum(1), next_token=next_token, path=path, accept_prob=accept_prob
    )
