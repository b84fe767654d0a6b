"""Optimal budgeted rejection sampling (OBRS, Jackpot): accepts or rejects sampled tokens, and weighs them.

Owns the math, the uniforms, the calibration between batches, weights, mask and metrics. Let p be the target's
distribution, q the rollout's distribution, and q' the distribution of the accepted tokens:

    accept x with   a(x) = min(1, p(x) / (lam q(x)))                      Jackpot Eq. 3
    accepted        q'(x) = min(q(x), p(x) / lam) / Z                     Eq. 4
    rate            Z = sum_x min(q(x), p(x) / lam) = E_q[a]              Section 4.4.2
    weight          w(x) = Z max(lam, p(x) / q(x))                        Algorithm 1, line 23

For an accepted token w = p / q'. So E_q[a w f] = Z E_p[f]: the weighted mean over accepted tokens of one
position equals the target's mean, and a position counts in proportion to its Z. Each token is corrected
conditional on its prefix; the prefix itself is still the rollout's.

How this differs from the paper
1. Z. The paper sums over the union of both top-k. A rollout engine sends only the logprobs of the rollout's
   top-k, so q is unknown at the target's other likely tokens. The candidates here are the rollout's top-k,
   and `normalizer_bounds` adds the largest possible contribution of the other tokens. If p = q and lam = 1,
   this gives exactly Z = 1. The paper's sum is then below 1, and gives a different weight to every token.
2. Algorithm 1 uses p_new, the policy being updated, in w for any target. But w(p_new) equals p_new / q' only
   if p_new is the target, or if both p_new and p are at least lam q (then no token can be rejected). We use
   the target.
3. kappa can be computed from the acceptance probabilities; their mean is the acceptance rate without sampling
   noise. It is measured on one batch and applied in the next, so that the weights need no second pass over
   the batch and do not depend on how the batch was cut.

OBRS needs top-k logprobs with every sampled token (`SamplingParams.top_logprobs`), and the target's logprobs
at the same ids, gathered from the logits of the training forward pass. If the vocabulary is cut over ranks,
this takes one all-reduce of [P, K] numbers.
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

_SAFETY = 20.0  # bound of log ratios, the same as in verl
_KAPPA = "rollout_corr/obrs_kappa"


class Obrs(CorrectionRule):
    """Weighs accepted tokens with min(w, c1) min(p_proximal / p_target, c2) (Jackpot Eq. 5).

    kappa: calibration factor of the normalisers in the next batch, measured on the last batch.
    """

    counts_masked = False  # reported as obrs_acceptance
    rejects = reweights = True

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
        """Accept sampled tokens at random, and weigh the accepted ones (Jackpot Eq. 5)."""
        extras, settings = inputs.extras, self.config.obrs
        if extras.rollout_top is None or extras.target_top is None:
            raise ValueError(
                "algo.correction=obrs got no candidates: the batch carries no top-k logprobs of the rollout. "
                "Collect with SamplingParams.top_logprobs=algo.obrs.top_k."
            )

        sampled = inputs.mask.bool()
        proximal = inputs.trainer_logprobs[sampled]
        target = proximal if self.target_at_start else inputs.current_logprobs[sampled]
        tokens = ObrsInputs(
            target=target,
            rollout=inputs.rollout_logprobs[sampled],
            uniforms=extras.columns["uniforms"],
            rollout_top=extras.rollout_top,
            target_top=extras.target_top,
            kappa=self.kappa,
        )
        outcome = accept_and_weigh(tokens, settings)

        # PPO's ratio is relative to the proximal policy, so the second factor converts target to proximal.
        to_proximal = (proximal - target).exp().clamp(max=settings.c2)
        to_target = outcome.weights.clamp(max=settings.c1) if self.reweights else 1.0
        flat = to_target * to_proximal

        grid = torch.zeros_like(inputs.mask)
        kept = outcome.accepted if self.rejects else torch.ones_like(outcome.accepted)
        weights, accepted = (grid.masked_scatter(sampled, x.to(grid.dtype)) for x in (flat, kept))
        return TokenWeights(weights=weights, mask=accepted, metrics=_metrics(tokens, outcome, settings))

    def observe(self, metrics: Mapping[str, Value]) -> None:
        """Set kappa for the next batch; do not change it if no token was sampled or accepted."""
        if _KAPPA in metrics:
            self.kappa = metrics[_KAPPA].value() or self.kappa

    def state_dict(self) -> dict[str, Any]:
        return {"kappa": self.kappa}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.kappa = state.get("kappa", 1.0)


class ObrsMask(Obrs):
    """OBRS without its weights: the mean of f over accepted tokens is the mean under q', not under p.

        E_q[a f] = Z E_q'[f]

    An ablation (Jackpot Tables 6 and 7, masking only).
    """

    reweights = False


class ObrsWeight(Obrs):
    """Weighs all tokens as OBRS does, and rejects none: E_q[w f] with w = Z max(lam, p / q).

    An ablation. If p / q is below lam, w is Z lam: the token has this minimal weight instead of a rejection.
    """

    rejects = False


def acceptance(target: torch.Tensor, rollout: torch.Tensor, lam: float) -> torch.Tensor:
    """Compute a = min(1, p / (lam q)) of sampled tokens (Jackpot Eq. 3).

    target, rollout: [...] logprobs in nats; rollout is finite because the token was sampled. Returns [...].

    >>> acceptance(torch.tensor([0.1, 0.4]).log(), torch.tensor([0.2, 0.2]).log(), lam=1.0)
    tensor([0.5000, 1.0000])
    """
    return (target - rollout - math.log(lam)).clamp(max=0.0).exp()


def kept_logprobs(target: torch.Tensor, rollout: torch.Tensor, lam: float) -> torch.Tensor:
    """Compute log q' for q' = min(q, p / lam) / Z over the full vocabulary (Jackpot Eq. 4).

    target, rollout: [..., V] logprobs; at least one token is possible under both. Returns [..., V].

    >>> p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.8, 0.2]).log()
    >>> kept_logprobs(p, q, lam=1.0).exp()
    tensor([0.7143, 0.2857])
    """
    return torch.minimum(rollout, target - math.log(lam)).log_softmax(-1)


def normalizer_bounds(
    target: torch.Tensor, rollout: torch.Tensor, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a lower and an upper bound of Z, from K candidate tokens and the mass of all other tokens.

        lower = sum_K min(q, p / lam)                                  the paper's Z_approx
        upper = 1 - sum_K (q - p / lam)^+ - (q_tail - p_tail / lam)^+  = lower + min(q_tail, p_tail / lam)

    target, rollout: [..., K] logprobs at the same ids, -inf on both sides for padding. Returns the two
    bounds, [...] each. Over the full vocabulary both are Z, and `upper` is more accurate (1 for p = q,
    lam = 1).

    >>> p, q = torch.tensor([0.5, 0.2]).log(), torch.tensor([0.6, 0.3]).log()
    >>> [round(z.item(), 6) for z in normalizer_bounds(p, q, lam=1.0)]
    [0.7, 0.8]
    """
    p, q = target.exp(), rollout.exp()
    lower = torch.minimum(q, p / lam).sum(-1)
    p_tail, q_tail = ((1 - x.sum(-1)).clamp(min=0.0) for x in (p, q))
    rejected = (q - p / lam).clamp(min=0.0).sum(-1) + (q_tail - p_tail / lam).clamp(min=0.0)
    return lower, 1 - rejected


def reweight(target: torch.Tensor, rollout: torch.Tensor, *, z: torch.Tensor, lam: float) -> torch.Tensor:
    """Compute w = Z max(lam, p / q) of accepted tokens, which is p / q' (Jackpot Algorithm 1, line 23).

    target, rollout: [...] logprobs of the tokens. z: [...] Z of each token's position. Returns [...].

    >>> p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.8, 0.2]).log()
    >>> reweight(p, q, z=torch.tensor(0.7), lam=1.0)
    tensor([0.7000, 1.7500])
    """
    return z * _ratio(target, rollout).clamp(min=lam)


def kl(target: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compute the exact KL(p || other) in nats; inf if a token is possible under p but not under `other`.

    target, other: [..., V] logprobs; unlike probabilities they do not underflow in the tail. Returns [...].
    """
    p = target.exp()
    return torch.where(p > 0, p * (target - other), 0.0).sum(-1)


def token_uniforms(seed: int, trajectory_id: str, tokens: int) -> np.ndarray:
    """Generate the uniforms that accept or reject a trajectory's tokens: [tokens] float32 in [0, 1).

    They depend only on seed, trajectory and position, so a token's acceptance does not depend on its batch or
    rank, and a resumed run repeats it.

    >>> bool((token_uniforms(7, "g0/1", 3) == token_uniforms(7, "g0/1", 9)[:3]).all())
    True
    """
    key = hashlib.blake2b(f"obrs/{seed}/{trajectory_id}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "big"))).random(tokens, np.float32)


@dataclass(slots=True, kw_only=True)
class ObrsInputs:
    """The P sampled tokens of a micro-batch and their candidates, without gradients.

    target, rollout: [P] float32 logprobs of the sampled tokens, in the order of the mask's ones, row by row.
    uniforms: [P] float32 in [0, 1).
    rollout_top, target_top: [P, K] float32 logprobs of the same candidates under the rollout and the target
        policy; both are -inf for padding. Candidates are the rollout's top-k, or the full vocabulary for the
        exact normaliser.
    kappa: calibration factor measured on the previous batch; 1.0 in the first batch.
    """

    target: torch.Tensor
    rollout: torch.Tensor
    uniforms: torch.Tensor
    rollout_top: torch.Tensor
    target_top: torch.Tensor
    kappa: float = 1.0


@dataclass(slots=True, kw_only=True)
class ObrsOutcome:
    """Acceptance and weight of each of P sampled tokens.

    accept_prob: a. accepted: bool. estimate: Z before calibration. z: Z after calibration. weights: w before
    truncation, also for rejected tokens. exact: Z from the full vocabulary, None with top-k candidates.
    """

    accept_prob: torch.Tensor
    accepted: torch.Tensor
    estimate: torch.Tensor
    z: torch.Tensor
    weights: torch.Tensor
    exact: torch.Tensor | None


def accept_and_weigh(inputs: ObrsInputs, config: ObrsConfig) -> ObrsOutcome:
    """Accept or reject the P sampled tokens and weigh them. Raises ValueError if sizes do not match."""
    _check_sizes(inputs)
    accept_prob = acceptance(inputs.target, inputs.rollout, config.lam)

    # With an exact normaliser the top-k estimate is computed too, so that metrics can compare the two.
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

    return ObrsOutcome(
        accept_prob=accept_prob,
        accepted=inputs.uniforms < accept_prob,
        estimate=estimate,
        z=z,
        weights=reweight(inputs.target, inputs.rollout, z=z, lam=config.lam),
        exact=exact,
    )


def kl_estimates(inputs: ObrsInputs, outcome: ObrsOutcome) -> tuple[float, float]:
    """Estimate the sums over the P positions of KL(p || q) and KL(p || q'), in nats, from sampled tokens.

        before = r log r - r + 1      after = (a / Z) (w log w - w + 1) = r log w - r + a / Z      r = p / q

    The means over x ~ q equal the two divergences (because E_q[r] = 1 and a w = Z r); no term is negative.
    """
    ratio = _ratio(inputs.target, inputs.rollout)
    before = ratio * ratio.log() - ratio + 1
    after = torch.special.xlogy(ratio, outcome.weights) - ratio + outcome.accept_prob / outcome.z
    return before.sum(dtype=torch.float64).item(), after.sum(dtype=torch.float64).item()


def kl_exact(inputs: ObrsInputs, lam: float) -> tuple[float, float]:
    """Sum KL(p || q) and KL(p || q') over the P positions; the candidates are the full vocabulary."""
    target, rollout = inputs.target_top, inputs.rollout_top
    accepted = kept_logprobs(target, rollout, lam)
    before, after = (kl(target, other).sum(dtype=torch.float64).item() for other in (rollout, accepted))
    return before, after


def _metrics(inputs: ObrsInputs, outcome: ObrsOutcome, settings: ObrsConfig) -> dict[str, float | Value]:
    """Return the metrics `rollout_corr/obrs_*` without their prefix."""

    def total(x: torch.Tensor) -> float:
        return x.double().sum().item()

    tokens, accepted = len(inputs.target), total(outcome.accepted)
    estimate, expected = total(outcome.estimate), total(outcome.accept_prob)

    if outcome.exact is None:
        before, after = kl_estimates(inputs, outcome)
        z_sum = expected
    else:
        before, after = kl_exact(inputs, settings.lam)
        z_sum = total(outcome.exact)

    # E_q[a] = Z, so either measure of the acceptance rate can calibrate the estimate of the next batch.
    rate = accepted if settings.calibration is ObrsCalibration.ACCEPTED else expected
    truncated = total(outcome.accepted & (outcome.weights > settings.c1))

    return {
        "obrs_acceptance": Mean(accepted, tokens),
        "obrs_acceptance_prob": Mean(expected, tokens),
        "obrs_z": Mean(total(outcome.z), tokens),
        "obrs_z_ratio": Ratio(estimate, z_sum),
        "obrs_kappa": Ratio(rate, estimate),
        "obrs_kl_before": Mean(before, tokens),
        "obrs_kl_after": Mean(after, tokens),
        "obrs_truncated": Mean(truncated, accepted),
    }


def _ratio(target: torch.Tensor, rollout: torch.Tensor) -> torch.Tensor:
    return (target - rollout).clamp(-_SAFETY, _SAFETY).exp()


def _restricted(target: torch.Tensor, rollout: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the candidates that an engine would have sent: the `count` most likely under the rollout."""
    best, ids = rollout.topk(min(count, rollout.shape[-1]), -1)
    return target.gather(-1, ids), best


def _check_sizes(inputs: ObrsInputs) -> None:
    tokens, shapes = len(inputs.target), [tuple(x.shape) for x in (inputs.rollout_top, inputs.target_top)]
    if len(inputs.uniforms) != tokens or shapes[0] != shapes[1] or shapes[0][0] != tokens:
        raise ValueError(
            f"{tokens} sampled tokens need as many uniforms and two [{tokens}, K] tables of candidates, "
            f"got {len(inputs.uniforms)} uniforms and tables of {shapes[0]} and {shapes[1]}: request "
            "top_logprobs from the engine and gather the target's logprobs at the same ids."
        )
