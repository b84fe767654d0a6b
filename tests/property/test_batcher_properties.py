"""The batcher for any trajectories: nothing lost, nothing twice, budgets kept, ranks in step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.batching.packing import MULTIPLE, pack
from rlpipe.types import Trajectory, TrajectoryStatus

pytestmark = pytest.mark.property

LONGEST = 24
# two tokens only, so that common prefixes, duplicates and prefixes of one another are frequent
TRAJECTORIES = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=LONGEST),
        st.sampled_from([TrajectoryStatus.COMPLETE] * 4 + [TrajectoryStatus.MASKED]),
    ),
    max_size=12,
)
BUDGET = st.integers(LONGEST, 100)


def build(drawn):
    """Trajectories of (token, sampled) pairs, and advantages that name trajectory and token."""
    trajectories, advantages = [], []
    for i, (pairs, status) in enumerate(drawn):
        ids, mask = (list(x) for x in zip(*pairs, strict=True))
        logprobs = [-(100.0 * i + s + 1) * m for s, m in enumerate(mask)]
        trajectories.append(
            Trajectory(
                trajectory_id=str(i),
                group_id="g",
                instance_id="i",
                token_ids=ids,
                loss_mask=mask,
                rollout_logprobs=logprobs,
                status=status,
            )
        )
        advantages.append(np.array([(1000.0 * i + s + 1) * m for s, m in enumerate(mask)], dtype=np.float32))
    return trajectories, advantages


def micro_batches(batch):
    return [micro for mini in batch.minibatches for shard in mini.shards for micro in shard]


def seen_from(micro, source):
    """The tokens attention shows to a position, from the branches alone."""
    ends = np.cumsum([branch.length for branch in micro.branches])
    own = int(np.searchsorted(ends, source, side="right"))
    begin = ends - [branch.length for branch in micro.branches]
    pieces = [micro.tokens[begin[j] : begin[j] + count] for j, count in micro.branches[own].context]
    tokens = np.concatenate([*pieces, micro.tokens[begin[own] : source + 1]])
    assert micro.positions[source] == len(tokens) - 1
    return tokens.tolist()


@given(TRAJECTORIES, st.integers(1, 4), st.integers(1, 3), BUDGET, st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_trainable_token_is_packed_once_behind_its_own_past(drawn, dp, minis, budget, share):
    trajectories, advantages = build(drawn)
    batch = pack(trajectories, advantages, budget, dp_size=dp, minibatches=minis, share_prefixes=share)
    seen = []
    for micro in micro_batches(batch):
        cells = np.argwhere(micro.mask)
        for (b, r), source, target in zip(cells, micro.sources, micro.targets, strict=True):
            t, s = trajectories[micro.rows[b]], micro.indices[b, r]
            assert target == t.token_ids[s]
            assert seen_from(micro, source) == t.token_ids.tolist()[:s]
            assert micro.rollout_logprobs[b, r] == np.float32(t.rollout_logprobs.tolist()[s])
            assert micro.advantages[b, r] == advantages[micro.rows[b]][s]
            seen.append((int(micro.rows[b]), int(s)))
    wanted = {
        (i, s + 1)
        for i, t in enumerate(trajectories)
        if t.status is TrajectoryStatus.COMPLETE
        for s in np.flatnonzero(t.loss_mask[1:]).tolist()
    }
    assert len(seen) == len(wanted) and set(seen) == wanted
    assert sum(m.sequences for m in batch.minibatches) == len({i for i, _ in wanted})


@given(TRAJECTORIES, st.integers(1, 4), st.integers(1, 3), BUDGET, st.booleans())
@settings(max_examples=100, deadline=None)
def test_budgets_are_kept_ranks_are_in_step_and_the_sums_add_up(drawn, dp, minis, budget, share):
    trajectories, advantages = build(drawn)
    batch = pack(trajectories, advantages, budget, dp_size=dp, minibatches=minis, share_prefixes=share)
    run = padded = 0
    for mini in batch.minibatches:
        assert len(mini.shards) == dp and len({len(shard) for shard in mini.shards}) == 1
        for micro in (m for shard in mini.shards for m in shard):
            assert sum(branch.length for branch in micro.branches) == len(micro.tokens) <= budget
            assert all(branch.length > 0 for branch in micro.branches)
            if not share:
                assert micro.padded()[0].size <= budget
            if micro.rows[0] >= 0:
                run += len(micro.tokens)
                padded += micro.padded()[0].size if not share else 0
                assert not share or len(micro.tokens) in (
                    budget,
                    -(-len(micro.tokens) // MULTIPLE) * MULTIPLE,
                )
    read = sum(
        int(np.flatnonzero(t.loss_mask)[-1])
        for t in trajectories
        if t.status is TrajectoryStatus.COMPLETE and any(t.loss_mask.tolist()[1:])
    )
    if share:
        assert run == read - batch.shared_tokens + batch.padding_tokens
    else:
        assert batch.shared_tokens == 0 and padded == read + batch.padding_tokens


@given(TRAJECTORIES, BUDGET)
@settings(max_examples=60, deadline=None)
def test_padded_rows_hold_the_same_predictions(drawn, budget):
    trajectories, advantages = build(drawn)
    for micro in micro_batches(pack(trajectories, advantages, budget, share_prefixes=False)):
        rows, sources = micro.padded()
        cells = np.argwhere(micro.mask)
        for (b, r), source in zip(cells, sources, strict=True):
            s = micro.indices[b, r]
            assert divmod(int(source), rows.shape[1]) == (b, s - 1)
            assert rows[b, :s].tolist() == trajectories[micro.rows[b]].token_ids[:s].tolist()
