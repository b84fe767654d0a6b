"""Per-depth statistics, alignment, top-K bounds, retained memory and refused arguments."""

from __future__ import annotations

import pytest
import torch

from rlpipe.config.draft_objectives import FROM_LOGITS
from rlpipe.drafts.loss import depth_targets, mtp_loss
from rlpipe.drafts.loss.stats import BY_DEPTH
from tests.helpers.mtp_reference import random_case, reference_loss

pytestmark = pytest.mark.unit


def _naive(case):
    log_q, log_p = case.draft.detach().log_softmax(-1), case.target.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    return {
        "alpha": torch.minimum(p, q).sum(-1),
        "draft_entropy": torch.special.entr(q).sum(-1),
        "target_entropy": torch.special.entr(p).sum(-1),
        "kl": (p * (log_p - log_q)).sum(-1),
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "target_above": (p * (p > q)).sum(-1),
        "draft_above": (q * (q > p)).sum(-1),
        "top1": (q.argmax(-1) == p.argmax(-1)).double(),
    }


def test_statistics_are_sums_over_unmasked_rows_of_each_depth():
    case = random_case(19)
    _, stats = mtp_loss("tv", case.draft, case.target, mask=case.mask)
    for name, values in _naive(case).items():
        torch.testing.assert_close(getattr(stats, name), (values * case.mask).sum(0))
    torch.testing.assert_close(stats.count, case.mask.sum(0).double())
    assert len(set(stats.count.tolist())) > 1


def test_statistics_of_two_parts_add_up_to_those_of_the_whole_and_recombine_the_loss():
    case = random_case(19)
    half = len(case.mask) // 2
    whole_loss, whole = mtp_loss("e2e_tv", case.draft, case.target, mask=case.mask)
    parts = [
        mtp_loss("e2e_tv", case.draft[part], case.target[part], mask=case.mask[part], normalizer=whole.weight)
        for part in (slice(0, half), slice(half, None))
    ]
    added = parts[0][1] + parts[1][1]
    for name in (*BY_DEPTH, "count", "loss", "weight"):
        torch.testing.assert_close(getattr(added, name), getattr(whole, name))
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole_loss)


def test_metrics_carry_totals_and_counts_by_depth():
    case = random_case(19)
    _, stats = mtp_loss("kl", case.draft, case.target, mask=case.mask, **case.kwargs())
    metrics = stats.metrics()
    assert metrics["mtp/alpha/depth_2"].count == case.mask[:, 1].sum()
    assert metrics["mtp/alpha/depth_2"].total == pytest.approx(stats.alpha[1].item())
    expected = reference_loss("verify_steps", case)
    assert metrics["mtp/predicted_acceptance_length"].value() == pytest.approx(1 / expected.item())


def test_alignment_matches_a_loop_over_anchors_and_depths():
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 50, (3, 12), generator=generator)
    sampled = torch.rand(3, 12, generator=generator) < 0.75
    depths, found = 3, depth_targets(tokens, sampled, 3)
    for b in range(3):
        for t in range(12):
            chain = True
            for k in range(1, depths + 1):
                at = t + k + 1
                chain &= at < 12 and bool(sampled[b, at] and sampled[b, at - 1])
                row = b * 12 + t
                assert found.mask[row, k - 1].item() == chain
                assert found.tokens[row, k - 1].item() == (tokens[b, at].item() if chain else 0)
            previous = t > 0 and bool(found.mask[b * 12 + t - 1, 0])
            assert found.turn_starts[b, t].item() == (bool(found.mask[b * 12 + t, 0]) and not previous)


@pytest.mark.parametrize("kind", [kind for kind in FROM_LOGITS if kind != "tv_top"])
def test_only_objectives_with_a_kl_retain_the_target(kind):
    case = random_case(1001, noise=0.1).to(torch.float32)
    target = case.target.clone()
    retained = {}

    def keep(tensor):
        retained[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = mtp_loss(kind, case.draft, target, mask=case.mask, **case.kwargs())
    logits = case.draft.untyped_storage().nbytes()
    extra = sum(retained.values()) - logits
    assert case.draft.data_ptr() in retained
    if kind in ("kl", "reverse_kl", "lk"):
        assert logits <= extra < 1.1 * logits
    else:
        assert extra < 0.07 * logits  # a bit per token is 1/32 of float32 logits, 1/16 of bfloat16
    loss.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "soft"}, "soft"),
        ({"tokens": None}, "pass tokens"),
        ({"turn_starts": None}, "turn_starts=None"),
        ({"turn_starts": torch.ones(1, 3, dtype=torch.bool)}, "one entry per anchor"),
        ({"temperature": 0.0}, "temperature must be > 0"),
        ({"mask": torch.ones(14, 3)}, "mask must be bool"),
        ({"tokens": torch.zeros(14, 2, dtype=torch.long)}, "one per row"),
        ({"target_logits": torch.zeros(14, 3, 5)}, r"both be \[N, K, V\]"),
        (
            {"kind": "ppow"},
            "learns from windows .* use one of hard_ce, .* draft.objective=ppow",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    case = random_case(19)
    call = {
        "kind": "verify_steps",
        "draft_logits": case.draft,
        "target_logits": case.target,
        "mask": case.mask,
        **case.kwargs(),
    } | change
    with pytest.raises(ValueError, match=message):
        mtp_loss(**call)


@pytest.mark.parametrize("kind", ["tv", "kl", "reverse_kl"])
def test_float32_losses_over_a_production_vocabulary_equal_float64(kind):
    """Nearly equal logits: every term of the softmax's denominator counts."""
    draft = torch.zeros(1, 1, 151_936)
    draft[0, 0, 5] = 8.0
    mask = torch.ones(1, 1, dtype=torch.bool)
    ours, exact = (
        mtp_loss(kind, logits, torch.zeros_like(logits), mask=mask)[0] for logits in (draft, draft.double())
    )
    assert ours.item() == pytest.approx(exact.item(), abs=2e-6)
