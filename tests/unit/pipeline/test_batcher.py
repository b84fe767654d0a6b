"""The batcher: nothing lost, nothing twice, budgets kept, ranks in step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.pipeline.batcher import pack
from rlpipe.types import TrajectoryStatus
from tests.helpers.trajectories import make_trajectory

pytestmark = pytest.mark.unit

SHAPES = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 6), min_size=1, max_size=3), st.integers(0, 4)),
    min_size=0,
    max_size=12,
)


def build(shapes, masked=()):
    rng = np.random.default_rng(0)
    trajectories = [
        make_trajectory(rng, name=str(i), prompt=prompt, turns=tuple(turns), tool=tool, reward=1.0)
        for i, (prompt, turns, tool) in enumerate(shapes)
    ]
    for i, trajectory in enumerate(trajectories):
        if i in masked:
            trajectory.status, trajectory.reward = TrajectoryStatus.MASKED, None
    advantages = [np.where(t.loss_mask, 1.0 + i, 0.0).astype(np.float32) for i, t in enumerate(trajectories)]
    return trajectories, advantages


def micro_batches(batch):
    return [micro for mini in batch.minibatches for shard in mini.shards for micro in shard]


@given(SHAPES, st.integers(1, 4), st.integers(1, 3), st.integers(60, 200), st.sets(st.integers(0, 11)))
@settings(max_examples=60, deadline=None)
def test_every_trainable_token_is_packed_once_with_what_belongs_to_it(shapes, dp, minis, budget, masked):
    trajectories, advantages = build(shapes, masked)
    batch = pack(trajectories, advantages, budget, dp, minibatches=minis)
    seen: dict[tuple[int, int], int] = {}
    for micro in micro_batches(batch):
        for b, row in enumerate(micro.rows):
            for s in np.flatnonzero(micro.mask[b]):
                t = trajectories[row]
                assert micro.targets[b, s] == t.token_ids[s + 1]
                assert micro.inputs[b, : s + 1].tolist() == t.token_ids[: s + 1]
                assert micro.rollout_logprobs[b, s] == np.float32(t.rollout_logprobs[s + 1])
                assert micro.advantages[b, s] == advantages[row][s + 1]
                seen[row, s + 1] = seen.get((row, s + 1), 0) + 1
    wanted = {
        (i, s)
        for i, t in enumerate(trajectories)
        if t.status is TrajectoryStatus.COMPLETE
        for s in np.flatnonzero(t.loss_mask)
    }
    assert seen.keys() == wanted and set(seen.values()) <= {1}
    assert batch.tokens == len(wanted)
    assert sum(m.sequences for m in batch.minibatches) == len({i for i, _ in wanted})


@given(SHAPES, st.integers(1, 4), st.integers(1, 3), st.integers(60, 200))
@settings(max_examples=60, deadline=None)
def test_budgets_are_kept_and_ranks_have_equal_numbers_of_micro_batches(shapes, dp, minis, budget):
    trajectories, advantages = build(shapes)
    batch = pack(trajectories, advantages, budget, dp, minibatches=minis)
    for mini in batch.minibatches:
        assert len(mini.shards) == dp
        assert len({len(shard) for shard in mini.shards}) == 1
        for micro in (m for shard in mini.shards for m in shard):
            assert micro.inputs.size <= budget
            # nothing after the last trained token is read
            assert micro.rows[0] < 0 or micro.mask[:, -1].any()


def test_ranks_get_about_the_same_number_of_tokens():
    trajectories, advantages = build([(3, [n], 0) for n in range(1, 41)])
    batch = pack(trajectories, advantages, 200, 2)
    tokens = [sum(m.mask.sum() for m in shard) for shard in batch.minibatches[0].shards]
    assert abs(tokens[0] - tokens[1]) <= 20


def test_rows_of_similar_length_share_a_micro_batch_so_padding_is_small():
    trajectories, advantages = build([(3, [n % 40 + 1], 0) for n in range(80)])
    batch = pack(trajectories, advantages, 256, 1)
    cells = sum(m.inputs.size for m in micro_batches(batch))
    assert batch.padding_tokens < 0.1 * cells


def test_zero_advantage_trajectories_are_left_out_on_request_but_still_normalise_the_loss():
    trajectories, advantages = build([(3, [4], 0), (3, [5], 0), (3, [6], 0)])
    advantages[1][:] = 0
    batch = pack(trajectories, advantages, 64, 1, skip_zero_advantage=True)
    assert batch.skipped == 1
    assert sorted(i for m in micro_batches(batch) for i in m.rows) == [0, 2]
    assert batch.minibatches[0].tokens == 15 and batch.minibatches[0].sequences == 3


def test_a_batch_without_anything_to_train_on_has_one_empty_micro_batch_per_rank():
    trajectories, advantages = build([(3, [4], 0)], masked={0})
    batch = pack(trajectories, advantages, 64, 2)
    assert batch.tokens == 0
    assert [[m.mask.sum() for m in shard] for shard in batch.minibatches[0].shards] == [[0], [0]]


def test_a_trajectory_longer_than_the_budget_is_refused_with_the_remedy():
    trajectories, advantages = build([(3, [4], 0)])
    with pytest.raises(
        ValueError, match=r"micro_batch_tokens=5 is less than one trajectory of 6 tokens \(0\): raise"
    ):
        pack(trajectories, advantages, 5)


def test_minibatches_are_drawn_at_random_from_the_seed():
    trajectories, advantages = build([(3, [4], 0) for _ in range(12)])

    def members(seed):
        batch = pack(trajectories, advantages, 64, 1, minibatches=3, seed=seed)
        return [sorted(i for s in m.shards for micro in s for i in micro.rows) for m in batch.minibatches]

    assert members(1) == members(1) != members(2)
    assert sorted(i for part in members(1) for i in part) == list(range(12))
