"""What a trajectory records of its tokens."""

from __future__ import annotations

import pytest

from rlpipe.types import FinishReason, GenerateResult, SpecCounts, Trajectory

pytestmark = pytest.mark.unit


def turn(ids, top=None):
    lines = {name: [0.0] * len(ids) for name in ("logprobs", "entropies", "versions")}
    return GenerateResult(
        request_id="r",
        output_ids=ids,
        finish_reason=FinishReason.STOP,
        spec=SpecCounts(),
        top_logprobs=top,
        **lines,
    )


def test_top_logprobs_are_parallel_to_the_tokens_when_every_turn_brings_them():
    trajectory = Trajectory(trajectory_id="t", group_id="g", instance_id="i")
    trajectory.append_context([1, 2])
    trajectory.append_sampled(turn([5], [[(5, -0.1)]]))
    trajectory.append_context([3])
    trajectory.append_sampled(turn([6, 7], [[(6, -0.2)], [(8, -0.3)]]))
    assert trajectory.token_ids == [1, 2, 5, 3, 6, 7]
    assert trajectory.top_logprobs == [[], [], [(5, -0.1)], [], [(6, -0.2)], [(8, -0.3)]]


@pytest.mark.parametrize(("first", "second"), [(None, [[(6, -0.2)]]), ([[(5, -0.1)]], None)])
def test_top_logprobs_of_some_turns_only_are_refused(first, second):
    trajectory = Trajectory(trajectory_id="t", group_id="g", instance_id="i")
    trajectory.append_sampled(turn([5], first))
    with pytest.raises(ValueError, match=r"turn 1 of trajectory 't' came with.* in every turn"):
        trajectory.append_sampled(turn([6], second))
