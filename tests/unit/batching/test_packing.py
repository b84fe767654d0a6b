"""The batcher on worked examples; what holds for any input is in tests/property."""

from __future__ import annotations

import numpy as np
import pytest

from rlpipe.batching.micro_batch import Branch
from rlpipe.batching.packing import pack
from rlpipe.types import Trajectory, TrajectoryStatus
from tests.helpers.trajectories import make_trajectory

pytestmark = pytest.mark.unit


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


def written(prompt, *answers):
    """Siblings from text: a token per letter, the answers sampled."""
    made = []
    for i, answer in enumerate(answers):
        made.append(
            Trajectory(
                trajectory_id=str(i),
                group_id="g",
                instance_id="i",
                token_ids=[ord(c) for c in prompt + answer],
                loss_mask=[0] * len(prompt) + [1] * len(answer),
                rollout_logprobs=[0.0] * len(prompt) + [-1.0 - i] * len(answer),
            )
        )
    return made


def letters(ids):
    return "".join(map(chr, ids))


def micro_batches(batch):
    return [micro for mini in batch.minibatches for shard in mini.shards for micro in shard]


@pytest.mark.parametrize("share", [True, False])
def test_columns_and_candidates_stay_with_their_token_however_it_is_laid_out(share):
    trajectories, columns = written("prompt:", "bcd.", "axyz.", "axw."), []
    for i, t in enumerate(trajectories):  # what each token carries names it
        name = [100.0 * i + place for place in range(len(t.token_ids))]
        columns.append({"name": np.array(name, dtype=np.float32)})
        told = [[(int(x), -x), (1, -1.0)][: 1 + (x > 10)] for x in name]
        t.top_logprobs = [top if m else [] for top, m in zip(told, t.loss_mask.tolist(), strict=True)]
    (micro,) = micro_batches(
        pack(trajectories, None, 40, share_prefixes=share, candidates=True, columns=columns)
    )
    cells = micro.mask > 0
    names = (100 * micro.rows[:, None] + micro.indices)[cells]
    found = micro.candidates
    for line in (micro.columns["name"], found.ids[:, 0], -found.logprobs[:, 0]):
        assert line.tolist() == names.tolist()
    padded = names <= 10  # these came with one candidate, the others with two
    assert 0 < padded.sum() < len(names)
    assert (found.ids[:, 1] == np.where(padded, -1, 1)).all()
    assert (found.logprobs[:, 1] == np.where(padded, -np.inf, -1.0)).all()


def test_missing_candidates_are_refused_and_say_what_to_ask_the_engine_for():
    trajectories = written("prompt:", "bcd.")
    with pytest.raises(ValueError, match=r"'0' carries no top_logprobs, .* SamplingParams\.top_logprobs"):
        pack(trajectories, None, 40, candidates=True)


def test_siblings_are_branches_of_what_they_share():
    batch = pack(written("prompt:", "bcd.", "axyz.", "axw."), None, 21)
    (micro,) = micro_batches(batch)
    assert micro.rows.tolist() == [2, 1, 0]
    assert letters(micro.tokens[:18]) == "prompt:axw" + "yz" + "bcd" + "\0" * 3
    assert micro.branches == [
        Branch(length=10, context=[]),  # prompt:axw
        Branch(length=2, context=[(0, 9)]),  # prompt:ax yz
        Branch(length=3, context=[(0, 7)]),  # prompt: bcd
        Branch(length=6, context=[]),  # padding up to the budget
    ]
    assert micro.positions[:15].tolist() == [*range(10), 9, 10, 7, 8, 9]
    # the last token of the prompt predicts the first sampled one of each sibling
    assert micro.sources.tolist() == [6, 7, 8, 9, 6, 7, 8, 10, 11, 6, 12, 13, 14]
    assert letters(micro.targets) == "axw." + "axyz." + "bcd."
    assert micro.mask.tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert micro.indices.tolist() == [[7, 8, 9, 10, 0], [7, 8, 9, 10, 11], [7, 8, 9, 10, 0]]
    assert micro.rollout_logprobs[:, 0].tolist() == [-3.0, -2.0, -1.0]
    assert batch.shared_tokens == 16 and batch.padding_tokens == 6


def test_a_duplicate_adds_predictions_but_no_tokens():
    batch = pack(written("prompt:", "abc", "abc", "ab"), None, 64)
    (micro,) = micro_batches(batch)
    assert [branch.length for branch in micro.branches] == [8, 1, 23]
    assert micro.branches[1].context == [(0, 8)]
    assert micro.sources.tolist() == [6, 7, 6, 7, 8, 6, 7, 8]
    assert letters(micro.targets) == "ab" + "abc" + "abc"


def test_a_context_may_span_several_branches():
    batch = pack(written("p", "aaaa.", "aabb.", "aabc."), None, 64)
    (micro,) = micro_batches(batch)
    assert micro.branches[2] == Branch(length=1, context=[(0, 3), (1, 1)])


def test_micro_batches_are_cut_between_families():
    """Both families fit together only in part: cutting one would repeat its prompt."""
    trajectories = written("a" * 40, "bcde", "fghi") + written("k" * 40, "lmno", "pqrs")
    batch = pack(trajectories, None, 90)
    assert [sorted(m.rows.tolist()) for m in micro_batches(batch)] == [[0, 1], [2, 3]]


def test_ranks_get_whole_families_where_that_is_balanced():
    trajectories = [t for i in range(4) for t in written(chr(97 + i) * 40, "bcde", "fghi", "jklm")]
    shards = pack(trajectories, None, 128, dp_size=2).minibatches[0].shards
    assert [sorted(row // 3 for m in shard for row in m.rows) for shard in shards] == [
        [0, 0, 0, 1, 1, 1],
        [2, 2, 2, 3, 3, 3],
    ]


def test_a_family_is_split_when_one_rank_would_have_no_work():
    shards = (
        pack(written("a" * 10, *("bcdefgh"[i:] * 6 for i in range(4))), None, 256, dp_size=2)
        .minibatches[0]
        .shards
    )
    assert [len(m.rows) for shard in shards for m in shard] == [2, 2]


def test_a_family_beyond_the_budget_repeats_its_prompt_in_each_micro_batch():
    batch = pack(written("prompt:", "bcdefg", "hijklm", "nopqrs"), None, 20)
    assert sorted(len(m.rows) for m in micro_batches(batch)) == [1, 2]
    assert all(letters(m.tokens[:7]) == "prompt:" for m in micro_batches(batch))
    assert batch.shared_tokens == 7


def test_without_sharing_every_trajectory_is_a_branch_of_its_own_and_rows_are_padded():
    batch = pack(written("prompt:", "abc", "abcdefg"), None, 64, share_prefixes=False)
    (micro,) = micro_batches(batch)
    rows, sources = micro.padded()
    assert [letters(row) for row in rows] == ["prompt:abcdef", "prompt:ab\0\0\0\0"]
    assert sources.tolist() == [*range(6, 13), 19, 20, 21]
    assert batch.padding_tokens == 4 and batch.shared_tokens == 0


def test_padded_rows_of_a_shared_micro_batch_are_refused_with_the_remedy():
    (micro,) = micro_batches(pack(written("prompt:", "ab", "bc"), None, 64))
    with pytest.raises(ValueError, match=r"share_prefixes=trainer\.shares_prefixes"):
        micro.padded()


def test_ranks_get_about_the_same_number_of_tokens():
    trajectories, advantages = build([(3, [n], 0) for n in range(1, 41)])
    batch = pack(trajectories, advantages, 200, dp_size=2)
    tokens = [sum(m.mask.sum() for m in shard) for shard in batch.minibatches[0].shards]
    assert abs(tokens[0] - tokens[1]) <= 40  # one trajectory


def test_nothing_after_the_last_trained_token_is_read():
    trajectories, advantages = build([(3, [4, 2], 7)])
    (micro,) = micro_batches(pack(trajectories, advantages, 64))
    assert micro.branches[0].length == micro.indices.max() == 3 + 4 + 7 + 2 - 1


def test_rows_of_similar_length_share_a_micro_batch_so_padding_is_small():
    trajectories, advantages = build([(3, [n % 40 + 1], 0) for n in range(80)])
    batch = pack(trajectories, advantages, 256, dp_size=1, share_prefixes=False)
    cells = sum(m.padded()[0].size for m in micro_batches(batch))
    assert 0 < batch.padding_tokens < 0.1 * cells


def test_zero_advantage_trajectories_are_left_out_on_request_but_still_normalise_the_loss():
    trajectories, advantages = build([(3, [4], 0), (3, [5], 0), (3, [6], 0)])
    advantages[1][:] = 0
    batch = pack(trajectories, advantages, 64, dp_size=1, skip_zero_advantage=True)
    assert batch.skipped == 1
    assert sorted(i for m in micro_batches(batch) for i in m.rows) == [0, 2]
    assert batch.minibatches[0].tokens == 15 and batch.minibatches[0].sequences == 3
    assert batch.minibatches[0].draft_shards == [[]]


@pytest.mark.parametrize("dp", [1, 2])
def test_what_is_left_out_for_its_zero_advantage_is_laid_out_for_a_draft_that_learns(dp):
    trajectories, advantages = build([(3, [4], 0), (3, [5], 0), (3, [6], 0), (2, [3], 0)])
    advantages[1][:] = advantages[3][:] = 0
    options = {"skip_zero_advantage": True}
    batch = pack(trajectories, advantages, 64, dp_size=dp, draft_learns=True, **options)
    rows = sorted(
        i for shard in batch.minibatches[0].draft_shards for micro in shard for i in micro.rows if i >= 0
    )
    assert rows == [1, 3] and len({len(shard) for shard in batch.minibatches[0].draft_shards}) == 1
    without = pack(trajectories, advantages, 64, dp_size=dp, **options)
    for mine, other in zip(micro_batches(batch), micro_batches(without), strict=True):
        assert mine.rows.tolist() == other.rows.tolist() and mine.tokens.tolist() == other.tokens.tolist()


def test_a_batch_without_anything_to_train_on_has_one_empty_micro_batch_per_rank():
    trajectories, advantages = build([(3, [4], 0)], masked={0})
    batch = pack(trajectories, advantages, 64, dp_size=2)
    assert batch.tokens == batch.padding_tokens == 0
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
        batch = pack(trajectories, advantages, 64, dp_size=1, minibatches=3, seed=seed)
        return [sorted(i for s in m.shards for micro in s for i in micro.rows) for m in batch.minibatches]

    assert members(1) == members(1) != members(2)
    assert sorted(i for part in members(1) for i in part) == list(range(12))


def test_segments_of_a_trajectory_are_packed_as_sequences_of_their_own():
    """Two conversations of one attempt give what they give apart, under the index of the attempt."""
    parts = written("pp", "ab", "acd")
    whole = Trajectory(trajectory_id="0", group_id="g", instance_id="i")
    for part in parts:
        whole.append_segment(part)
    whole.reward = 1.0
    assert whole.segment_starts == [4] and whole.prompt_length == parts[0].prompt_length

    advantages = [np.arange(4, dtype=np.float32), np.arange(5, dtype=np.float32) + 4]
    split = pack(parts, advantages, 64)
    joined = pack([whole], [np.concatenate(advantages)], 64)
    (of_parts,), (of_whole,) = split.minibatches[0].shards[0], joined.minibatches[0].shards[0]
    for name in ("tokens", "positions", "sources", "targets", "mask", "advantages", "rollout_logprobs"):
        assert np.array_equal(getattr(of_parts, name), getattr(of_whole, name)), name
    assert of_whole.rows.tolist() == [0, 0] and joined.lengths == [9]
    assert sorted(of_whole.indices[of_whole.mask > 0].tolist()) == [2, 3, 6, 7, 8]
    assert joined.shared_tokens == split.shared_tokens == 3
    assert joined.minibatches[0].sequences == 2
