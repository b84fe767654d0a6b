"""Optimal budgeted rejection sampling (OBRS, Jackpot): which sampled tokens to keep, and their weights.

Owns all of it: the math, the draws, the calibration that is remembered, weights, mask and metrics. With p
the target, q the rollout's distribution that sampled and q' that of the tokens kept:

    accept x with   a(x) = min(1, p(x) / (lam q(x)))                      Jackpot Eq. 3
    kept            q'(x) = min(q(x), p(x) / lam) / Z                     Eq. 4
    rate            Z = sum_x min(q(x), p(x) / lam) = E_q[a]              Section 4.4.2
    weight          w(x) = Z max(lam, p(x) / q(x))                        Algorithm 1, line 23

For a token that was accepted, w = p / q'. So E_q[a w f] = Z E_p[f]: among the kept tokens of one position
the weighted mean is that of the target, and a position counts in proportion to its Z. The correction is of
each token given its past; the past itself stays the rollout's.

How this differs from the paper
1. Z. The paper sums over the union of both top-k, but a rollout engine sends the logprobs of its own top-k
   only, so q is unknown at the target's other favourites. The candidates here are the rollout's top-k, and
   `normalizer_bounds` adds what the rest can contribute at most. Where p = q and lam = 1 that gives Z = 1
   exactly, where the paper's sum gives less and a different weight to every token.
2. Algorithm 1 puts p_new into w whatever the target is. w(p_new) is p_new / q' only where p_new is the
   target, or where both p_new and p are at least lam q (nothing can be rejected). We use the target.
3. kappa can be taken from the acceptance probabilities, whose mean is the acceptance rate without the noise
   of the draws. It is measured on one batch and applied in the next: the weights then need no second pass
   over the batch and do not depend on how it was cut.

What is needed: top-k logprobs with every sampled token (`SamplingParams.top_logprobs`), and the target's
logprobs at those ids, gathered from the logits of the forward pass that is made anyway. With a vocabulary
cut over ranks that is one all-reduce of [P, K] numbers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlpipe.algo.rule import CorrectionInputs, CorrectionRule, TokenWeights
from rlpipe.config.algo import AlgoConfig, ObrsCalibration, ObrsConfig, ObrsNormalizer, ObrsTarget
from rlpipe.metrics.values import Mean, Ratio, Value
from rlpipe.types import Trajectory

_SAFETY = 20.0  # bound of log ratios, as verl's
_KAPPA = "rollout_corr/obrs_kappa"


class Obrs(CorrectionRule):
    """Weights min(w, c1) min(p_proximal / p_target, c2) of the accepted tokens (Jackpot Eq. 5).

    kappa: calibration of the normalisers of the next batch, measured on the last one.
    """

    counts_masked = False  # obrs_acceptance says it

    def __init__(self, config: AlgoConfig) -> None:
        super().__init__(config)
        self.kappa = 1.0
        self.target_at_start = config.obrs.target is ObrsTarget.REFERENCE

    def top_logprobs(self, vocab_size: int) -> int:
        exact = self.config.obrs.normalizer is ObrsNormalizer.EXACT
        return vocab_size if exact else min(self.config.obrs.top_k, vocab_size)

    def columns(self, trajectory: Trajectory, seed: int) -> dict[str, np.ndarray]:
        return {"uniforms": token_uniforms(seed, trajectory.trajectory_id, len(trajectory.token_ids))}

    def weigh(self, inputs: CorrectionInputs) -> TokenWeights:
        extras, settings = inputs.extras, self.config.obrs
        if extras.rollout_top is None:
            raise ValueError(
                "algo.correction=obrs got no candidates: the batch carries no top-k logprobs of the rollout. "
                "Collect with SamplingParams.top_logprobs=algo.obrs.top_k."
            )
        where = inputs.mask.bool()
        proximal, sampled = inputs.trainer_logprobs[where], inputs.rollout_logprobs[where]
        target = proximal if self.target_at_start else inputs.current_logprobs[where]
        told = ObrsInputs(
            uniforms=extras.columns["uniforms"],
            rollout_top=extras.rollout_top,
            target_top=extras.target_top,
            kappa=self.kappa,
        )
        verdict = judge(target, sampled, told, settings)
        to_proximal = (proximal - target).exp().clamp(max=settings.c2)
        flat = verdict.weights.clamp(max=settings.c1) * to_proximal
        grid = torch.zeros_like(inputs.mask)
        weights, accepted = (grid.masked_scatter(where, x.to(grid.dtype)) for x in (flat, verdict.accepted))
        metrics = _metrics(target, sampled, told, verdict, settings)
        return TokenWeights(weights=weights, mask=accepted, metrics=metrics)

    def observe(self, metrics: Mapping[str, Value]) -> None:
        """The calibration for the next batch; it stays when nothing was sampled or accepted."""
        if _KAPPA in metrics:
            self.kappa = metrics[_KAPPA].value() or self.kappa

    def state_dict(self) -> dict[str, Any]:
        return {"kappa": self.kappa}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kappa = state.get("kappa", 1.0)


def acceptance(target: torch.Tensor, rollout: torch.Tensor, lam: float) -> torch.Tensor:
    """a = min(1, p / (lam q)) of sampled tokens (Jackpot Eq. 3).

    target, rollout: [...] logprobs, nats; rollout finite, since the token was sampled. Returns [...].

    >>> acceptance(torch.tensor([0.1, 0.4]).log(), torch.tensor([0.2, 0.2]).log(), lam=1.0)
    tensor([0.5000, 1.0000])
    """
    return (target - rollout - math.log(lam)).clamp(max=0.0).exp()


def kept_logprobs(target: torch.Tensor, rollout: torch.Tensor, lam: float) -> torch.Tensor:
    """log q' of q' = min(q, p / lam) / Z over the whole vocabulary (Jackpot Eq. 4).

    target, rollout: [..., V] logprobs, with a token in common. Returns [..., V].

    >>> p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.8, 0.2]).log()
    >>> kept_logprobs(p, q, lam=1.0).exp()
    tensor([0.7143, 0.2857])
    """
    return torch.minimum(rollout, target - math.log(lam)).log_softmax(-1)


def normalizer_bounds(
    target: torch.Tensor, rollout: torch.Tensor, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Z from K candidate tokens: at least their sum, at most that and all the rests could share.

        lower = sum_K min(q, p / lam)                                  the paper's Z_approx
        upper = 1 - sum_K (q - p / lam)^+ - (q_rest - p_rest / lam)^+  = lower + min(q_rest, p_rest / lam)

    target, rollout: [..., K] logprobs at the same ids, -inf on both sides for padding. Returns two [...].
    Over the whole vocabulary both are Z; the second is then the more accurate (1 for p = q, lam = 1).

    >>> p, q = torch.tensor([0.5, 0.2]).log(), torch.tensor([0.6, 0.3]).log()
    >>> [round(z.item(), 6) for z in normalizer_bounds(p, q, lam=1.0)]
    [0.7, 0.8]
    """
    p, q = target.exp(), rollout.exp()
    lower = torch.minimum(q, p / lam).sum(-1)
    p_rest, q_rest = ((1 - x.sum(-1)).clamp(min=0.0) for x in (p, q))
    refused = (q - p / lam).clamp(min=0.0).sum(-1) + (q_rest - p_rest / lam).clamp(min=0.0)
    return lower, 1 - refused


def reweight(target: torch.Tensor, rollout: torch.Tensor, z: torch.Tensor, lam: float) -> torch.Tensor:
    """w = Z max(lam, p / q) of accepted tokens, which is p / q' (Jackpot Algorithm 1, line 23).

    target, rollout: [...] logprobs of the tokens; z: [...] of their positions. Returns [...].

    >>> reweight(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.8, 0.2]).log(), torch.tensor(0.7), lam=1.0)
    tensor([0.7000, 1.7500])
    """
    return z * _ratio(target, rollout).clamp(min=lam)


def kl(target: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(p || other) in nats, exactly; inf where `other` lacks a token of p.

    target, other: [..., V] logprobs, which unlike probabilities do not vanish in the tail. Returns [...].
    """
    p = target.exp()
    return torch.where(p > 0, p * (target - other), 0.0).sum(-1)


def token_uniforms(seed: int, trajectory_id: str, tokens: int) -> np.ndarray:
    """The draws that accept or reject a trajectory's tokens: [tokens] float32 in [0, 1).

    They depend on seed, trajectory and position alone, so a token's fate depends neither on the batch it
    is in nor on the rank that trains it, and a resumed run repeats it.

    >>> bool((token_uniforms(7, "g0/1", 3) == token_uniforms(7, "g0/1", 9)[:3]).all())
    True
    """
    key = hashlib.blake2b(f"obrs/{seed}/{trajectory_id}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "big"))).random(tokens, np.float32)


@dataclass(slots=True, kw_only=True)
class ObrsInputs:
    """What OBRS needs of a micro-batch beside the logprobs of its P sampled tokens. No gradients.

    uniforms: [P] float32 in [0, 1), the draws. rollout_top, target_top: [P, K] float32 logprobs that the
        rollout and the target policy give to the same candidates, -inf on both sides for padding: the
        rollout's top-k, or its whole vocabulary for the exact normaliser. P runs over the ones of the
        mask, row by row. kappa: calibration measured on the batch before, 1.0 on the first.
    """

    uniforms: torch.Tensor
    rollout_top: torch.Tensor
    target_top: torch.Tensor
    kappa: float = 1.0


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What the correction knows of each of P sampled tokens.

    accept_prob: a. accepted: the draw. estimate: Z before calibration. z: Z as used. weights: w before
    truncation, of rejected tokens too. exact: Z where the whole vocabulary was given, else None.
    """

    accept_prob: torch.Tensor
    accepted: torch.Tensor
    estimate: torch.Tensor
    z: torch.Tensor
    weights: torch.Tensor
    exact: torch.Tensor | None


def judge(target: torch.Tensor, rollout: torch.Tensor, inputs: ObrsInputs, config: ObrsConfig) -> Verdict:
    """Accept or reject the P sampled tokens and weigh them.

    target, rollout: [P] float32 logprobs of the sampled tokens. Raises ValueError for inputs of other sizes.
    """
    _check(target, inputs)
    accept_prob = acceptance(target, rollout, config.lam)
    exact, top = None, (inputs.target_top, inputs.rollout_top)
    if config.normalizer is ObrsNormalizer.EXACT:
        exact = normalizer_bounds(*top, config.lam)[1]
        top = _restricted(*top, config.top_k)
    lower, upper = normalizer_bounds(*top, config.lam)
    estimate = lower if config.normalizer is ObrsNormalizer.TOPK else upper
    if exact is not None:
        z = exact
    else:
        z = estimate if config.calibration is ObrsCalibration.NONE else inputs.kappa * estimate
    return Verdict(
        accept_prob=accept_prob,
        accepted=inputs.uniforms < accept_prob,
        estimate=estimate,
        z=z,
        weights=reweight(target, rollout, z, config.lam),
        exact=exact,
    )


def kl_estimates(target: torch.Tensor, rollout: torch.Tensor, verdict: Verdict) -> tuple[float, float]:
    """Sums over the P positions of KL(p || q) and KL(p || q'), in nats, estimated from the sampled tokens.

        before = r log r - r + 1      after = (a / Z) (w log w - w + 1) = r log w - r + a / Z      r = p / q

    Their means over x ~ q are the two divergences (E_q[r] = 1, a w = Z r), and neither is ever negative.
    """
    ratio = _ratio(target, rollout)
    before = ratio * ratio.log() - ratio + 1
    after = torch.special.xlogy(ratio, verdict.weights) - ratio + verdict.accept_prob / verdict.z
    return before.sum(dtype=torch.float64).item(), after.sum(dtype=torch.float64).item()


def kl_exact(inputs: ObrsInputs, lam: float) -> tuple[float, float]:
    """Sums over the P positions of KL(p || q) and KL(p || q'); the candidates are the whole vocabulary."""
    target, rollout = inputs.target_top, inputs.rollout_top
    kept = kept_logprobs(target, rollout, lam)
    before, after = (kl(target, other).sum(dtype=torch.float64).item() for other in (rollout, kept))
    return before, after


def _metrics(
    target: torch.Tensor, rollout: torch.Tensor, inputs: ObrsInputs, verdict: Verdict, settings: ObrsConfig
) -> dict[str, Value]:
    def total(x: torch.Tensor) -> float:
        return x.double().sum().item()

    tokens, accepted = len(target), total(verdict.accepted)
    exact = settings.normalizer is ObrsNormalizer.EXACT
    before, after = kl_exact(inputs, settings.lam) if exact else kl_estimates(target, rollout, verdict)
    estimate, expected = total(verdict.estimate), total(verdict.accept_prob)
    rate = accepted if settings.calibration is ObrsCalibration.ACCEPTED else expected
    truncated = total(verdict.accepted & (verdict.weights > settings.c1))
    return {
        "obrs_acceptance": Mean(accepted, tokens),
        "obrs_acceptance_prob": Mean(expected, tokens),
        "obrs_z": Mean(total(verdict.z), tokens),
        "obrs_z_ratio": Ratio(estimate, total(verdict.exact) if exact else expected),
        "obrs_kappa": Ratio(rate, estimate),
        "obrs_kl_before": Mean(before, tokens),
        "obrs_kl_after": Mean(after, tokens),
        "obrs_truncated": Mean(truncated, accepted),
    }


def _ratio(target: torch.Tensor, rollout: torch.Tensor) -> torch.Tensor:
    return (target - rollout).clamp(-_SAFETY, _SAFETY).exp()


def _restricted(target: torch.Tensor, rollout: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The candidates an engine would have sent: the rollout's most likely ones."""
    best, ids = rollout.topk(min(count, rollout.shape[-1]), -1)
    return target.gather(-1, ids), best


def _check(target: torch.Tensor, inputs: ObrsInputs) -> None:
    tokens, shapes = len(target), [tuple(x.shape) for x in (inputs.rollout_top, inputs.target_top)]
    if len(inputs.uniforms) != tokens or shapes[0] != shapes[1] or shapes[0][0] != tokens:
        raise ValueError(
            f"{tokens} sampled tokens need as many draws and two [{tokens}, K] tables of candidates, "
            f"got {len(inputs.uniforms)} draws and tables of {shapes[0]} and {shapes[1]}: ask the engine for "
            "top_logprobs and gather the target's logprobs at the same ids."
        )
