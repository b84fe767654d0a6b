"""What episodes may return, and the short form of an environment: a class with messages and step."""

from __future__ import annotations

import sys
import textwrap

import numpy
import pytest

from rlpipe.config.env import EnvConfig
from rlpipe.envs import make_suite
from rlpipe.envs.base import TRAIN, StepResult, start_episode
from rlpipe.envs.contract import messages_of, observation_text, step_of
from rlpipe.envs.rehearsal import rehearse

pytestmark = pytest.mark.unit

SHORT = """
import asyncio
import signal
import threading

from rlpipe.envs.base import StepResult

class Guess:
    def __init__(self, seed, attempt, options):
        self.wanted, self.attempt, self.options = seed % 10, attempt, options

    def messages(self):
        return [{"role": "user", "content": "Guess a digit."}]

    def step(self, action):
        return float(action == str(self.wanted))

class NoArguments(Guess):
    max_turns = 3
    tools = [{"type": "function", "function": {"name": "look"}}]
    def __init__(self): pass
    def step(self, action): return "again"

class Async(NoArguments):
    async def messages(self):
        self.loop = asyncio.get_running_loop()
        return [{"role": "user", "content": "Guess a digit."}]

    async def step(self, action):
        assert asyncio.get_running_loop() is self.loop
        await asyncio.sleep(0)
        return StepResult(observation=[{"role": "tool", "content": "colder"}], reward=0.25)

    async def close(self): await asyncio.sleep(0)

class AsyncNan(Async):
    async def step(self, action):
        await asyncio.sleep(0)
        return float("nan")

class AsyncRaises(Async):
    async def step(self, action):
        return {}["key"]

class Alarm(NoArguments):
    def step(self, action):
        signal.signal(signal.SIGALRM, print)

class Loud(NoArguments):
    def messages(self): return [{"role": "human", "content": "Guess."}]

class Judged(NoArguments):
    @staticmethod
    def score_group(instance_id, results): return [result.reward for result in results[1:]]

class Answered(NoArguments):
    def messages(self): return [{"role": "assistant", "content": "7"}]

class Speaks(NoArguments):
    def step(self, action): return StepResult(observation=[{"role": "assistant", "content": "7"}])

async def make(config, seed): return 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder a run is started in."""
    (tmp_path / "short_form.py").write_text(textwrap.dedent(SHORT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield tmp_path
    sys.modules.pop("short_form", None)


def suite_of(name, seed=0, **settings):
    return make_suite(EnvConfig(suite=f"short_form:{name}", **settings), seed=seed)


def line(text):
    """Number of a line of the module."""
    return 1 + SHORT.split("\n").index(next(one for one in SHORT.split("\n") if text in one))


def test_a_class_with_messages_and_step_becomes_a_suite_of_seeds(folder):
    suite = suite_of("Guess", seed=2, train_size=5, held_out_size=3, max_turns=4, options={"a": 1})
    assert (suite.splits(), suite.max_turns) == (["held_out"], 4)
    assert suite.instance_ids("held_out") == ["seed:0", "seed:1", "seed:2"]
    assert suite.instance_ids(TRAIN) == [f"seed:{3_000_000 + n}" for n in range(5)]
    one = start_episode(suite, "seed:3000004", seed=99, attempt=6)
    assert (one.wanted, one.attempt, one.options) == (4, 6, {"a": 1})
    assert rehearse(suite, "short_form:Guess", episodes=4).steps == 4 + 3


def test_a_class_may_name_no_argument_and_have_turns_and_tools_of_its_own(folder):
    suite = suite_of("NoArguments")
    assert suite.max_turns == 3 and suite.tools[0]["function"]["name"] == "look"
    assert rehearse(suite, "short_form:NoArguments", episodes=1).steps == 2 * 3


def test_async_methods_are_awaited_in_one_loop(folder):
    assert rehearse(suite_of("Async"), "short_form:Async", episodes=2).steps == 4 * 3


@pytest.mark.parametrize(
    ("name", "place", "says"),
    [
        ("AsyncNan", 'return float("nan")', "reward=nan"),
        ("AsyncRaises", 'return {}["key"]', "KeyError: 'key'"),
        ("Alarm", "signal.signal(signal.SIGALRM", "only works in main thread"),
        (
            "Judged",
            "def score_group(",
            r"score_group\(\) returned \[0.0\] \(list\) for 2 results: return a list",
        ),
        ("Loud", '"role": "human"', r"messages\(\)\[0\] has the role 'human': use one of system, user"),
        (
            "Answered",
            'def messages(self): return [{"role": "assistant"',
            "the model writes the next assistant",
        ),
        (
            "Speaks",
            'observation=[{"role": "assistant"',
            r"observation\[0\] has the role 'assistant': use one of user",
        ),
    ],
)
def test_a_mistake_is_named_with_file_line_and_value(folder, name, place, says):
    with pytest.raises(ValueError, match=rf"short_form\.py:{line(place)}: .*{says}"):
        rehearse(suite_of(name), name, episodes=1)


def test_a_maker_that_is_async_is_refused(folder):
    with pytest.raises(ValueError, match="only the methods of an episode may be: write `def`"):
        suite_of("make")


def test_sizes_of_a_class_are_checked_as_others_are():
    with pytest.raises(ValueError, match="held_out_size=0"):
        EnvConfig(held_out_size=0)
    with pytest.raises(ValueError, match="so that their seeds stay apart"):
        EnvConfig(train_size=2_000_000)


def test_a_suite_gets_seed_and_attempt_if_it_names_them():
    class Suite:
        def episode(self, instance_id, seed):
            return instance_id, seed

    class Old:
        def episode(self, instance_id):
            return instance_id

    assert start_episode(Suite(), "a", seed=3, attempt=1) == ("a", 3)
    assert start_episode(Old(), "a", seed=3, attempt=1) == "a"


@pytest.mark.parametrize("number", [1, 0.5, True, numpy.float32(0.5), numpy.int64(2)])
def test_a_number_is_the_reward_of_a_last_step(number):
    assert step_of(number) == StepResult(done=True, reward=float(number))


def test_a_text_is_an_observation_and_messages_keep_their_roles():
    assert step_of("seen") == StepResult(observation="seen")
    messages = [{"role": "tool", "content": "a", "name": "look"}, {"role": "system", "content": "b"}]
    result = step_of(StepResult(observation=messages, reward=0.5))
    assert result.observation == messages and (result.done, result.reward) == (False, 0.5)
    assert observation_text(result.observation) == "a\n\nb"
    with pytest.raises(ValueError, match=r"finish\(\) returned 'seen' \(str\): return a reward"):
        step_of("seen", last=True)


def test_a_truncated_step_ends_the_episode_and_needs_a_reward():
    assert step_of(StepResult(truncated=True, reward=1.0)).done
    with pytest.raises(ValueError, match="reward=None"):
        step_of(StepResult(truncated=True))
    with pytest.raises(ValueError, match="truncated='no'"):
        step_of(StepResult(truncated="no", done=True, reward=1.0))


def test_a_reward_of_a_step_must_be_finite_before_the_end_too():
    with pytest.raises(ValueError, match="reward=nan"):
        step_of(StepResult(reward=float("nan")))


def test_opening_messages_may_hold_earlier_turns():
    roles = ["system", "user", "assistant", "user"]
    assert [m["role"] for m in messages_of([{"role": r, "content": "x"} for r in roles])] == roles


class Words:
    """A chat template in which a word is a token."""

    max_context = 4

    def opening(self, messages):
        return len(messages[-1]["content"].split())

    def observation(self, observation):
        if observation == "again":
            raise ValueError("no such role")


class Sized:
    """Two words in training, as many as `held` has in the held-out set."""

    max_turns = 1

    def __init__(self, held):
        self.held = held

    def splits(self):
        return ["held_out"]

    def instance_ids(self, split):
        return ["one two"] if split == TRAIN else self.held

    def episode(self, instance_id):
        return Question(instance_id)


class Question:
    def __init__(self, text):
        self.text = text

    def messages(self):
        return [{"role": "user", "content": self.text}]

    def step(self, action):
        return 1.0


def test_prompts_that_leave_no_token_are_refused_and_some_are_noted(folder):
    with pytest.raises(ValueError, match=r"1 of the 1 prompts tried of split 'held_out'.*max_context=4"):
        rehearse(Sized(["a b c d"]), "x:y", episodes=2, prompts=Words())
    [note] = rehearse(Sized(["a b c d", "a"]), "x:y", episodes=2, prompts=Words()).notes
    assert "1 of the 2 prompts" in note and "the longest has 4" in note
    assert rehearse(Sized(["a"]), "x:y", episodes=2, prompts=Words()).notes == []
    place = line('return "again"')
    with pytest.raises(ValueError, match=rf"short_form\.py:{place}: no such role"):
        rehearse(suite_of("NoArguments"), "x:y", episodes=1, prompts=Words())


def test_a_long_info_is_refused_in_a_rehearsal_and_cut_in_a_run():
    result = StepResult(done=True, reward=1.0, info={"n": 3, "log": "x" * 5_000_000, "short": [1, 2]})
    with pytest.raises(ValueError, match=r"'log' has 5000000 characters: .* at most 64000 in all"):
        step_of(result, rehearsed=True)
    info = step_of(result).info
    assert info == {"n": 3, "log": "x" * 120 + "... (5000000 characters, cut)", "short": [1, 2]}


def test_a_reward_that_hides_all_others_is_noted_once():
    class Drowned(Question):
        def step(self, action):
            return -1e30

    suite = Sized(["a", "b"])
    suite.episode = Drowned
    [note] = rehearse(suite, "x:y", episodes=2).notes
    assert "reward=-1e+30" in note and "0 to 1 is usual" in note
