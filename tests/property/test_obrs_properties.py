"""OBRS for any pair of distributions: exact identities, contraction, monotonicity, brackets of Z."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.algo.obrs import acceptance, kept_logprobs, kl, normalizer_bounds, reweight

pytestmark = pytest.mark.property

EXACT = 1e-9
many = settings(max_examples=200, deadline=None)
lams = st.floats(0.05, 20.0)


@st.composite
def laws(draw, dead: bool = True):
    """Log-probabilities of target and rollout [V], some tokens impossible under either, one possible."""
    size = draw(st.integers(2, 12))
    sides = []
    for _ in range(2):
        logits = draw(st.lists(st.floats(-12, 12), min_size=size, max_size=size))
        lost = draw(st.lists(st.booleans(), min_size=size, max_size=size)) if dead else [False] * size
        values = [
            -math.inf if i and gone else x for i, (x, gone) in enumerate(zip(logits, lost, strict=True))
        ]
        sides.append(torch.tensor(values, dtype=torch.float64).log_softmax(-1))
    return tuple(sides)


@given(laws(), lams)
@many
def test_acceptance_rate_kept_distribution_and_weights_are_one_identity(pair, lam):
    target, rollout = pair
    p, q = target.exp(), rollout.exp()
    sampled = q > 0
    accept = torch.where(sampled, acceptance(target, rollout.clamp(min=-700), lam), 0.0)
    z = (q * accept).sum()
    assert z.item() == pytest.approx(torch.minimum(q, p / lam).sum().item(), rel=EXACT)
    assert 0 < z <= 1 + EXACT and z <= (1 + EXACT) / lam
    kept = kept_logprobs(target, rollout, lam).exp()
    torch.testing.assert_close(kept, q * accept / z, rtol=EXACT, atol=EXACT)
    close = sampled & ((target - rollout).abs() < 20)  # beyond, the ratio is bounded for safety
    weights = reweight(target, rollout, z=z, lam=lam)
    torch.testing.assert_close((kept * weights)[close], p[close], rtol=EXACT, atol=EXACT)


@given(laws(dead=False), lams, lams)
@many
def test_a_larger_lambda_accepts_less_and_comes_no_farther_from_the_target(pair, one, other):
    target, rollout = pair
    low, high = sorted((one, other))
    rates = [normalizer_bounds(target, rollout, lam)[1] for lam in (low, high)]
    assert rates[1] <= rates[0] + EXACT
    divergences = [kl(target, kept_logprobs(target, rollout, lam)) for lam in (low, high)]
    assert divergences[1] <= divergences[0] + EXACT
    assert -EXACT <= divergences[0] <= kl(target, rollout) + EXACT


@given(laws(), lams, st.integers(1, 12))
@many
def test_candidates_bracket_the_normaliser(pair, lam, count):
    target, rollout = pair
    exact = torch.minimum(rollout.exp(), target.exp() / lam).sum()
    top, ids = rollout.topk(min(count, len(rollout)))
    lower, upper = normalizer_bounds(target[ids], top, lam)
    assert lower <= exact + EXACT and exact <= upper + EXACT


@given(laws())
@many
def test_equal_policies_keep_everything_with_weight_one_exactly(pair):
    policy = pair[0].float()
    possible = policy[policy > -math.inf]
    for count in range(1, len(possible) + 1):
        top = possible.topk(count).values
        z = normalizer_bounds(top, top, 1.0)[1]
        assert z == 1
        assert (reweight(possible, possible, z=z, lam=1.0) == 1).all()
    assert (acceptance(possible, possible, 1.0) == 1).all()
