"""Block verification of one chain of drafts: the longest expected acceptance of any lossless rule.

With ratios r_i = p_i(d_i) / q_i(d_i):

    w_0 = 1,  w_i = min(1, w_{i-1} * r_i)                          running weight
    A_i = sum_v max(w_i * p_{i+1}(v) - q_{i+1}(v), 0)              mass of the residual at depth i
    h_i = A_i / (A_i + 1 - w_i) for 0 < i < gamma,  h_gamma = w_gamma
    num_accepted = the largest i with u_i < h_i, or 0              (a failure at i does not stop the search)
    next ~ max(w_i * p_{i+1} - q_{i+1}, 0), normalised, at i = num_accepted < gamma; else p_{gamma+1}

Source: Sun et al. 2403.10444, Algorithm 2. If all deeper coins failed, the coin of depth i decides whether
num_accepted is i. So Pr(num_accepted >= i | d_1..d_i) = w_i, and no lossless rule exceeds w_i.

Comparison with chain verification, where Pr(num_accepted >= i | d_1..d_i) = c_i = prod_{k<=i} min(1, r_k):

- By induction w_i >= c_i for every draft. So block's expected acceptance (over coins and undecided deeper
  drafts) is at least chain's in every context: sum_i w_i >= sum_i c_i. For gamma = 1 both rules make the same
  decision for every coin.
- With the same coins *and* the same complete draft, no coupling can make block >= chain always. Suppose that
  a lossless rule has S_i(d) = Pr(num_accepted >= i | d_1..d_gamma) >= c_i for every d. To be lossless, the
  mass that reaches d_1..d_i must split over the next token as p_{i+1}, so E[S_{i+1} | d_1..d_{i+1}] is at
  most E[S_i | d_1..d_i] * p / q. Also S_{i+1} <= S_i, so induction gives S_i = c_i: the rule is chain itself.
  Block gains because it rejects d_1 more often when d_2 is bad, and less often when d_2 is good.
- Block dominates chain on every path if the drafts after chain's first rejection are sampled again: from a
  node of weight w, block continues to child v with probability min(q(v) / w, p(v)), and chain with
  min(q(v), p(v)).
"""

from __future__ import annotations

import torch

from rlpipe.spec.sampling import is_tiled
from rlpipe.spec.verify.common import picked, runs_on_kernels, sample_after
from rlpipe.spec.verify.verdict import Verdict


def verify_block(
    draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
    residual_uniforms: torch.Tensor,
    *,
    backend: str = "torch",
) -> Verdict:
    """Verify gamma drafts as a block against gamma + 1 target distributions; lossless.

    Arguments as in `verify_chain`.

    accept_prob: w_i = Pr(num_accepted >= i given d_1..d_i), over coins and deeper drafts. Unlike in
    `verify_chain` it is *not* conditional on shallower depths, so compare it with the cumulative product of
    `verify_chain`'s accept_prob. Its sum over depths is an unbiased estimate of num_accepted.

    A draft with q = 0 counts as r = infinity if p > 0, else as r = 0. If rounding leaves the residual without
    mass, the token is sampled from the target row. Raises ValueError for an unknown backend.
    """
    if runs_on_kernels(backend):
        from rlpipe.spec.kernels import verify_block as launch

        return launch(draft_tokens, draft_probs, target_probs, accept_uniforms, residual_uniforms)

    gamma = draft_tokens.shape[1]
    p, q = picked(target_probs, draft_tokens), picked(draft_probs, draft_tokens)
    weights = running_weights(p, q)
    before = torch.cat([torch.ones_like(weights[:, :1]), weights[:, :-1]], 1)
    inner = weights[:, :-1]
    mass = _mass(inner, draft_probs[:, 1:], target_probs[:, 1:-1])

    # Compare u < h_i without a division: h_i = A_i / (A_i + 1 - w_i) for i < gamma, and h_gamma = w_gamma.
    passed = torch.cat(
        [
            accept_uniforms[:, :-1] * (mass + 1 - inner) < mass,
            accept_uniforms[:, -1:] * q[:, -1:] < before[:, -1:] * p[:, -1:],
        ],
        1,
    )
    depths = torch.arange(1, gamma + 1, device=draft_tokens.device)
    num_accepted = (passed * depths).amax(1)

    scale = before.gather(1, num_accepted.clamp(max=gamma - 1).unsqueeze(1))

    def residual(
        rows: slice, draft_row: torch.Tensor | None, target_row: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        assert draft_row is not None, "block verification reads the draft's distributions"
        return _residual(scale[rows], target_row, draft_row, out=out)

    next_token = sample_after(
        residual, draft_probs, target_probs, num_accepted=num_accepted, uniforms=residual_uniforms
    )
    return Verdict(num_accepted=num_accepted, next_token=next_token, accept_prob=weights.to(p.dtype))


def running_weights(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Compute w_i = min(1, w_{i-1} * p_i / q_i), w_0 = 1, in float64.

    q = 0 gives 1 if w_{i-1} * p_i > 0, else 0.

    p, q: [..., gamma] probabilities of the sampled drafts; a NaN in either gives 0. Returns [..., gamma].

    >>> running_weights(torch.tensor([[0.2, 0.3, 0.1]]), torch.tensor([[0.4, 0.1, 0.2]]))
    tensor([[0.5000, 1.0000, 0.5000]], dtype=torch.float64)
    """
    weights, weight = [], torch.ones_like(p[..., 0], dtype=torch.float64)
    for p_i, q_i in zip(p.double().unbind(-1), q.double().unbind(-1), strict=True):
        scaled = weight * p_i
        weight = torch.where(scaled < q_i, scaled / q_i, ((scaled >= q_i) & (scaled > 0)).double())
        weights.append(weight)
    return torch.stack(weights, -1)


@torch.no_grad()
def _mass(weights: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """Compute sum_v max(w * p - q, 0) in float64: [B, K], [B, K, V], [B, K, V] -> [B, K]."""
    scale = weights.unsqueeze(-1)
    if not is_tiled(target_probs):
        return _residual(scale, target_probs, draft_probs).sum(-1, dtype=torch.float64)

    # Compute row by row in one buffer; new memory for each row would cost more than the arithmetic.
    mass, buffer = torch.empty_like(weights), None
    for b in range(len(weights)):
        buffer = _residual(scale[b], target_probs[b], draft_probs[b], out=buffer)
        mass[b] = buffer.sum(-1, dtype=torch.float64)
    return mass


def _residual(
    scale: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute max(scale * p - q, 0) in the dtype of the probabilities, [..., V]."""
    scaled = torch.mul(scale.to(target_probs.dtype), target_probs, out=out)
    return torch.sub(scaled, draft_probs, out=out).clamp_(min=0)
