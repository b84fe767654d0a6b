"""Objectives on a fixed text. Each has a function, with equation and source, and a row in `OBJECTIVES`.

They are pure functions of row statistics and read no logits. Notation: p target, q draft, alpha_k = sum_v
min(p_k, q_k) at depth k, a_k = min(1, q_k(x_k) / p_k(x_k)) at the realised token x_k, m the mask, w_n the
weight of anchor n. Every loss is a ratio of sums, a mean over drafted tokens:

    by depth:  sum_n w_n sum_k m_nk loss_nk / sum_n w_n sum_k m_nk
    by chain:  sum_n w_n (g_n - E[tau_n])   / sum_n w_n g_n,     g_n = leading unmasked depths of anchor n

so a chain that is cut short by the end of a turn counts only the depths it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlpipe.config.draft_objectives import DraftObjective
from rlpipe.drafts.visit import (
    accept_probabilities,
    by_sequence,
    expected_accepted,
    expected_verify_steps,
)

if TYPE_CHECKING:
    from rlpipe.drafts.loss.rows import Rows

LK_DECAY = 3.0
DEPTH_DECAY = 0.8
TAU_MAX = 0.9
TOP = 1000
EAGLE1_TOKENS = 0.1


@dataclass(slots=True, kw_only=True, frozen=True)
class Supervised:
    """One objective, in exactly one of three forms.

    by_depth: rows -> loss of each drafted token, [N, K]. by_chain: rows and a mask without gaps -> expected
    number of accepted drafts of each anchor, [N]. by_sequence: rows, mask, turn_starts -> numerator and
    denominator. needs_tokens: whether the loss uses realised tokens. needs_target: whether it has a KL term;
    the gradient of a KL term reads the target again. top: if set, the loss sees only this many of the largest
    draft logits (the reported statistics use all logits); None for all. features: whether `feature_distance`
    is added; it needs hidden states.
    """

    by_depth: Callable[[Rows], Tensor] | None = None
    by_chain: Callable[[Rows, Tensor], Tensor] | None = None
    by_sequence: Callable[[Rows, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    needs_tokens: bool = False
    needs_target: bool = False
    top: int | None = None
    features: bool = False


def hard_ce(rows: Rows) -> Tensor:
    """Compute the cross-entropy against the realised token, -log q(x): [N, K].

    On text that the target sampled it is an unbiased estimate of soft cross-entropy, the paper's "CE" (`kl`).
    On other text it trains the draft to imitate that text.
    """
    return -rows.draft_logprob


def kl(rows: Rows) -> Tensor:
    """Compute KL(p || q): [N, K].

    Its gradient, q - p, equals the gradient of soft cross-entropy. Source: Bebop App. B, "CE".
    """
    return rows.kl


def reverse_kl(rows: Rows) -> Tensor:
    """Compute KL(q || p): [N, K]. Source: Bebop Eq. 17."""
    return rows.reverse_kl


def tv(rows: Rows) -> Tensor:
    """Compute the rejected mass, 1 - alpha: [N, K]. Source: Bebop Eq. 10, 11.

    It uses the full vocabulary and has no clamp, as in the paper's runs. `tv_clamp` and `tv_top` are two
    options of the paper's kernel.
    """
    return 1 - rows.alpha


def tv_clamp(rows: Rows) -> Tensor:
    """Compute min(1 - alpha, tau_max), tau_max = 0.9: [N, K]. Source: Bebop App. F, Alg. 1, line 15.

    A row beyond the clamp has no gradient. The paper gives no value of tau_max; this one is rlpipe's.
    """
    return (1 - rows.alpha).clamp(max=TAU_MAX)


def eagle1(rows: Rows) -> Tensor:
    """Compute 0.1 KL(p || q), the token part of EAGLE-1's loss: [N, K].

    The other part, of weight 1, is `feature_distance`. Source: EAGLE (arXiv 2401.15077, section 4.2). The
    paper uses the cross-entropy against the target's distribution, which has the same gradient as this KL.
    """
    return EAGLE1_TOKENS * rows.kl


def feature_distance(draft_hidden: Tensor, target_hidden: Tensor) -> Tensor:
    """Compute SmoothL1(f, g) averaged over the H features: [N, K].

    draft_hidden: [N, K, H], the inputs of the head. target_hidden: [N + extra, H]; depth k at anchor n is
    compared with row n + k, or with the last row if there is no row n + k. Source: EAGLE, section 4.2.

    >>> feature_distance(torch.tensor([[[3.0, 0.5]]]), torch.tensor([[9.0, 9.0], [1.0, 0.5]])).tolist()
    [[0.75]]
    """
    anchors, depths = (torch.arange(size, device=draft_hidden.device) for size in draft_hidden.shape[:2])
    index = (anchors[:, None] + depths + 1).clamp(max=len(target_hidden) - 1)

    dtype = torch.promote_types(draft_hidden.dtype, torch.float32)
    pair = draft_hidden.to(dtype), target_hidden.detach()[index].to(dtype)
    return torch.nn.functional.smooth_l1_loss(*pair, reduction="none").mean(-1)


def tv_linear(rows: Rows) -> Tensor:
    """Compute (K - k + 1) / K times the rejected mass of depth k: [N, K].

    A baseline with fixed weights for `e2e_tv`. The weights are those of the gradient of `e2e_tv` where every
    draft is accepted: d/d alpha_k of sum_j alpha_1 ... alpha_j at alpha = 1, divided by K.
    """
    depths = rows.alpha.shape[1]
    weights = torch.arange(depths, 0, -1, dtype=rows.alpha.dtype, device=rows.alpha.device) / depths
    return weights * (1 - rows.alpha)


def tv_decay(rows: Rows) -> Tensor:
    """Compute 0.8^(k - 1) times the rejected mass of depth k: [N, K].

    A baseline with fixed weights for `e2e_tv`; the decay is from EAGLE-3's published training code.
    """
    depth = torch.arange(rows.alpha.shape[1], dtype=rows.alpha.dtype, device=rows.alpha.device)
    return DEPTH_DECAY**depth * (1 - rows.alpha)


def lk(rows: Rows) -> Tensor:
    """Compute lambda KL(p || q) + (1 - lambda) TV(p, q), lambda = exp(-3 alpha), alpha detached: [N, K].

    Each row is mostly KL where the overlap is small and the gradient of TV vanishes, and mostly TV where the
    overlap is large. Source: Samarin et al., "LK losses" (arXiv 2602.23881), the hybrid with decay 3; lambda
    is set per row, as in vllm-project/speculators #673.
    """
    share = (-LK_DECAY * rows.alpha.detach()).exp()
    return share * rows.kl + (1 - share) * (1 - rows.alpha)


def e2e_tv(rows: Rows, mask: Tensor) -> Tensor:
    """Compute E[tau] = sum_j alpha_1 ... alpha_j of a chain: [N].

    Exact if the chain's tokens come from the draft. Source: Bebop Eq. 12, 13.
    """
    return expected_accepted(rows.alpha, rows.alpha, mask)


def e2e_chain(rows: Rows, mask: Tensor) -> Tensor:
    """Compute E[tau] = sum_j a_1 ... a_{j-1} alpha_j, exact for tokens sampled from the target: [N].

    On average over x ~ p, E_p[a_1 ... a_{j-1} alpha_j] is the probability that j drafts are accepted, because
    p(x) a(x) = min(p, q)(x) is the distribution of accepted drafts. Source: notes, "End-to-end TV loss".
    """
    accept = accept_probabilities(rows.draft_logprob, rows.target_logprob)
    return expected_accepted(rows.alpha, accept, mask)


def e2e_block(rows: Rows, mask: Tensor) -> Tensor:
    """Compute E[tau] = sum_j min(1, min_{k <= j} Q(x^k) / P(x^k)) of block verification: [N].

    The tokens must be sampled from the target. P, Q: joint probabilities of the first k tokens. Block
    verification (arXiv 2403.10444) accepts x^j with Q(x^j) min_k P(x^j | x^k) / Q(x^j | x^k) = P(x^j) min_k
    Q(x^k) / P(x^k), k = 0..j.
    """
    log_ratio = (rows.draft_logprob - rows.target_logprob).cumsum(1)
    return (mask * log_ratio.cummin(1).values.clamp(max=0).exp()).sum(1)


def verify_steps(rows: Rows, mask: Tensor, turn_starts: Tensor) -> tuple[Tensor, Tensor]:
    """Compute two scalars: the expected verify steps of all sequences, and the tokens they emit.

    rows, mask: [N, K]. turn_starts: [B, T] bool, N = B * T. Exact for tokens sampled from the target. Source:
    `rlpipe.drafts.visit`. Raises ValueError where `by_sequence` does.
    """
    accept, mask = by_sequence(rows, mask, turn_starts)
    steps = expected_verify_steps(accept, mask, turn_starts).sum()
    emitted = (mask[..., 0] & (turn_starts.cumsum(1) > 0)).sum()
    return steps.to(accept.dtype), emitted.to(accept.dtype)


OBJECTIVES: dict[DraftObjective, Supervised] = {
    DraftObjective.HARD_CE: Supervised(by_depth=hard_ce, needs_tokens=True),
    DraftObjective.KL: Supervised(by_depth=kl, needs_target=True),
    DraftObjective.REVERSE_KL: Supervised(by_depth=reverse_kl, needs_target=True),
    DraftObjective.TV: Supervised(by_depth=tv),
    DraftObjective.TV_LINEAR: Supervised(by_depth=tv_linear),
    DraftObjective.TV_DECAY: Supervised(by_depth=tv_decay),
    DraftObjective.TV_CLAMP: Supervised(by_depth=tv_clamp),
    DraftObjective.TV_TOP: Supervised(by_depth=tv, top=TOP),
    DraftObjective.LK: Supervised(by_depth=lk, needs_target=True),
    DraftObjective.EAGLE1: Supervised(by_depth=eagle1, needs_target=True, features=True),
    DraftObjective.E2E_TV: Supervised(by_chain=e2e_tv),
    DraftObjective.E2E_CHAIN: Supervised(by_chain=e2e_chain, needs_tokens=True),
    DraftObjective.E2E_BLOCK: Supervised(by_chain=e2e_block, needs_tokens=True),
    DraftObjective.VERIFY_STEPS: Supervised(by_sequence=verify_steps, needs_tokens=True),
}


def supervised(kind: DraftObjective | str) -> Supervised:
    """Return the objective with a name.

    Raises ValueError for an unknown name, and for an objective that learns from windows.
    """
    kind = DraftObjective(kind)
    if kind not in OBJECTIVES:
        raise ValueError(
            f"kind={kind} learns from windows that a draft generates and has no loss on a fixed text: use "
            f"one of {', '.join(OBJECTIVES)} here, or train a draft with draft.objective={kind}."
        )
    return OBJECTIVES[kind]
