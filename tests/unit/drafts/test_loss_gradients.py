"""Losses and their gradients against float64 autograd of their definitions."""

from __future__ import annotations

import pytest
import torch

from rlpipe.config.draft_objectives import FROM_LOGITS, AnchorWeighting
from rlpipe.drafts.loss import mtp_loss
from rlpipe.drafts.visit import visit_probabilities
from tests.helpers.mtp_reference import random_case, reference_loss

pytestmark = pytest.mark.unit
KINDS = FROM_LOGITS
SAMPLED_CHAINS = ("e2e_chain", "e2e_block", "verify_steps")


def _gradient(loss, case):
    case.draft.grad = None
    loss.backward()
    return case.draft.grad.clone()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_equal_autograd_of_the_definition(kind, temperature):
    case = random_case(23)
    loss, _ = mtp_loss(
        kind, case.draft, case.target, mask=case.mask, temperature=temperature, **case.kwargs()
    )
    expected = reference_loss(kind, case, temperature=temperature)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    found = _gradient(loss, case)
    torch.testing.assert_close(found, _gradient(expected, case), atol=1e-12, rtol=1e-9)
    assert (found[~case.mask] == 0).all()
    assert found[case.mask].abs().max() > 1e-4


@pytest.mark.parametrize("vocab", [1, 7, 127, 257, 4097])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_accurate_for_every_vocabulary_size(kind, vocab):
    case = random_case(vocab, batch=1, length=4, depths=2)
    single = case.to(torch.float32)
    loss, _ = mtp_loss(kind, single.draft, single.target, mask=single.mask, **single.kwargs())
    expected = reference_loss(kind, case)
    assert loss.item() == pytest.approx(expected.item(), abs=2e-6, rel=1e-5)
    torch.testing.assert_close(
        _gradient(loss, single).double(), _gradient(expected, case), atol=1e-6, rtol=1e-4
    )


def test_a_real_vocabulary_in_bfloat16():
    case = random_case(151_936, batch=1, length=4, depths=1).to(torch.bfloat16)
    loss, _ = mtp_loss("e2e_tv", case.draft, case.target, mask=case.mask)
    expected = reference_loss("e2e_tv", case)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    found = _gradient(loss, case)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), _gradient(expected, case).double(), atol=1e-9, rtol=2e-2)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in SAMPLED_CHAINS])
def test_given_anchor_weights_weigh_anchors(kind):
    case = random_case(11)
    weights = torch.rand(len(case.mask), generator=torch.Generator().manual_seed(1))
    loss, _ = mtp_loss(kind, case.draft, case.target, mask=case.mask, anchors=weights, tokens=case.tokens)
    expected = reference_loss(kind, case, weights=weights)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(_gradient(loss, case), _gradient(expected, case), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kind", ["kl", "e2e_tv"])
def test_visit_weighting_is_the_weighting_by_visits(kind):
    case = random_case(11)
    log_p, log_q = (
        x.detach().log_softmax(-1).gather(-1, case.tokens[..., None])[..., 0]
        for x in (case.target, case.draft)
    )
    accept = (log_q - log_p).clamp(max=0).exp().view(*case.turn_starts.shape, -1)
    visits = visit_probabilities(accept, case.mask.view_as(accept), case.turn_starts).flatten()
    assert visits[case.mask[:, 0]].min() < 0.5 < visits.max() == 1
    call = {"tokens": case.tokens, "turn_starts": case.turn_starts}
    found, _ = mtp_loss(kind, case.draft, case.target, mask=case.mask, anchors=AnchorWeighting.VISIT, **call)
    expected = reference_loss(kind, case, weights=visits)
    assert found.item() == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(_gradient(found, case), _gradient(expected, case), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_rows_sum_to_zero_and_a_shift_of_logits_changes_nothing(kind):
    case = random_case(31)
    loss, stats = mtp_loss(kind, case.draft, case.target, mask=case.mask, **case.kwargs())
    assert _gradient(loss, case).sum(-1).abs().max() < 1e-14
    shift = torch.linspace(-40, 40, len(case.mask), dtype=torch.float64)[:, None, None]
    moved, moved_stats = mtp_loss(
        kind, case.draft + shift, case.target - 2 * shift, mask=case.mask, **case.kwargs()
    )
    assert moved.item() == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(moved_stats.kl, stats.kl)


@pytest.mark.parametrize("kind", ["tv", "e2e_tv", "kl", "reverse_kl", "lk"])
def test_equal_distributions_have_no_loss_and_no_gradient(kind):
    case = random_case(257, noise=0.0)
    loss, stats = mtp_loss(kind, case.draft, case.target, mask=case.mask)
    assert abs(loss.item()) < 1e-14
    assert _gradient(loss, case).abs().max() < 1e-15
    torch.testing.assert_close(stats.top1, stats.count)
    assert (stats.target_above == 0).all()


def test_disjoint_distributions_have_a_loss_of_one():
    low, high = torch.full((3, 2, 8), float("-inf")), torch.full((3, 2, 8), float("-inf"))
    low[..., :4], high[..., 4:] = 0.0, 1.0
    mask = torch.ones(3, 2, dtype=torch.bool)
    for kind in ("tv", "e2e_tv"):
        low.requires_grad_(True).grad = None
        loss, stats = mtp_loss(kind, low, high, mask=mask)
        loss.backward()
        assert loss.item() == 1.0
        assert low.grad.isfinite().all()
        assert stats.kl.isfinite().all()
        assert (stats.top1 == 0).all()


def test_padding_with_minus_infinity_is_as_if_it_were_not_there():
    case = random_case(13)
    pad = torch.full((*case.mask.shape, 3), float("-inf"), dtype=torch.float64)
    for kind in KINDS:
        padded = torch.cat([case.draft.detach(), pad], -1).requires_grad_()
        loss, stats = mtp_loss(
            kind, padded, torch.cat([case.target, pad], -1), mask=case.mask, **case.kwargs()
        )
        loss.backward()
        plain, plain_stats = mtp_loss(kind, case.draft, case.target, mask=case.mask, **case.kwargs())
        assert loss.item() == pytest.approx(plain.item(), abs=1e-13)
        torch.testing.assert_close(padded.grad[..., :13], _gradient(plain, case))
        assert (padded.grad[..., 13:] == 0).all()
        torch.testing.assert_close(stats.draft_entropy, plain_stats.draft_entropy)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_rows_may_hold_anything(kind):
    case = random_case(13)
    clean, clean_stats = mtp_loss(kind, case.draft, case.target, mask=case.mask, **case.kwargs())
    expected = _gradient(clean, case)
    with torch.no_grad():
        case.draft[~case.mask] = float("nan")
        case.target[~case.mask] = float("inf")
    loss, stats = mtp_loss(kind, case.draft, case.target, mask=case.mask, **case.kwargs())
    assert loss.item() == clean.item()
    torch.testing.assert_close(_gradient(loss, case), expected)
    torch.testing.assert_close(stats.reverse_kl, clean_stats.reverse_kl)


@pytest.mark.parametrize("kind", KINDS)
def test_all_masked_is_a_loss_and_gradient_of_zero(kind):
    case = random_case(13)
    mask, starts = torch.zeros_like(case.mask), torch.zeros_like(case.turn_starts)
    loss, stats = mtp_loss(kind, case.draft, case.target, mask=mask, tokens=case.tokens, turn_starts=starts)
    assert loss.item() == 0.0
    assert (_gradient(loss, case) == 0).all()
    assert (stats.count == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_masked_depth_in_mid_chain_ends_the_chain_but_not_the_depths_behind_it(kind):
    case = random_case(13)
    case.mask[1::2, 1] = False
    assert case.mask[1::2, 2].any()
    loss, _ = mtp_loss(kind, case.draft, case.target, mask=case.mask, **case.kwargs())
    expected = reference_loss(kind, case)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(_gradient(loss, case), _gradient(expected, case), atol=1e-12, rtol=1e-9)


def test_the_gradient_of_tv_is_bounded_by_the_drafts_probability_token_by_token():
    """Bebop Proposition 3: |dL/dz_j| = q_j |1[q <= p] - S| <= q_j, at any distance of the two."""
    case = random_case(31, noise=5.0)
    loss, _ = mtp_loss("tv", case.draft, case.target, mask=case.mask, normalizer=1.0)
    found, q = _gradient(loss, case).abs(), case.draft.detach().softmax(-1)
    assert (found <= q + 1e-15)[case.mask].all() and (found > 0.9 * q)[case.mask].any()


def test_one_depth_of_end_to_end_is_plain_tv():
    case = random_case(29, depths=1)
    plain, _ = mtp_loss("tv", case.draft, case.target, mask=case.mask)
    expected = _gradient(plain, case)
    for kind in ("e2e_tv", "e2e_chain"):
        loss, _ = mtp_loss(kind, case.draft, case.target, mask=case.mask, tokens=case.tokens)
        assert loss.item() == pytest.approx(plain.item(), abs=1e-14)
        torch.testing.assert_close(_gradient(loss, case), expected)


def test_an_overlap_of_zero_in_mid_chain_stops_the_chain_behind_it_only():
    draft = torch.zeros(1, 3, 4, dtype=torch.float64)
    target = torch.zeros(1, 3, 4, dtype=torch.float64)
    draft[0, :, 0] = 1.0
    draft[0, 1] = torch.tensor([0.0, 0.0, float("-inf"), float("-inf")])
    target[0, 1] = torch.tensor([float("-inf"), float("-inf"), 0.0, 0.0])
    draft.requires_grad_()
    loss, stats = mtp_loss("e2e_tv", draft, target, mask=torch.ones(1, 3, dtype=torch.bool))
    loss.backward()
    assert stats.alpha[1] == 0
    assert loss.item() == pytest.approx(1 - stats.alpha[0].item() / 3)
    assert draft.grad.isfinite().all()
    assert draft.grad[0, 0].abs().max() > 0
    assert (draft.grad[0, 2] == 0).all()


def test_at_ties_the_gradient_is_a_subgradient_and_ties_belong_to_the_covered_side():
    p = torch.tensor([[[0.5, 0.25, 0.125, 0.125]]], dtype=torch.float64)
    q = torch.tensor([[[0.25, 0.5, 0.125, 0.125]]], dtype=torch.float64)
    draft = q.log().requires_grad_()
    mask = torch.ones(1, 1, dtype=torch.bool)

    def value(z):
        return mtp_loss("tv", z, p.log(), mask=mask)[0]

    loss = value(draft)
    loss.backward()
    covered = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(draft.grad, q * ((q * covered).sum() - covered))
    generator, step = torch.Generator().manual_seed(0), 1e-6
    slack = []
    for _ in range(200):
        direction = torch.randn(1, 1, 4, generator=generator, dtype=torch.float64)
        one_sided = (value(draft.detach() + step * direction) - loss.detach()) / step
        slack.append((one_sided - (draft.grad * direction).sum()).item())
    assert min(slack) > -1e-5  # g . d <= f'(z; d) for all d: g is a subgradient
    assert max(slack) > 1e-2  # and z is a kink: no gradient would do for all d


def test_temperature_is_applied_to_both_and_scales_the_gradient():
    case = random_case(17)
    hot, _ = mtp_loss("lk", case.draft, case.target, mask=case.mask, temperature=2.0)
    hot_grad = _gradient(hot, case)
    halved, _ = mtp_loss("lk", case.draft / 2, case.target / 2, mask=case.mask)
    assert hot.item() == pytest.approx(halved.item(), abs=1e-14)
    torch.testing.assert_close(hot_grad, _gradient(halved, case))
