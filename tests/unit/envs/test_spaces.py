"""Spaces as text: what is asked for can be answered, and an answer that names no action is refused."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlpipe.envs.spaces import check_space, describe, to_action, to_text

pytestmark = pytest.mark.unit
NAMES = ["left", "right"]
SPACES = [
    spaces.Discrete(5),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 1], [1, 1]]),
    spaces.MultiBinary(3),
    spaces.Box(-1, 1, (2, 2), dtype=np.float64),
    spaces.Box(0, 255, (3,), dtype=np.uint8),
    spaces.Text(max_length=8),
    spaces.Dict({"move": spaces.Discrete(4), "speed": spaces.Box(0, 1, (2,))}),
    spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(2))),
    spaces.Dict({"arms": spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (2,)))), "say": spaces.Text(4)}),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_the_text_of_any_action_is_read_back_as_that_action(space):
    space.seed(0)
    for _ in range(20):
        action = space.sample()
        again = to_action(space, to_text(space, action))
        for one, other in zip(_leaves(action), _leaves(again), strict=True):
            assert one == other if isinstance(one, str) else np.allclose(one, other, rtol=1e-3, atol=1e-3)
        assert again in space and describe(space)


def _leaves(value):
    if isinstance(value, dict):
        value = tuple(value.values())
    return [leaf for part in value for leaf in _leaves(part)] if isinstance(value, tuple) else [value]


@pytest.mark.parametrize(
    "text, action", [("right", 1), ("I go Right.", 1), ("left!", 0), ("(left)", 0), ("right, right", 1)]
)
def test_a_named_action_is_found_inside_a_sentence(text, action):
    assert to_action(spaces.Discrete(2), text, NAMES) == action


@pytest.mark.parametrize(
    "space, text",
    [
        (spaces.Discrete(2), "0 or 1"),
        (spaces.Discrete(2), "2"),
        (spaces.Discrete(2), "1.5"),
        (spaces.Discrete(2), "-1"),
        (spaces.Discrete(2), "10"),
        (spaces.Discrete(2), ""),
        (spaces.MultiDiscrete([3, 3]), "1"),
        (spaces.MultiDiscrete([3, 3]), "1 3"),
        (spaces.MultiDiscrete([3, 3]), "1 1.5"),
        (spaces.Box(0, 255, (1,), dtype=np.uint8), "300"),
        (spaces.Box(0, 1, (1,)), "1.01"),
        (spaces.Box(0, 1, (1,)), "1e999"),
        (spaces.Text(3), "four"),
        (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(2)}), "1"),
    ],
    ids=str,
)
def test_a_text_that_names_no_action_is_answered_by_what_to_write(space, text):
    with pytest.raises(ValueError, match="Answer "):
        to_action(space, text)


def test_names_that_are_parts_of_other_words_are_no_actions():
    for text in ("upright", "lefts", "left or right"):
        with pytest.raises(ValueError, match="one of left, right"):
            to_action(spaces.Discrete(2), text, NAMES)


def test_what_an_answer_must_be_is_described_with_its_limits():
    assert describe(spaces.Discrete(3, start=2)) == "a number from 2 to 4"
    assert describe(spaces.Box(-1, 2, (1,))) == "a number from -1 to 2"
    assert describe(spaces.MultiDiscrete([2, 3])) == "2 numbers (0 to 1, 0 to 2)"
    assert describe(spaces.Dict({"a": spaces.Discrete(2)})) == "a: a number from 0 to 1"


@pytest.mark.parametrize(
    "space, named",
    [
        (spaces.Box(0, 255, (96, 96, 3), dtype=np.uint8), "27648 numbers"),
        (spaces.Dict({"image": spaces.Box(0, 1, (9, 9))}), "81 numbers"),
        (spaces.Graph(spaces.Discrete(2), None), "no text"),
    ],
    ids=["image", "inside a Dict", "graph"],
)
def test_a_space_that_no_model_can_read_is_refused(space: gymnasium.Space, named):
    with pytest.raises(ValueError, match=named):
        check_space(space, "observation")
