"""OBRS against exact enumeration of small vocabularies, with the errata of the paper checked numerically."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from rlpipe.algo.obrs import (
    ObrsInputs,
    accept_and_weigh,
    acceptance,
    kept_logprobs,
    kl,
    kl_estimates,
    kl_exact,
    normalizer_bounds,
    reweight,
    token_uniforms,
)
from rlpipe.config.algo import ObrsCalibration, ObrsConfig, ObrsNormalizer

pytestmark = pytest.mark.unit

LAMS = [0.5, 1.0, 1.5]
V = 9


def pair(seed: int, rows: int = 1, vocab: int = V, gap: float = 1.0):
    """Target and rollout distributions [rows, vocab] float64; the second is the first with noisy logits."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    noise = gap * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), (logits + noise).softmax(-1)


def every_token(p, q, uniforms=None, **settings):
    """One row's judgement of each token of the vocabulary, all candidates known."""
    tokens = p.shape[-1]
    table = p.log().expand(tokens, -1), q.log().expand(tokens, -1)
    draws = torch.zeros(tokens, dtype=p.dtype) if uniforms is None else uniforms
    inputs = ObrsInputs(
        target=p.log(), rollout=q.log(), uniforms=draws, target_top=table[0], rollout_top=table[1]
    )
    config = ObrsConfig(normalizer=ObrsNormalizer.EXACT, **settings)
    return accept_and_weigh(inputs, config), inputs


@pytest.mark.parametrize("lam", LAMS)
def test_acceptance_rate_and_kept_logprobs_equal_their_enumeration(lam):
    """Drawing over a lattice of uniforms enumerates the coin; q enumerates the token."""
    p, q = (x[0] for x in pair(1))
    lattice = torch.arange(2000, dtype=torch.float64) / 2000
    accepted = torch.stack([every_token(p, q, u.expand(V), lam=lam)[0].accepted for u in lattice[::10]])
    rates = torch.tensor([(lattice < a).double().mean() for a in acceptance(p.log(), q.log(), lam)])
    mass = torch.tensor([min(q[x], p[x] / lam) for x in range(V)])
    torch.testing.assert_close(q * rates, mass, atol=1e-3, rtol=0)
    assert (accepted.double().mean(0) - rates).abs().max() < 0.01
    torch.testing.assert_close(kept_logprobs(p.log(), q.log(), lam).exp(), mass / mass.sum())
    assert every_token(p, q, lam=lam)[0].z[0] == pytest.approx(mass.sum().item(), rel=1e-12)


@pytest.mark.parametrize("lam", LAMS)
@pytest.mark.parametrize("seed", range(5))
def test_weighted_kept_tokens_have_the_mean_of_the_target(lam, seed):
    """E_q[a w f] = Z E_p[f] for every f, so for every indicator of a token."""
    p, q = (x[0] for x in pair(seed))
    verdict, _ = every_token(p, q, lam=lam)
    torch.testing.assert_close(q * verdict.accept_prob * verdict.weights, verdict.z * p)


@pytest.mark.parametrize("lam", LAMS)
def test_the_weight_is_the_ratio_of_target_to_kept_logprobs(lam):
    p, q = pair(3, rows=20)
    z = torch.minimum(q, p / lam).sum(-1, keepdim=True)
    torch.testing.assert_close(
        reweight(p.log(), q.log(), z=z, lam=lam), p / kept_logprobs(p.log(), q.log(), lam).exp()
    )


@pytest.mark.parametrize("lam", LAMS)
def test_a_weight_from_another_policy_is_its_ratio_only_where_neither_can_be_rejected(lam):
    """Algorithm 1 writes p_new whatever the target was; for p_new != p_target that is not p_new / q'."""
    target, rollout = pair(4, rows=50)
    new, _ = pair(5, rows=50)
    new = (0.5 * target.log() + 0.5 * new.log()).softmax(-1)
    z = torch.minimum(rollout, target / lam).sum(-1, keepdim=True)
    printed = reweight(new.log(), rollout.log(), z=z, lam=lam)
    true = new / kept_logprobs(target.log(), rollout.log(), lam).exp()
    equal = torch.isclose(printed, true, rtol=1e-9)
    unrejectable = (target >= lam * rollout) & (new >= lam * rollout)
    assert unrejectable.any() and not unrejectable.all()
    assert torch.equal(equal, unrejectable)


@pytest.mark.parametrize("lam", LAMS)
@pytest.mark.parametrize("gap", [0.3, 1.0, 3.0])
def test_kl_to_the_target_contracts(lam, gap):
    p, q = pair(6, rows=200, gap=gap)
    before = kl(p.log(), q.log())
    after = kl(p.log(), kept_logprobs(p.log(), q.log(), lam))
    assert (after <= before + 1e-12).all()
    inside = ((p / q).amin(-1) < lam) & ((p / q).amax(-1) > lam)
    assert inside.any() and (after < before)[inside].all()


def test_kl_is_infinite_where_the_kept_logprobs_misses_the_target():
    p, q = torch.tensor([0.5, 0.5, 0.0]).log(), torch.tensor([0.5, 0.0, 0.5]).log()
    assert kl(p, kept_logprobs(p, q, 1.0)) == math.inf
    assert kl(q, q) == 0


def test_the_derivative_of_proposition_9_2_is_the_corrected_one_and_never_positive():
    """G' = P_t(B) / C (1 - 1 / (C Z)), B = {p <= C q}; the printed -P_t(B) / (C^2 Z) drops a term."""
    p, q = (x[0] for x in pair(7))
    ratios = (p / q).sort().values
    wrong = 0
    for low, high in pairwise(ratios):
        c = ((low + high) / 2).item()
        step = 1e-6 * c
        above, below = (kl(p.log(), kept_logprobs(p.log(), q.log(), x)) for x in (c + step, c - step))
        slope = (above - below) / (2 * step)
        z, mass = torch.minimum(q, p / c).sum(), p[p <= c * q].sum()
        corrected, printed = mass / c * (1 - 1 / (c * z)), -mass / (c**2 * z)
        assert slope.item() == pytest.approx(corrected.item(), rel=1e-4, abs=1e-8)
        assert corrected <= 1e-12
        wrong += abs(printed - slope) > 0.01 * abs(slope)
    assert wrong == V - 1


def test_kl_is_constant_below_the_least_ratio_and_zero_above_the_largest():
    """Where the printed proposition promises strict decrease: above the largest ratio there is none left."""
    p, q = (x[0] for x in pair(8))
    least, largest = (p / q).min(), (p / q).max()
    torch.testing.assert_close(kept_logprobs(p.log(), q.log(), 0.9 * least.item()).exp(), q)
    torch.testing.assert_close(kept_logprobs(p.log(), q.log(), 1.1 * largest.item()).exp(), p)


def test_no_other_rule_of_the_same_budget_comes_closer_to_the_target():
    """Theorem 9.1: rules near and far, each shifted until it accepts as much as OBRS."""
    p, q = (x[0] for x in pair(9))
    generator = torch.Generator().manual_seed(0)
    ours, rate = acceptance(p.log(), q.log(), 1.0), torch.minimum(q, p).sum()
    best = kl(p.log(), kept_logprobs(p.log(), q.log(), 1.0))
    for size in (0.01, 0.1, 1.0):
        for _ in range(50):
            noise = size * torch.randn(V, generator=generator, dtype=p.dtype)
            low, high = -1.0 - noise.max(), 1.0 - noise.min()
            for _ in range(60):
                shift = (low + high) / 2
                rule = (ours + noise + shift).clamp(0, 1)
                low, high = (shift, high) if (q * rule).sum() < rate else (low, shift)
            other = kl(p.log(), (q * rule / rate).log())
            assert other > best and (q * rule).sum().item() == pytest.approx(rate.item(), rel=1e-9)


@pytest.mark.parametrize("normalizer", [ObrsNormalizer.TOPK_TAIL, ObrsNormalizer.EXACT])
@pytest.mark.parametrize("candidates", [4, 50])
def test_equal_policies_and_lambda_one_give_weight_one_and_accept_all_exactly(normalizer, candidates):
    """In float32, bit for bit, whatever the share of the probability that the candidates hold."""
    logits = torch.randn(300, 50, generator=torch.Generator().manual_seed(0))
    p = logits.log_softmax(-1)
    sampled = p[:, 7]
    top = p.topk(candidates, -1).values
    draws = torch.from_numpy(token_uniforms(0, "t", 300))
    draws[0] = 1 - 2**-24  # the largest there is
    inputs = ObrsInputs(target=sampled, rollout=sampled, uniforms=draws, rollout_top=top, target_top=top)
    verdict = accept_and_weigh(inputs, ObrsConfig(normalizer=normalizer, top_k=4))
    assert verdict.accepted.all() and (verdict.accept_prob == 1).all()
    assert (verdict.weights == 1).all() and (verdict.estimate == 1).all()
    assert kl_estimates(inputs, verdict) == (0.0, 0.0)


def test_the_sum_of_the_paper_weighs_equal_policies_unequally():
    p = torch.randn(100, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    top = p.topk(5, -1).values
    uniforms = torch.zeros(100)
    inputs = ObrsInputs(target=p[:, 0], rollout=p[:, 0], uniforms=uniforms, rollout_top=top, target_top=top)
    verdict = accept_and_weigh(inputs, ObrsConfig(normalizer=ObrsNormalizer.TOPK))
    torch.testing.assert_close(verdict.weights, top.exp().sum(-1))
    assert verdict.weights.max() < 1 and verdict.weights.std() > 0.01


def test_above_one_lambda_rejects_even_equal_policies_and_keeps_weight_one():
    verdict, _ = every_token(*(x[0] for x in (pair(1)[0], pair(1)[0])), lam=1.5)
    torch.testing.assert_close(verdict.accept_prob, torch.full((V,), 1 / 1.5, dtype=torch.float64))
    torch.testing.assert_close(verdict.weights, torch.ones(V, dtype=torch.float64))


@pytest.mark.parametrize("lam", LAMS)
@pytest.mark.parametrize("candidates", [1, 3, 8])
def test_candidates_bracket_the_normaliser_and_meet_on_the_whole_vocabulary(lam, candidates):
    p, q = pair(10, rows=200)
    exact = torch.minimum(q, p / lam).sum(-1)
    ids = q.topk(candidates, -1).indices
    lower, upper = normalizer_bounds(p.gather(-1, ids).log(), q.gather(-1, ids).log(), lam)
    assert (lower <= exact + 1e-12).all() and (exact <= upper + 1e-12).all() and (lower < upper).any()
    for whole in normalizer_bounds(p.log(), q.log(), lam):
        torch.testing.assert_close(whole, exact)


def test_padding_candidates_count_nothing():
    p, q = (x.log() for x in pair(11, rows=4))
    padded = [torch.cat([x, torch.full((4, 3), -math.inf, dtype=x.dtype)], -1) for x in (p, q)]
    for plain, other in zip(normalizer_bounds(p, q, 1.0), normalizer_bounds(*padded, 1.0), strict=True):
        torch.testing.assert_close(plain, other)


@pytest.mark.parametrize("lam", LAMS)
def test_divergence_estimates_average_to_the_divergences(lam):
    """The expectation over x ~ q, enumerated, is KL(p || q) and KL(p || q'), and no term is negative."""
    p, q = (x[0] for x in pair(12))
    verdict, inputs = every_token(p, q, lam=lam)
    sums = [0.0, 0.0]
    for x in range(V):
        row = slice(x, x + 1)
        one, _ = every_token(p, q, lam=lam)
        for name in ("accept_prob", "weights", "z"):
            setattr(one, name, getattr(one, name)[row])
        terms = kl_estimates(replace(inputs, target=p.log()[row], rollout=q.log()[row]), one)
        assert min(terms) >= -1e-12
        sums = [s + q[x].item() * t for s, t in zip(sums, terms, strict=True)]
    exact = kl(p.log(), q.log()).item(), kl(p.log(), kept_logprobs(p.log(), q.log(), lam)).item()
    assert sums == pytest.approx(exact, rel=1e-9)
    assert [s / V for s in kl_exact(inputs, lam)] == pytest.approx(exact, rel=1e-9)
    assert len(verdict.z) == V


def test_calibration_scales_the_estimate_unless_it_is_switched_off_or_the_normaliser_is_exact():
    p, q = (x.log() for x in pair(13, rows=6))
    inputs = ObrsInputs(
        target=p[:, 0], rollout=q[:, 0], uniforms=torch.zeros(6), rollout_top=q, target_top=p, kappa=1.25
    )
    for normalizer in ObrsNormalizer:
        for calibration in ObrsCalibration:
            config = ObrsConfig(normalizer=normalizer, calibration=calibration, top_k=2)
            verdict = accept_and_weigh(inputs, config)
            if normalizer is ObrsNormalizer.EXACT:
                torch.testing.assert_close(verdict.z, torch.minimum(p.exp(), q.exp()).sum(-1))
                assert verdict.exact is verdict.z and not torch.allclose(verdict.estimate, verdict.z)
            else:
                factor = 1.0 if calibration is ObrsCalibration.NONE else 1.25
                torch.testing.assert_close(verdict.z, factor * verdict.estimate)
                assert verdict.exact is None


def test_draws_depend_on_seed_and_trajectory_alone_and_never_reach_one():
    draws = token_uniforms(3, "g1/0", 100_000)
    assert np.array_equal(draws[:10], token_uniforms(3, "g1/0", 10))
    assert not np.array_equal(draws[:10], token_uniforms(4, "g1/0", 10))
    assert not np.array_equal(draws[:10], token_uniforms(3, "g1/1", 10))
    assert draws.dtype == np.float32 and draws.min() >= 0 and draws.max() < 1
    assert abs(draws.mean() - 0.5) < 4 / math.sqrt(12 * 100_000)


def test_inputs_of_other_sizes_are_refused():
    top = torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"4 sampled tokens need as many uniforms.*got 3 uniforms"):
        inputs = ObrsInputs(
            target=torch.zeros(4),
            rollout=torch.zeros(4),
            uniforms=torch.zeros(3),
            rollout_top=top,
            target_top=top,
        )
        accept_and_weigh(inputs, ObrsConfig())
