"""Objectives that the papers compare with or advise against: their definitions, and what is said of them."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import smooth_l1_loss

from rlpipe.config.draft_objectives import DraftObjective
from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.loss import mtp_loss
from rlpipe.drafts.loss.linear import linear_mtp_loss
from rlpipe.drafts.loss.rows import keep_largest
from rlpipe.drafts.objectives.exact_window import speedup
from rlpipe.drafts.objectives.ppow import group_advantages, measured_reward
from rlpipe.drafts.windows.reward import acceptance_distribution
from rlpipe.drafts.windows.selection import criticality, hard_share, learnable_kl
from rlpipe.drafts.windows.training import WindowTraining
from tests.helpers.mtp_reference import random_case
from tests.helpers.window_tables import TableDrafter, Tables

pytestmark = pytest.mark.unit


def test_a_row_beyond_the_clamp_has_the_loss_of_the_clamp_and_no_gradient():
    case = random_case(23)
    with torch.no_grad():
        case.draft[::2] = -20 * case.target[::2]  # likely where the target is unlikely
    overlap = torch.minimum(case.draft.softmax(-1), case.target.softmax(-1)).sum(-1).detach()
    beyond = case.mask & (overlap < 0.1)
    assert 0 < beyond.sum() < case.mask.sum()

    loss, _ = mtp_loss("tv_clamp", case.draft, case.target, mask=case.mask)
    (clamped,) = torch.autograd.grad(loss, case.draft)
    (plain,) = torch.autograd.grad(mtp_loss("tv", case.draft, case.target, mask=case.mask)[0], case.draft)
    expected = (1 - overlap).clamp(max=0.9)[case.mask].mean()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert (clamped[beyond] == 0).all() and plain[beyond].abs().max() > 0
    torch.testing.assert_close(clamped[~beyond], plain[~beyond])


def test_the_largest_logits_of_a_row_are_those_that_sorting_finds():
    logits = torch.randn(5, 3, 40, generator=torch.Generator().manual_seed(0))
    kept = keep_largest(logits, 7, None)
    for row, found in zip(logits.flatten(0, 1), kept.flatten(0, 1), strict=True):
        assert set(found.isfinite().nonzero().flatten().tolist()) == set(row.argsort()[-7:].tolist())
    assert torch.equal(keep_largest(logits, 99, None), logits)


def test_the_statistics_of_a_loss_over_the_largest_logits_are_those_of_all():
    case = random_case(3000, batch=1, length=6)
    truncated, found = mtp_loss("tv_top", case.draft, case.target, mask=case.mask)
    whole, expected = mtp_loss("tv", case.draft, case.target, mask=case.mask)
    torch.testing.assert_close(found.alpha, expected.alpha)
    torch.testing.assert_close(found.draft_entropy, expected.draft_entropy)
    assert abs(truncated.item() - whole.item()) > 1e-3


def train_over_largest(count: int, seed: int) -> tuple[float, float]:
    """Train a draft by TV over its `count` largest logits; return its overlap and the loss's highest rise."""
    generator = torch.Generator().manual_seed(seed)
    states, head = (torch.randn(n, 12, generator=generator) for n in (96, 300))
    target = states @ head.T - torch.arange(1, 301).log()
    weight = (0.01 * torch.randn(300, 12, generator=generator)).requires_grad_()
    bias = torch.zeros(300, requires_grad=True)
    optimizer, losses, mask = torch.optim.Adam([weight, bias], lr=3e-2), [], torch.ones(32, 1).bool()
    for _ in range(80):
        rows = torch.randint(0, 96, (32,), generator=generator)
        logits = keep_largest(states[rows] @ weight.T + bias, count, None)
        loss, _ = mtp_loss("tv", logits[:, None], target[rows, None], mask=mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    values = torch.tensor(losses[10:])
    overlap = torch.minimum((states @ weight.T + bias).softmax(-1), target.softmax(-1)).sum(-1).mean()
    return overlap.item(), (values - values.cummin(0).values).max().item()


@pytest.mark.parametrize("seed", range(3))
def test_tv_over_few_of_the_largest_logits_spikes_and_ends_lower(seed):
    """Bebop section 7.8, Fig. 14b, in a world of 300 tokens: 3% of them, and all."""
    (few, few_rise), (whole, rise) = (train_over_largest(count, seed) for count in (10, 300))
    assert few < whole - 0.15 and few_rise > 1.3 * rise


def hidden_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """States of a draft [9, 2, 8] and of its target [9, 8], a head of rank 5, and a mask."""
    generator = torch.Generator().manual_seed(3)
    draft, target, left, right = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((9, 2, 8), (9, 8), (30, 5), (5, 8))
    )
    mask = torch.ones(9, 2, dtype=torch.bool)
    mask[7:] = mask[3, 1] = False
    return draft.requires_grad_(), target, left @ right, mask


def test_the_loss_of_eagle_1_is_the_distance_of_features_and_a_tenth_of_the_divergence():
    draft, target, head, mask = hidden_case()
    loss, stats = linear_mtp_loss("eagle1", draft, target, head_weight=head, mask=mask, chunk_bytes=500)
    expected = 0.0
    for n, k in mask.nonzero().tolist():
        p, q = ((x @ head.T).log_softmax(-1) for x in (target[n + k + 1], draft[n, k]))
        expected = expected + smooth_l1_loss(draft[n, k], target[n + k + 1]) + 0.1 * (p.exp() * (p - q)).sum()
    expected = expected / mask.sum()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert (stats.loss / stats.weight).item() == pytest.approx(expected.item(), abs=1e-12)
    found, wanted = (torch.autograd.grad(x, draft, retain_graph=True)[0] for x in (loss, expected))
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-9)


def test_eagle_1_pays_for_errors_that_no_logit_shows_and_eagle_3_does_not():
    """Notes, lemma A: what the head maps to 0 costs features a distance, and tokens nothing."""
    _, target, head, mask = hidden_case()
    *_, basis = torch.linalg.svd(head)
    perfect = torch.stack([target.roll(-k, 0) for k in (1, 2)], 1)
    moved = perfect + 0.7 * basis[-1]  # in the head's null space

    losses = {
        (kind, name): linear_mtp_loss(kind, x, target, head_weight=head, mask=mask)
        for kind in ("kl", "eagle1")
        for name, x in (("perfect", perfect), ("moved", moved))
    }
    assert {name: loss.item() > 1e-9 for name, (loss, _) in losses.items()} == {
        ("kl", "perfect"): False,
        ("kl", "moved"): False,
        ("eagle1", "perfect"): False,
        ("eagle1", "moved"): True,
    }
    assert all((stats.alpha / stats.count > 1 - 1e-9).all() for _, stats in losses.values())


def test_logits_alone_are_refused_where_hidden_states_are_compared():
    case = random_case(9)
    with pytest.raises(ValueError, match="kind=eagle1 compares hidden states"):
        mtp_loss("eagle1", case.draft, case.target, mask=case.mask)


def test_adaw_begins_where_it_is_switched_on():
    shares = [hard_share(step, 10, start=0.8, end=0.8, after=4) for step in range(10)]
    assert shares == [0.0] * 4 + [0.8] * 6
    assert [hard_share(step, 2, start=0.3, end=0.8, after=3) for step in range(2)] == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"ppow.hard_after=-1"):
        PpowConfig(hard_after=-1)


def test_the_switch_reaches_the_windows_of_a_step():
    config = PpowConfig(hard_start=1.0, hard_end=1.0, hard_after=2)
    training = WindowTraining(config, DraftObjective.PPOW, depths=2, steps=4, seed=0)
    assert [training.hard_share(step) for step in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("expected", [False, True])
def test_a_measured_speedup_pays_for_every_draft_and_its_advantages_do_not_depend_on_the_cost(expected):
    config, far = PpowConfig(expected_reward=expected, proximity=0.1), torch.tensor(9.0)
    accepted = torch.tensor([[0, 2, 3, 1]])
    probs = torch.rand(1, 4, 3, generator=torch.Generator().manual_seed(0))

    def rewards(cost, gap):
        return measured_reward(accepted, probs, gap, draft_cost=cost, config=config)

    if expected:
        law = acceptance_distribution(probs)
        by_hand = (law * speedup(torch.arange(4), 3, 0.2)).sum(-1)
        torch.testing.assert_close(rewards(0.2, far), by_hand)
        torch.testing.assert_close(rewards(0.2, torch.tensor(0.0)), by_hand + 0.1 * law[..., 0])
    else:
        by_hand = torch.tensor([[1.0, 3.0, 4.0, 2.0]]) / (1 + 0.2 * 3)  # tokens, over the time of the step
        torch.testing.assert_close(rewards(0.2, far), by_hand)
        assert (rewards(0.2, torch.tensor(0.0)) - by_hand)[0].tolist() == pytest.approx(
            [0.1, 0, 0, 0], abs=1e-6
        )
    cheap, dear = (group_advantages(rewards(cost, far)) for cost in (0.01, 0.7))
    torch.testing.assert_close(cheap, dear, atol=1e-4, rtol=1e-4)


def test_the_loss_on_own_tokens_asks_the_target_what_follows_them():
    """Loss and gradient by the tables of the drafts that were sampled, seen through `read`."""
    tables, windows, seen = Tables(5, 3, temperature=0.7, seed=2), 6, []

    class Seen(TableDrafter):
        def read(self, tokens):
            seen.append(tokens)
            return super().read(tokens)

    text = Seen(tables, windows)
    settings = {"group_size": 4, "windows": windows, "hard_start": 0.0, "hard_end": 0.0}
    training = WindowTraining(PpowConfig(**settings), DraftObjective.OWN_KL, depths=3, steps=1, seed=0)
    total, totals = training.loss(text, 0)
    total.backward()

    (tokens,), draft = seen, [t.clone().requires_grad_() for t in tables.draft[:3]]
    assert len(tokens.unique()) == 5
    log_p, log_q = (tables.logprobs(logits, tokens, 3) for logits in (tables.target, draft))
    expected = (log_p.exp() * (log_p - log_q)).sum()
    expected.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-12)
    for found, table in zip(text.gradients(), draft, strict=True):
        torch.testing.assert_close(found.sum(0), table.grad)

    metrics = {name: value.value() for name, value in totals.metrics().items()}
    assert metrics["ppow/loss"] == pytest.approx(expected.item() / tokens.numel())


def test_criticality_leaves_out_what_a_reduced_vocabulary_cannot_learn():
    """By the chain rule of the divergence, over the tokens that are known."""
    p, q = torch.randn(2, 20, 9, generator=torch.Generator().manual_seed(1)).softmax(-1)
    known = torch.tensor([0, 2, 3, 7])
    inside_p, inside_q = p[:, known].sum(-1), q[:, known].sum(-1)
    given_p, given_q = p[:, known] / inside_p[:, None], q[:, known] / inside_q[:, None]
    wanted = inside_p * (given_p * (given_p / given_q).log()).sum(-1)
    torch.testing.assert_close(learnable_kl(p.log(), q.log(), known), wanted)
    assert (criticality(torch.zeros(20), wanted, 9) == wanted).all()
