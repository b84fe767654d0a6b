"""Verification of a tree of drafts: a walk from the root, one round of rejection per sibling.

At an accepted node with target row p and draft row q, its children x_1, x_2, ... are verified in order:

    r_1 = p                                       r_j: the target given all rejections so far
    accept x_j if u_j * q_j(x_j) < r_j(x_j)       then continue from x_j with the p and q of x_j
    else r_{j+1} = max(r_j - q_j, 0), normalised
    all children rejected:  next ~ the last r of the node where the walk ends; at a leaf this is p

q_j is the distribution from which x_j was sampled, given its earlier siblings:

    with replacement      q_j = q                                       SpecInfer, Miao et al. 2305.09781
    without               q_j = q without x_1..x_{j-1}, normalised      RRSw, Jeon et al. 2402.14160
    draft_probs = None    q_j = one-hot at x_j (e.g. top-k children)    target-only in rounds

Each round is rejection sampling of x_j against r_j. So the token emitted by the rounds of a node has
distribution p for any number of children: the rule is lossless. A chain is a tree with one child per node; if
q > 0, the decisions equal those of `verify_chain` bit for bit.
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

    draft_tokens: [B, N] int64; column n - 1 is node n. draft_probs: [B, N + 1, V]; row n is the distribution
    q from which the children of node n were sampled (rows of leaves are not read). None if the children were
    chosen deterministically. target_probs: [B, N + 1, V]; row n is the target after node n.
    accept_uniforms: [B, N], residual_uniforms: [B], float64 in [0, 1), independent of each other and of
    the drafts. replacement: whether siblings were sampled independently (True) or without replacement;
    has no effect if draft_probs is None.

    accept_prob: min(1, r_j / q_j) at each node, given that its parent was reached and its earlier
    siblings were rejected. If q cannot produce a sibling (q is 0 there, or its earlier siblings have all of
    q's mass), it is verified as a deterministic sibling, which is lossless for any choice.
    If rounding leaves r without mass, the token is sampled from the target row.
    """
    # Compute the rounds of every node; only the rounds of nodes on the path decide.
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

    # A leaf has no rounds, so its next token is sampled from the target.
    target_row = row(target_probs, reached)
    inner = torch.tensor([bool(tree.children(n)) for n in range(tree.num_drafts + 1)], device=reached.device)
    weights = torch.where(inner[reached].unsqueeze(1), residual, target_row)
    next_token = sample_cdf(nonempty(weights, target_row), residual_uniforms)
    return _verdict(tree, reached, next_token, torch.stack(accept_prob, 1))


def verify_tree_greedy(tree: Tree, draft_tokens: torch.Tensor, target_scores: torch.Tensor) -> TreeVerdict:
    """Accept the deepest path of argmax tokens; emits the same tokens as argmax decoding of the target.

    accepted[n] = accepted[parent(n)] and d_n = argmax p_parent(n)        (LongSpec, greedy verification)

    draft_tokens: [B, N] int64. target_scores: [B, N + 1, V], logits or probabilities; row n is after node
    n. Among equally deep paths (repeated siblings) the first one wins. accept_prob: 1.0 if a draft is the
    argmax after its parent, else 0.0.
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
    """Run the rounds of one node's children x_1..x_k, each as if all earlier children were rejected.

    tokens, coins: [B, k]. draft_row, target_row: [B, V]. Returns passed [B, k] bool, k accept
    probabilities [B], and the target's unnormalised residual after k rejections [B, V]. r and q are not
    normalised; their masses are tracked instead.
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

        # A rejected deterministic sibling is removed from the residual. For a sampled one, q is subtracted.
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
    """Return the verdict of a walk that ended at the nodes `reached` [B]."""
    path = tree.paths().to(reached.device)[reached]
    return TreeVerdict(
        num_accepted=(path >= 0).sum(1), next_token=next_token, path=path, accept_prob=accept_prob
    )
