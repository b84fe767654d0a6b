"""Demonstrators of tool calls: who is careful is right, who guesses seldom."""

import random

import pytest

from recipes.agent_rl.demonstrators import Demonstrator, demonstrate
from rlpipe.config.env import EnvConfig, ToolName, ToolsConfig
from rlpipe.envs import make_suite
from rlpipe.envs.tools.generate import TRAIN_FAMILIES, make_instance

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("who", [Demonstrator.CAREFUL, Demonstrator.RETRY])
@pytest.mark.parametrize("family", TRAIN_FAMILIES)
def test_a_careful_demonstrator_earns_the_reward_and_sees_what_the_environment_shows(who, family):
    messages = demonstrate(random.Random(1), make_instance(f"{family}:7"), who)
    said = [m["content"] for m in messages if m["role"] == "assistant"]
    names = [ToolName.SEARCH, ToolName.READ, ToolName.CALCULATE]
    suite = make_suite(EnvConfig(name="tools", tools=ToolsConfig(names=names)))
    episode = suite.episode(f"{family}:7")
    steps = [episode.step(turn) for turn in said]
    assert [s.observation for s in steps[:-1]] == [m["content"] for m in messages if m["role"] == "tool"]
    assert steps[-1].done and steps[-1].reward == 1.0
    assert steps[-1].info["format_errors"] == (who is Demonstrator.RETRY)
    assert not any(s.done for s in steps[:-1])


def test_who_guesses_is_seldom_right():
    instances = [make_instance(f"{family}:{i}") for family in TRAIN_FAMILIES for i in range(100)]
    rng = random.Random(0)
    for who, most in (
        (Demonstrator.AT_ONCE, 0.05),
        (Demonstrator.IN_THE_HEAD, 0.3),
        (Demonstrator.HASTY, 0.6),
    ):
        right = [demonstrate(rng, one, who)[-1]["content"] == one.answer for one in instances]
        assert sum(right) / len(right) < most
