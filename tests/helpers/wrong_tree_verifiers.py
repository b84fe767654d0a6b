"""Tree verifiers with one planted bug each, from a plain recursive one that is right (`plain_tree`)."""

from __future__ import annotations

import torch

from rlpipe.spec.sampling import sample_cdf
from rlpipe.spec.verify import TreeVerdict


def _normalised(weights):
    return weights / weights.sum() if weights.sum() > 0 else weights


def _without(q, token):
    return q.index_fill(0, torch.tensor(token), 0.0)


def _tree(
    doc,
    reject=lambda r, q: _normalised((r - q).clamp(min=0)),
    next_q=lambda q, token, replacement: q if replacement else _normalised(_without(q, token)),
    final=lambda r, p: r,
    leaf_row=lambda tree, node: node,
    coin=lambda coins, node: coins[node - 1],
    accept=lambda u, r, q: u * q < r,
):
    """Multi-round rejection over siblings, one row at a time.

    reject: (r, q) after a rejection -> r. next_q: (q, rejected token, replacement) -> q of the next
    sibling. final: (r, p) -> law after the last rejection. leaf_row: (tree, leaf) -> the target's row there.
    coin: (coins, node) -> the coin of a node. accept: (coin, r, q), of the token -> bool.
    """

    def walk(tree, node, tokens, q_rows, p_rows, coins, replacement):
        """Accepted nodes below `node` and the law [V] of the token after them."""
        children = tree.children(node)
        if not children:
            return [], p_rows[leaf_row(tree, node)]
        r = p_rows[node]
        q = None if q_rows is None else q_rows[node]
        for child in children:
            token = int(tokens[child - 1])
            told = q
            if q is None or q[token] == 0:
                told = torch.zeros_like(r).index_fill(0, torch.tensor(token), 1.0)
            if accept(coin(coins, child), r[token], told[token]):
                path, law = walk(tree, child, tokens, q_rows, p_rows, coins, replacement)
                return [child, *path], law
            r = reject(r, told)
            q = None if q is None else next_q(q, token, replacement)
        law = final(r, p_rows[node])
        return [], law if law.sum() > 0 else p_rows[node]

    def verify(
        tree,
        draft_tokens,
        draft_probs,
        target_probs,
        accept_uniforms,
        residual_uniforms,
        *,
        replacement,
    ):
        paths, laws = [], []
        for i, tokens in enumerate(draft_tokens):
            q_rows = None if draft_probs is None else draft_probs[i]
            path, law = walk(tree, 0, tokens, q_rows, target_probs[i], accept_uniforms[i], replacement)
            paths.append(path + [-1] * (tree.max_depth - len(path)))
            laws.append(law)
        path = torch.tensor(paths)
        return TreeVerdict(
            num_accepted=(path >= 0).sum(1),
            next_token=sample_cdf(torch.stack(laws), residual_uniforms),
            path=path,
            accept_prob=torch.full(draft_tokens.shape, float("nan")),
        )

    verify.__doc__ = doc
    return verify


plain_tree = _tree("No bug.")

# name -> (how the siblings are drawn, verifier)
TREE_MUTANTS = {
    "residual_not_updated": ("replacement", _tree("Every sibling is judged against p.", lambda r, q: r)),
    "residual_not_normalised": (
        "replacement",
        _tree("What is left of p is compared unnormalised.", lambda r, q: (r - q).clamp(min=0)),
    ),
    "target_only_coin": (
        "replacement",
        _tree("Sampled siblings are accepted with probability r.", accept=lambda u, r, q: u < r),
    ),
    "draft_not_renormalised": (
        "without",
        _tree(
            "Earlier siblings are taken out of q, which keeps its scale.",
            next_q=lambda q, t, _: _without(q, t),
        ),
    ),
    "siblings_judged_as_independent": (
        "without",
        _tree("Judged as drawn with replacement.", next_q=lambda q, t, _: q),
    ),
    "resample_from_target": (
        "without",
        _tree("After all rejections p itself is drawn.", final=lambda r, p: p),
    ),
    "rejected_token_kept": ("top", _tree("A rejected deterministic sibling stays possible.", lambda r, q: r)),
    "bonus_from_the_parent": (
        "without",
        _tree("At a leaf the parent's row is drawn.", leaf_row=lambda tree, node: tree.parents[node]),
    ),
    "one_coin_for_all_siblings": (
        "replacement",
        _tree("All nodes share the first coin.", coin=lambda coins, node: coins[0]),
    ),
}
