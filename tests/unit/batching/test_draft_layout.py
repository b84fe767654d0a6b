"""The draft's layout: what every anchor reads and follows is what its trajectory says, shared or not."""

from __future__ import annotations

import numpy as np
import pytest

from rlpipe.batching.draft_layout import DraftBatch, draft_batch
from rlpipe.batching.layout import empty_micro_batch
from rlpipe.batching.packing import pack
from tests.helpers.trajectories import make_groups, make_trajectory

pytestmark = pytest.mark.unit
DEPTHS = 3


def micro_batches(trajectories, *, budget=400, share=True):
    batch = pack(trajectories, None, budget, share_prefixes=share)
    return [micro for shard in batch.minibatches[0].shards for micro in shard]


def followed(batch: DraftBatch, anchor: int) -> list[int]:
    """Anchors that an anchor attends to, itself included, by the branches."""
    starts = np.cumsum([0, *(b.length for b in batch.branches)])
    index = int(np.searchsorted(starts, anchor, side="right")) - 1
    pieces = [*batch.branches[index].context, (index, anchor - starts[index] + 1)]
    return [int(starts[b]) + i for b, count in pieces for i in range(count)]


def turns_of(trajectory):
    """(first, last) index of every run of two or more sampled tokens."""
    mask = [0, *trajectory.loss_mask.tolist(), 0]
    starts = [i - 1 for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
    ends = [i - 2 for i in range(1, len(mask)) if not mask[i] and mask[i - 1]]
    return [(a, b) for a, b in zip(starts, ends, strict=True) if b > a]


@pytest.mark.parametrize("common", [0, 9], ids=["own prompts", "shared prompts"])
@pytest.mark.parametrize("share", [True, False], ids=["shared", "apart"])
def test_every_scored_anchor_reads_and_follows_its_own_trajectory(common, share):
    trajectories = [t for seed in range(4) for g in make_groups(seed, common=common) for t in g.trajectories]
    expected = sorted(
        tuple(t.token_ids.tolist()[a - 1 : b + 1]) + tuple(t.token_ids.tolist()[:a])
        for t in trajectories
        for a, b in turns_of(t)
    )
    found = []
    for micro in micro_batches(trajectories, share=share):
        batch = draft_batch(micro, DEPTHS)
        for tokens, sampled, anchors, backbone in zip(
            batch.tokens, batch.sampled, batch.anchors, batch.backbone, strict=True
        ):
            length = int(sampled.sum()) + 1
            assert not sampled[0] and sampled[1:length].all()
            history = micro.tokens[batch.places[followed(batch, anchors[0])]].tolist()
            found.append((*tokens[:length].tolist(), *history))
            assert not anchors[length - 1 :].any() and not tokens[length:].any()
            for j in range(length - 2):  # anchors that draft something
                anchor = anchors[j]
                chain = followed(batch, anchor)
                assert micro.tokens[batch.places[chain]].tolist() == history + tokens[1 : j + 1].tolist()
                assert batch.positions[chain].tolist() == list(range(len(chain)))
                assert batch.places[anchor] == backbone[j] and micro.tokens[backbone[j]] == tokens[j]
                for k in range(1, min(DEPTHS, length - 2 - j) + 1):
                    reads = batch.following[k - 1, anchor]
                    assert reads == tokens[j + k]
                    # what it attends to reads the trajectory, too, at this depth
                    line = np.array(history + tokens[1:length].tolist())
                    assert batch.following[k - 1, chain].tolist() == line[k : k + len(chain)].tolist()
    assert sorted(found) == expected


def test_siblings_share_all_but_as_many_anchors_as_there_are_depths():
    rng = np.random.default_rng(0)
    first, second = (make_trajectory(rng, prompt=20, turns=(6,)) for _ in range(2))
    second.token_ids[:20] = first.token_ids.tolist()[:20]
    second.token_ids[20] = first.token_ids[20] + 1  # so that they part there
    (micro,) = micro_batches([first, second])
    batch = draft_batch(micro, DEPTHS)
    assert [b.length for b in batch.branches] == [25, 5 + DEPTHS]
    assert batch.branches[1].context == [(0, 20 - DEPTHS)]


def test_a_repeated_trajectory_adds_a_row_and_no_anchor():
    one = make_trajectory(np.random.default_rng(0), prompt=8, turns=(6, 5))
    (micro,) = micro_batches([one, one, one])
    batch = draft_batch(micro, DEPTHS)
    assert len(batch.branches) == 1 and len(batch.tokens) == 6
    assert np.array_equal(batch.anchors[0], batch.anchors[2])


def test_anchors_are_filled_up_to_a_multiple_by_a_branch_of_their_own():
    micro = micro_batches([make_trajectory(np.random.default_rng(0), prompt=8, turns=(6,))])[0]
    batch = draft_batch(micro, DEPTHS, multiple=32)
    assert [b.length for b in batch.branches] == [13, 19] and not batch.branches[1].context
    assert len(batch.places) == batch.following.shape[1] == len(batch.positions) == 32


def test_turns_of_a_single_token_draft_nothing():
    one = make_trajectory(np.random.default_rng(0), turns=(1, 1))
    assert draft_batch(micro_batches([one])[0], DEPTHS) is None
    assert draft_batch(empty_micro_batch(), DEPTHS) is None
