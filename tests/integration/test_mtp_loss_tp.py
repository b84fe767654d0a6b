"""Vocabulary tensor parallelism on gloo: two shards equal the whole vocabulary."""

from __future__ import annotations

import tempfile
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.testing import assert_allclose

from rlpipe.config.draft_objectives import FROM_LOGITS, DraftObjective
from rlpipe.drafts.loss import MtpStats, mtp_loss
from rlpipe.drafts.loss.linear import linear_mtp_loss
from rlpipe.drafts.objectives.supervised import OBJECTIVES, Supervised, tv
from tests.helpers.mtp_reference import random_case
from tests.helpers.parallel import run_ranks

pytestmark = pytest.mark.integration
VOCAB = 30


def _losses(rank: int, ranks: int, rendezvous: str) -> dict[str, tuple]:
    """Per kind: loss and gradient of this shard's logits; the fused path's loss and gradients by hidden
    states and this shard's head; sums; messages sent by a loss and its gradient."""
    torch.set_num_threads(1)
    group, calls = None, 0
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
        group = dist.group.WORLD
    reduce = dist.all_reduce

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return reduce(*args, **kwargs)

    dist.all_reduce = counted
    OBJECTIVES[DraftObjective.TV_TOP] = Supervised(by_depth=tv, top=7)  # fewer than a shard has
    case = random_case(VOCAB)
    with torch.no_grad():
        case.draft[..., VOCAB - 2 :] = case.target[..., VOCAB - 2 :] = float("-inf")  # vocabulary padding
    shard = slice(rank * VOCAB // ranks, (rank + 1) * VOCAB // ranks)
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(len(case.mask), 5, generator=generator, dtype=torch.float64)
    head = torch.randn(VOCAB, 5, generator=generator, dtype=torch.float64)
    results = {}
    for kind in FROM_LOGITS:
        draft, calls = case.draft.detach()[..., shard].clone().requires_grad_(), 0
        loss, stats = mtp_loss(
            kind,
            draft,
            case.target[..., shard],
            mask=case.mask,
            tp_group=group,
            temperature=0.8,
            **case.kwargs(),
        )
        loss.backward()
        used = calls
        states = torch.stack([hidden.roll(-k, 0) + 0.2 for k in (1, 2, 3)], 1).requires_grad_()
        weight = head[shard].clone().requires_grad_()
        fused, _ = linear_mtp_loss(
            kind,
            states,
            hidden,
            head_weight=weight,
            mask=case.mask,
            tp_group=group,
            train_head=True,
            chunk_bytes=4 * 3 * 8 * len(weight),
            **case.kwargs(),
        )
        fused.backward()
        sums = {field.name: getattr(stats, field.name).numpy() for field in fields(MtpStats)}
        arrays = [x.detach().numpy() for x in (loss, draft.grad, fused, states.grad, weight.grad)]
        results[kind.value] = (*arrays, sums, used)
    dist.all_reduce = reduce

    # A draft whose tokens are all in the second shard.
    known = torch.arange(VOCAB // 2, VOCAB, 2)
    known = known[(known >= shard.start) & (known < shard.stop)] - shard.start
    for kind in ("kl", "e2e_tv"):
        states = torch.stack([hidden.roll(-k, 0) + 0.2 for k in (1, 2, 3)], 1).requires_grad_()
        loss, _ = linear_mtp_loss(
            kind,
            states,
            hidden,
            head_weight=head[shard],
            mask=case.mask,
            tp_group=group,
            temperature=0.8,
            draft_ids=known,
            **case.kwargs(),
        )
        loss.backward()
        results[f"reduced {kind}"] = loss.item(), states.grad.numpy()
    if group is not None:
        dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def runs():
    (whole,) = run_ranks(_losses, 1, "")
    with tempfile.TemporaryDirectory() as folder:
        return whole, run_ranks(_losses, 2, str(Path(folder) / "rendezvous"))


@pytest.mark.parametrize("kind", FROM_LOGITS)
def test_two_shards_equal_the_whole_vocabulary(runs, kind):
    whole, shards = runs[0][kind.value], [shard[kind.value] for shard in runs[1]]
    loss, by_logits, fused, by_hidden, by_head, sums, _ = whole
    for shard in shards:
        assert_allclose(shard[0], loss, rtol=1e-12)
        assert_allclose(shard[2], fused, rtol=1e-12)
        assert_allclose(shard[3], by_hidden, atol=1e-12)
        for name, expected in sums.items():
            assert_allclose(shard[5][name], expected, atol=1e-11, err_msg=name)
    assert_allclose(np.concatenate([shard[1] for shard in shards], -1), by_logits, atol=1e-13)
    assert_allclose(np.concatenate([shard[4] for shard in shards]), by_head, atol=1e-7)  # float32 sums


@pytest.mark.parametrize("kind", ["kl", "e2e_tv"])
def test_a_reduced_vocabulary_may_leave_a_shard_empty(runs, kind):
    loss, by_hidden = runs[0][f"reduced {kind}"]
    for shard in runs[1]:
        assert_allclose(shard[f"reduced {kind}"][0], loss, rtol=1e-12)
        assert_allclose(shard[f"reduced {kind}"][1], by_hidden, atol=1e-12)


def test_a_loss_needs_three_messages_and_its_gradient_none(runs):
    messages = {kind: {shard[kind.value][-1] for shard in runs[1]} for kind in FROM_LOGITS}
    assert messages.pop(DraftObjective.TV_TOP) == {6}  # it measures twice
    assert set.union(*messages.values()) == {3}
    assert {runs[0][kind.value][-1] for kind in FROM_LOGITS} == {0}
