"""The objectives, as small functions of row statistics. Pure; no logits, no vocabulary.

Notation: p target, q draft, alpha_k = sum_v min(p_k, q_k) at depth k, a_k = min(1, q_k(x_k) / p_k(x_k)) at
the realised token, m the mask, w_n the weight of anchor n. Every loss is a ratio of sums:

    by depth:  sum_n w_n sum_k m_nk loss_nk / sum_n w_n sum_k m_nk
    by chain:  sum_n w_n (g_n - E[tau_n])   / sum_n w_n g_n,     g_n = leading unmasked depths of anchor n

so both are means over drafted tokens, and a chain cut short by the end of a turn counts for what it has.
E[tau] is evaluated by Horner's rule, so its gradient is the product of the depths before (A_k) and of the
chain after (B_k) and never divides by alpha: an alpha of 0 in mid-chain is an ordinary number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlpipe.config.mtp_loss import AnchorWeighting, MtpObjective
from rlpipe.drafts.loss.rows import Rows
from rlpipe.drafts.visit import accept_probabilities, expected_verify_steps, visit_probabilities

NEED_TOKENS = {
    MtpObjective.HARD_CE,
    MtpObjective.E2E_CHAIN,
    MtpObjective.E2E_BLOCK,
    MtpObjective.VERIFY_STEPS,
}
NEED_TARGET = {MtpObjective.KL, MtpObjective.REVERSE_KL, MtpObjective.LK}  # whose gradient reads it again


@dataclass(slots=True, kw_only=True)
class Objective:
    """One objective with its settings.

    kind: which. anchors: how anchors are weighted, or [N] weights. turn_starts: [B, T] with N = B * T,
    for `verify_steps` and `visit`. normalizer: divides the summed loss; None for this call's own weight.
    lk_decay: how fast `lk` moves from KL to TV.
    Raises ValueError where kind or anchors lack turn_starts.
    """

    kind: MtpObjective
    anchors: AnchorWeighting | Tensor = AnchorWeighting.UNIFORM
    turn_starts: Tensor | None = None
    normalizer: float | Tensor | None = None
    lk_decay: float = 3.0

    def __post_init__(self) -> None:
        if self.whole_sequence and self.turn_starts is None:
            raise ValueError(
                f"kind={self.kind}, anchors={self.anchors} follow verify steps through turns; "
                "got turn_starts=None. Pass the [B, T] bool of `depth_targets`, with N = B * T."
            )

    @property
    def visiting(self) -> bool:
        """Whether anchors are weighted by visits."""
        return isinstance(self.anchors, str) and AnchorWeighting(self.anchors) is AnchorWeighting.VISIT

    @property
    def whole_sequence(self) -> bool:
        """Whether the gradient of an anchor depends on other anchors."""
        return self.visiting or self.kind is MtpObjective.VERIFY_STEPS

    @property
    def needs_tokens(self) -> bool:
        """Whether realised tokens enter."""
        return self.visiting or self.kind in NEED_TOKENS

    def total_and_weight(self, rows: Rows, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of the loss, scalars. rows, mask: of all N anchors if whole_sequence."""
        if self.kind is MtpObjective.VERIFY_STEPS:
            return verify_steps(rows, mask, self.turn_starts)
        weights = self._weights(rows, mask)[:, None]
        if self.kind in CHAINS:
            mask = mask.cumprod(1).bool()
            accepted = CHAINS[self.kind](rows, mask)
            total = (weights * mask).sum() - (weights[:, 0] * accepted).sum()
        else:
            total = (weights * mask * DEPTHS[self.kind](rows, self.lk_decay)).sum()
        return total, (weights * mask).sum()

    def divide(self, total: Tensor, weight: Tensor) -> Tensor:
        """The loss from its numerator and own denominator; 0 where nothing is unmasked."""
        divisor = weight if self.normalizer is None else self.normalizer
        divisor = torch.as_tensor(divisor, dtype=total.dtype, device=total.device)
        return total / divisor.where(divisor > 0, 1)

    def _weights(self, rows: Rows, mask: Tensor) -> Tensor:
        """[N] detached weights of anchors."""
        if isinstance(self.anchors, Tensor):
            return self.anchors.detach().to(rows.alpha.dtype)
        if not self.visiting:
            return torch.ones_like(rows.alpha[:, 0])
        accept, mask = _by_sequence(rows, mask, self.turn_starts)
        return visit_probabilities(accept.detach(), mask, self.turn_starts).flatten().to(rows.alpha.dtype)


def lk_hybrid(rows: Rows, decay: float) -> Tensor:
    """lambda KL(p || q) + (1 - lambda) TV(p, q), lambda = exp(-decay * alpha), alpha detached, row by row.

    KL where the overlap is small and TV's gradient vanishes, TV where it is large. Source: Samarin et
    al., "LK losses" (arXiv 2602.23881), the hybrid with decay 3; per row as vllm-project/speculators #673.
    """
    share = (-decay * rows.alpha.detach()).exp()
    return share * rows.kl + (1 - share) * (1 - rows.alpha)


def chain_of_overlaps(rows: Rows, mask: Tensor) -> Tensor:
    """[N] sum_j prod_{i <= j} alpha_i (Bebop Eq. 12, 13): exact if the chain's tokens come from the draft."""
    return _horner(rows.alpha, rows.alpha, mask)


def chain_of_samples(rows: Rows, mask: Tensor) -> Tensor:
    """[N] sum_j a_1 ... a_{j-1} alpha_j: E[tau] of chain verification, exact for tokens of the target.

    Averaged over x ~ p: E_p[a_1 ... a_{j-1} alpha_j] is the probability that j drafts are accepted,
    as p(x) a(x) = min(p, q)(x) is the law of accepted drafts. Source: notes, "End-to-end TV loss".
    """
    return _horner(rows.alpha, accept_probabilities(rows.draft_logprob, rows.target_logprob), mask)


def block_of_samples(rows: Rows, mask: Tensor) -> Tensor:
    """[N] sum_j min(1, min_{k <= j} Q(x^k) / P(x^k)): E[tau] of block verification, for tokens of the target.

    P, Q: joint probabilities of the first k tokens. Block verification (arXiv 2403.10444) keeps x^j
    with Q(x^j) min_k P(x^j | x^k) / Q(x^j | x^k) = P(x^j) min_k Q(x^k) / P(x^k), k = 0..j.
    """
    log_ratio = (rows.draft_logprob - rows.target_logprob).cumsum(1)
    return (mask * log_ratio.cummin(1).values.clamp(max=0).exp()).sum(1)


def verify_steps(rows: Rows, mask: Tensor, turn_starts: Tensor) -> tuple[Tensor, Tensor]:
    """Expected verify steps of all sequences, and the tokens they emit (see rlpipe.drafts.visit)."""
    accept, mask = _by_sequence(rows, mask, turn_starts)
    steps = expected_verify_steps(accept, mask, turn_starts).sum()
    emitted = (mask[..., 0] & (turn_starts.cumsum(1) > 0)).sum()
    return steps.to(accept.dtype), emitted.to(accept.dtype)


DEPTHS = {
    MtpObjective.HARD_CE: lambda rows, _: -rows.draft_logprob,  # -log q(x)
    MtpObjective.KL: lambda rows, _: rows.kl,  # gradient q - p, as of soft cross-entropy: Bebop App. B
    MtpObjective.REVERSE_KL: lambda rows, _: rows.reverse_kl,  # Bebop Eq. 17
    MtpObjective.TV: lambda rows, _: 1 - rows.alpha,  # Bebop Eq. 10, 11
    MtpObjective.LK: lk_hybrid,
}
CHAINS = {
    MtpObjective.E2E_TV: chain_of_overlaps,
    MtpObjective.E2E_CHAIN: chain_of_samples,
    MtpObjective.E2E_BLOCK: block_of_samples,
}


def _horner(last: Tensor, passed: Tensor, mask: Tensor) -> Tensor:
    """[N] sum_j passed_1 ... passed_{j-1} last_j over leading depths."""
    accepted = torch.zeros_like(last[:, 0])
    for depth in reversed(range(last.shape[1])):
        accepted = mask[:, depth] * (last[:, depth] + passed[:, depth] * accepted)
    return accepted


def _by_sequence(rows: Rows, mask: Tensor, turn_starts: Tensor) -> tuple[Tensor, Tensor]:
    """Accept probabilities and mask as [B, T, K]."""
    if turn_starts.numel() != len(mask):
        raise ValueError(
            f"turn_starts has shape {list(turn_starts.shape)} but there are {len(mask)} anchors; "
            "pass one entry per anchor, [B, T] with N = B * T."
        )
    shape = (*turn_starts.shape, -1)
    accept = accept_probabilities(rows.draft_logprob, rows.target_logprob)
    return accept.view(shape), mask.view(shape)
