"""Fused head and loss against the same loss of whole logits, and what it holds in memory."""

from __future__ import annotations

import weakref
from dataclasses import fields

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlpipe.config.draft_objectives import FROM_LOGITS, AnchorWeighting, DraftObjective
from rlpipe.drafts.loss import MtpStats, depth_targets, mtp_loss
from rlpipe.drafts.loss.linear import linear_mtp_loss
from rlpipe.drafts.objectives.supervised import OBJECTIVES, Supervised, tv
from rlpipe.drafts.vocabulary import OUTSIDE
from tests.helpers.draft_oracle import stack_depths

pytestmark = pytest.mark.unit
HIDDEN, VOCAB, DEPTHS = 6, 40, 3
KNOWN = [0, *range(3, 30, 2), 39]


class Case:
    """Hidden states of two sequences, one with two turns."""

    def __init__(self, dtype: torch.dtype = torch.float64, length: int = 9) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        sampled = torch.ones(2, length, dtype=torch.bool)
        sampled[:, 0], sampled[1, 4] = False, False
        tokens = torch.randint(0, VOCAB, (2, length), generator=generator)
        found = depth_targets(tokens, sampled, DEPTHS)
        self.rows = {"mask": found.mask}
        self.extra = {"tokens": found.tokens, "turn_starts": found.turn_starts}
        self.target = normal(2 * length, HIDDEN)
        self.weight = normal(VOCAB, HIDDEN).requires_grad_()
        ahead = torch.stack([self.target.roll(-k, 0) for k in range(1, DEPTHS + 1)], 1)
        self.draft = (ahead + 0.3 * normal(*ahead.shape)).requires_grad_()
        self.ahead = ahead

    def whole(self, kind, **settings):
        """The loss from logits, gradients by hidden states and head, and statistics."""
        logits = self.draft @ self.weight.T, self.ahead @ self.weight.detach().T
        loss, stats = mtp_loss(kind, *logits, mask=self.rows["mask"], **self.extra, **settings)
        return loss, *torch.autograd.grad(loss, [self.draft, self.weight]), stats

    def fused(self, kind, anchors_per_chunk: int, **settings):
        """The same from hidden states."""
        size = self.draft.element_size()
        loss, stats = linear_mtp_loss(
            kind,
            self.draft,
            self.target,
            head_weight=self.weight,
            mask=self.rows["mask"],
            **self.extra,
            chunk_bytes=anchors_per_chunk * DEPTHS * VOCAB * size,
            train_head=True,
            **settings,
        )
        return loss, *torch.autograd.grad(2 * loss, [self.draft, self.weight]), stats

    def reduced(self, kind, **settings):
        """The loss of logits that are spread over the vocabulary, by autograd of all of it."""
        known = self.draft @ self.weight[KNOWN].T
        outside = 0.7 * ((known / 0.7).logsumexp(-1, keepdim=True) + OUTSIDE)
        draft = torch.cat(
            [known[..., KNOWN.index(v), None] if v in KNOWN else outside for v in range(VOCAB)], -1
        )
        target = self.ahead @ self.weight.detach().T
        loss, stats = mtp_loss(kind, draft, target, mask=self.rows["mask"], **self.extra, **settings)
        return loss, *torch.autograd.grad(loss, [self.draft, self.weight]), stats


@pytest.mark.parametrize("kind", FROM_LOGITS)
def test_a_reduced_vocabulary_equals_autograd_of_the_spread_logits(kind):
    case, settings = Case(), {"temperature": 0.7, "anchors": AnchorWeighting.VISIT}
    loss, by_hidden, by_weight, stats = case.reduced(kind, **settings)
    for anchors_per_chunk in (2, 100):
        found = case.fused(kind, anchors_per_chunk, draft_ids=torch.tensor(KNOWN), **settings)
        assert found[0].item() == pytest.approx(loss.item(), abs=1e-12)
        torch.testing.assert_close(found[1], 2 * by_hidden, atol=1e-12, rtol=1e-9)
        torch.testing.assert_close(found[2], 2 * by_weight, atol=1e-6, rtol=1e-5)  # summed in float32
        for field in fields(MtpStats):
            torch.testing.assert_close(getattr(found[3], field.name), getattr(stats, field.name))


@pytest.mark.parametrize("kind", ["tv", "e2e_tv", "reverse_kl"])
def test_losses_of_the_overlap_are_those_of_a_draft_that_is_zero_outside(kind):
    """Against logits of -inf, and the gradient by the known ones alone."""
    case, outside = Case(), torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
    outside[KNOWN] = 0
    logits = case.draft @ case.weight.detach().T + outside, case.ahead @ case.weight.detach().T
    loss, _ = mtp_loss(kind, *logits, mask=case.rows["mask"], **case.extra)
    (by_hidden,) = torch.autograd.grad(loss, [case.draft])
    found = case.fused(kind, 5, draft_ids=torch.tensor(KNOWN))
    assert found[0].item() == pytest.approx(loss.item(), abs=1e-9)
    torch.testing.assert_close(found[1], 2 * by_hidden, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("anchors", AnchorWeighting)
@pytest.mark.parametrize("kind", FROM_LOGITS)
def test_fused_loss_gradients_and_statistics_equal_those_of_whole_logits(kind, anchors):
    case = Case()
    loss, by_hidden, by_weight, stats = case.whole(kind, anchors=anchors, temperature=0.7)
    for anchors_per_chunk in (1, 5, 100):
        found = case.fused(kind, anchors_per_chunk, anchors=anchors, temperature=0.7)
        assert found[0].item() == pytest.approx(loss.item(), abs=1e-12)
        torch.testing.assert_close(found[1], 2 * by_hidden, atol=1e-12, rtol=1e-9)
        torch.testing.assert_close(found[2], 2 * by_weight, atol=1e-6, rtol=1e-5)  # summed in float32
        for field in fields(MtpStats):
            torch.testing.assert_close(getattr(found[3], field.name), getattr(stats, field.name))


@pytest.mark.parametrize("anchors", AnchorWeighting)
def test_the_largest_logits_of_a_chunk_are_those_of_whole_logits(anchors, monkeypatch):
    monkeypatch.setitem(OBJECTIVES, DraftObjective.TV_TOP, Supervised(by_depth=tv, top=7))
    case = Case()
    loss, by_hidden, by_weight, stats = case.whole("tv_top", anchors=anchors, temperature=0.7)
    for anchors_per_chunk in (2, 100):
        found = case.fused("tv_top", anchors_per_chunk, anchors=anchors, temperature=0.7)
        assert found[0].item() == pytest.approx(loss.item(), abs=1e-12)
        torch.testing.assert_close(found[1], 2 * by_hidden, atol=1e-12, rtol=1e-9)
        torch.testing.assert_close(found[2], 2 * by_weight, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found[3].alpha, stats.alpha)
    assert loss.item() > case.whole("tv", anchors=anchors, temperature=0.7)[0].item() + 1e-3


def test_given_weights_and_normalizer_follow_their_anchors_through_chunks():
    case = Case()
    weights = torch.rand(len(case.target), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = case.whole("e2e_tv", anchors=weights, normalizer=7.0)
    found = case.fused("e2e_tv", 4, anchors=weights, normalizer=7.0)
    assert found[0].item() == pytest.approx(expected[0].item(), abs=1e-12)
    torch.testing.assert_close(found[1], 2 * expected[1], atol=1e-12, rtol=1e-9)


def test_the_head_is_a_constant_by_default_and_nothing_is_computed_without_gradients():
    case = Case()
    loss, _ = linear_mtp_loss("tv", case.draft, case.target, head_weight=case.weight, mask=case.rows["mask"])
    loss.backward()
    assert case.weight.grad is None
    assert case.draft.grad.abs().max() > 0
    with torch.no_grad():
        quiet, _ = linear_mtp_loss(
            "tv", case.draft, case.target, head_weight=case.weight, mask=case.rows["mask"]
        )
    assert quiet.item() == loss.item()
    assert not quiet.requires_grad


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.untyped_storage().nbytes() // out.element_size())
        return out


@pytest.mark.parametrize("kind", ["e2e_tv", "kl", "verify_steps"])
def test_no_tensor_of_all_logits_ever_exists(kind):
    case = Case(length=100)
    anchors_per_chunk = 4
    with _Largest() as seen:
        case.fused(kind, anchors_per_chunk)
    chunk = anchors_per_chunk * DEPTHS * VOCAB
    assert seen.elements <= max(chunk, case.draft.numel())
    with _Largest() as whole:
        case.whole(kind)
    assert whole.elements == 200 * DEPTHS * VOCAB


def test_prompts_and_padding_are_skipped():
    case = Case(length=100)
    case.rows["mask"] = torch.zeros_like(case.rows["mask"])
    case.rows["mask"][150, 0] = True
    whole = case.whole("tv")
    with _Largest() as seen:
        found = case.fused("tv", anchors_per_chunk=200)
    assert seen.elements <= case.draft.numel()
    torch.testing.assert_close(found[1], 2 * whole[1], atol=1e-12, rtol=1e-9)


def test_depths_of_an_unrolled_layer_meet_the_backbone_at_their_position():
    """A draft whose hidden states are the backbone's at t + k has an overlap of one wherever it counts."""
    generator = torch.Generator().manual_seed(0)
    backbone = torch.randn(2, 9, HIDDEN, generator=generator)
    tokens = torch.randint(0, VOCAB, (2, 9), generator=generator)
    states = [backbone[:, k:] for k in range(1, DEPTHS + 1)]  # [B, T - k, H], as `unroll` returns
    found = depth_targets(tokens, torch.ones(2, 9, dtype=torch.bool), DEPTHS)
    _, stats = linear_mtp_loss(
        "tv",
        stack_depths(states, 9),
        backbone.flatten(0, 1),
        head_weight=torch.randn(VOCAB, HIDDEN, generator=generator),
        mask=found.mask,
        tokens=found.tokens,
        turn_starts=found.turn_starts,
    )
    torch.testing.assert_close(stats.alpha, stats.count, atol=1e-5, rtol=0)
    assert stats.count.tolist() == [14, 12, 10]
    assert stats.emitted == 14
    assert stats.verify_steps == 4  # 7 tokens a sequence, 4 a step


class _Saved:
    """What autograd keeps of a saved tensor; it lives as long as the graph holds it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_retained_for_backward_is_the_hidden_gradient_alone():
    case, saved = Case(length=200), weakref.WeakSet()

    def keep(tensor):
        kept = _Saved(tensor)
        saved.add(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
        loss, _ = linear_mtp_loss(
            "e2e_tv", case.draft, case.target, head_weight=case.weight, mask=case.rows["mask"]
        )
    alive = sum(kept.tensor.untyped_storage().nbytes() for kept in saved)
    assert 0 < alive <= case.draft.untyped_storage().nbytes() + 64
    loss.backward()


def test_hidden_states_of_wrong_shape_are_refused():
    case = Case()
    with pytest.raises(ValueError, match="Flatten"):
        linear_mtp_loss("tv", case.draft, case.target[:-1], head_weight=case.weight, mask=case.rows["mask"])
    with pytest.raises(ValueError, match="mask must be bool"):
        linear_mtp_loss("tv", case.draft, case.target, head_weight=case.weight, mask=case.rows["mask"][:-1])
