"""Slow environments: which episodes wait, and that they change nothing else."""

from __future__ import annotations

import time

import pytest

from rlpipe.config.injection import InjectionConfig
from rlpipe.envs.base import StepResult, suite_tools
from rlpipe.envs.slow import SlowSuite

pytestmark = pytest.mark.unit


class InstantSuite:
    max_turns = 3

    def episode(self, instance_id):
        return self

    def step(self, action):
        return StepResult(observation=action)


def slow_ones(share, seed=0):
    config = InjectionConfig(slow_env_share=share, slow_env_seconds=0.002)
    suite = SlowSuite(InstantSuite(), config, seed)
    episodes = [suite.episode(f"i{n % 10}") for n in range(100)]
    return episodes, [not isinstance(episode, InstantSuite) for episode in episodes]


def test_the_asked_share_of_episodes_is_slow_and_a_repetition_draws_the_same():
    _, slow = slow_ones(0.3)
    assert 15 < sum(slow) < 45  # 30, standard deviation 4.6
    assert slow == slow_ones(0.3)[1] != slow_ones(0.3, seed=1)[1]
    assert any(slow[n] != slow[n + 10] for n in range(90))  # attempts at one instance differ


def test_a_slow_episode_waits_and_then_answers_as_the_suite_does():
    (episode, *_), (slow, *_) = slow_ones(0.999999)
    started = time.monotonic()
    assert slow and episode.step("x").observation == "x"
    assert time.monotonic() - started >= 0.002


def test_the_tools_of_a_suite_are_shown_in_disturbed_training_too():
    suite = InstantSuite()
    suite.tools = [{"type": "function", "function": {"name": "search"}}]
    slow = SlowSuite(suite, InjectionConfig(slow_env_share=0.5, slow_env_seconds=0.002), 0)
    assert suite_tools(slow) == suite.tools and slow.max_turns == 3
