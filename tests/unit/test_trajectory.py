"""What a trajectory records of its tokens."""

from __future__ import annotations

import numpy as np
import pytest

from rlpipe.rollout.turn import joined, next_route
from rlpipe.types import FinishReason, GenerateResult, SpecCounts, Trajectory, merged_routes

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
    assert trajectory.token_ids.tolist() == [1, 2, 5, 3, 6, 7]
    assert trajectory.top_logprobs == [[], [], [(5, -0.1)], [], [(6, -0.2)], [(8, -0.3)]]


@pytest.mark.parametrize(("first", "second"), [(None, [[(6, -0.2)]]), ([[(5, -0.1)]], None)])
def test_top_logprobs_of_some_turns_only_are_refused(first, second):
    trajectory = Trajectory(trajectory_id="t", group_id="g", instance_id="i")
    trajectory.append_sampled(turn([5], first))
    with pytest.raises(ValueError, match=r"turn 1 of trajectory 't' came with.* in every turn"):
        trajectory.append_sampled(turn([6], second))


def routes(*numbers):
    """Routes of one layer and one expert per token; None: without a record."""
    return np.array([255 if n is None else n for n in numbers], np.uint8).reshape(-1, 1, 1)


def test_a_token_keeps_the_experts_of_the_pass_that_sampled_what_follows_it():
    trajectory = Trajectory(trajectory_id="t", group_id="g", instance_id="i")
    trajectory.append_context([1, 2])
    first, second = turn([5]), turn([6, 7])
    first.routes = routes(0, 1, None)
    trajectory.append_sampled(first)
    trajectory.append_context([3])
    second.routes = routes(7, 7, 2, 3, 4, None)  # the beginning was read again, with newer weights
    trajectory.append_sampled(second)
    assert np.array_equal(trajectory.routes, routes(0, 1, 2, 3, 4, None))


def test_a_turn_brings_the_experts_of_its_new_tokens_alone():
    early = routes(0, 1, None)
    assert np.array_equal(merged_routes(early, routes(2, 3, None), start=2), routes(0, 1, 2, 3, None))
    assert np.array_equal(merged_routes(early, routes(7, 2, None), start=1), routes(0, 1, 2, None))
    with pytest.raises(ValueError, match=r"from token 3 on do not join .* the first 2: .*routes_from=2"):
        merged_routes(early, routes(3, None), start=3)
    with pytest.raises(ValueError, match="from token 1 on do not join those of the first 0"):
        merged_routes(None, routes(3, None), start=1)


def test_parts_of_a_turn_join_their_experts_wherever_the_turn_starts_to_return_them():
    first, second = turn([5]), turn([6, 7])
    first.routes, first.routes_from = routes(2, None), 2  # tokens 0 and 1 are with the caller
    assert next_route(routes(0, 1, None), first) == 3 and next_route(None) == 0
    second.routes, second.routes_from = routes(3, 4, None), 3
    whole = joined(first, second)
    assert np.array_equal(whole.routes, routes(2, 3, 4, None)) and whole.routes_from == 2
    nothing, later = turn([]), turn([6])
    later.routes, later.routes_from = routes(3, None), 3
    assert joined(nothing, later).routes_from == 3 and joined(later, nothing).routes is later.routes


def test_a_turn_without_a_record_leaves_the_one_there_is():
    early = routes(0, 1, None)
    assert merged_routes(early, None) is early and merged_routes(None, early) is early
    assert merged_routes(early, routes(4)) is early  # of a text that is not longer
