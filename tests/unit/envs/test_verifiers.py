"""Environments of verifiers 0.4 in process: answers, turns, tools, rewards by name, and what is refused."""

import asyncio
import json

import pytest

from rlpipe.config.env import EnvConfig, EnvName, ToolsConfig, VerifiersConfig
from rlpipe.envs import check_environment, make_suite, seeded
from rlpipe.envs.base import TRAIN
from rlpipe.envs.rehearsal import rehearse

pytestmark = pytest.mark.unit
TASKSETS = '''
import verifiers.v1 as vf


class Numbers(vf.TaskData):
    number: int


class Settings(vf.TasksetConfig):
    size: int = 12


class Sum(vf.Task[Numbers]):
    @vf.reward(weight=0.8)
    async def right(self, task, trace):
        return float(trace.last_reply == str(task.number + 1))

    @vf.reward(weight=0.2)
    async def digits(self, trace):
        return float(trace.last_reply.isdigit())

    @vf.metric
    async def turns(self, trace):
        return trace.num_turns


class Sums(vf.Taskset[Sum, Settings]):
    def load(self):
        for number in range(self.config.size):
            data = Numbers(number=number, prompt=f"{number} + 1 =", system_prompt="Be brief.")
            yield Sum(data, self.config.task)


class Log(vf.State):
    asked: list[int] = []


class Calculator(vf.Toolset[vf.ToolsetConfig, Log]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self.state.asked.append(a)
        return a + b


class Assisted(vf.Task[Numbers, Log]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, task, trace):
        return float(trace.last_reply == str(task.number + 1))

    @vf.metric
    async def asked(self, trace):
        return len(trace.state.asked)


class AssistedSums(vf.Taskset[Assisted, Settings]):
    def load(self):
        for number in range(self.config.size):
            yield Assisted(Numbers(number=number, prompt=f"{number} + 1 ="), self.config.task)


class Secret(vf.Task[Numbers]):
    pass


class Secrets(vf.Taskset[Secret, Settings]):
    def load(self):
        for number in range(1, self.config.size):
            yield Secret(Numbers(number=number, prompt="Guess the number."), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Guess(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != str(task.data.number):
                digits = segment.last_reply.isdigit()
                too_low = digits and int(segment.last_reply) < task.data.number
                segment = await interaction.turn("higher" if too_low else "lower" if digits else "?")
        interaction.trace.record_reward("guessed", float(not segment.terminated))


class Two(vf.EnvConfig):
    one: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()


class Debate(vf.Env[Two]):
    async def run(self, task, agents):
        raise NotImplementedError


class Boxed(Sum):
    NEEDS_CONTAINER = True


class Boxes(vf.Taskset[Boxed, Settings]):
    def load(self):
        return []


class Ran(vf.Task[Numbers]):
    @vf.reward
    async def tests_pass(self, trace, runtime):
        return 1.0


class Runs(vf.Taskset[Ran, Settings]):
    def load(self):
        return []


class Stopped(vf.Task[Numbers]):
    @vf.stop
    async def enough(self, trace: vf.Trace):
        return True


class Stops(vf.Taskset[Stopped, Settings]):
    def load(self):
        return []


class Broken(vf.Task[Numbers]):
    @vf.reward
    async def right(self, trace):
        raise KeyError("no answer column")


class Breaks(vf.Taskset[Broken, Settings]):
    def load(self):
        for number in range(self.config.size):
            yield Broken(Numbers(number=number, prompt="?"), self.config.task)
'''


@pytest.fixture(autouse=True)
def tasksets(tmp_path, monkeypatch):
    (tmp_path / "tasksets_of_a_test.py").write_text(TASKSETS)
    monkeypatch.chdir(tmp_path)


def config(taskset="Sums", env="", *, max_turns=6, schema="template", **settings):
    name = taskset if taskset in ("textarena", "no-such-taskset", "") else f"tasksets_of_a_test:{taskset}"
    env = f"tasksets_of_a_test:{env}" if env else ""
    return EnvConfig(
        name=EnvName.VERIFIERS,
        verifiers=VerifiersConfig(taskset=name, env=env, config=settings),
        tools=ToolsConfig(schema=schema),
        max_turns=max_turns,
        held_out_size=4,
        train_size=20,
    )


def play(suite, instance, *actions):
    """The opening and the steps of an episode, finished when no action is left."""

    async def run():
        episode = suite.episode(instance)
        opening, steps = await episode.messages(), []
        try:
            for action in actions:
                steps.append(await episode.step(action))
            if not steps or not steps[-1].done:
                steps.append(await episode.finish())
        finally:
            await episode.close()
        return opening, steps

    return asyncio.run(run())


def _numbered(suite, number):
    """The id of the task with a number: the taskset starts at 1."""
    return f"task:{number - 1}"


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_an_answer_is_scored_by_the_tasks_weighted_rewards_and_each_is_named_in_the_info():
    suite = make_suite(config())
    opening, (right,) = play(suite, "task:3", "4")
    assert opening == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "3 + 1 ="},
    ]
    assert right.done and right.reward == 1.0
    assert right.info == {"right": 1.0, "digits": 1.0, "turns": 1.0, "submitted": True}
    _, (wrong,) = play(suite, "task:3", "5")
    assert wrong.reward == pytest.approx(0.2) and wrong.info["right"] == 0.0
    _, (none,) = play(suite, "task:3")
    assert none.reward == 0.0 and none.info["turns"] == 0.0 and none.info["submitted"] is False


def test_an_environment_of_several_turns_says_what_is_next_and_ends_at_a_limit_with_its_rewards():
    suite = make_suite(config("Secrets", "Guess"))
    _, steps = play(suite, _numbered(suite, 7), "3", "9", "7")
    assert [step.observation for step in steps[:2]] == [
        [{"role": "user", "content": text}] for text in ("higher", "lower")
    ]
    assert steps[-1].done and steps[-1].reward == 1.0 and steps[-1].info["guessed"] == 1.0
    _, steps = play(suite, _numbered(suite, 7), "3", "4")
    assert steps[-1].done and steps[-1].reward == 0.0 and steps[-1].info["guessed"] == 0.0


def test_tools_are_served_in_process_with_the_state_of_the_episode_and_their_errors_go_to_the_model():
    suite = make_suite(config("AssistedSums"))
    (schema,) = suite.tools
    assert schema["function"]["name"] == "calculator_add" and "Add two numbers" in str(schema)
    _, steps = play(
        suite,
        "task:2",
        call("calculator_add", a=2, b=1),
        call("calculator_add", a="x", b=1),
        call("gone"),
        "<tool_call>{",
        "3",
    )
    told = [step.observation[0] for step in steps[:-1]]
    assert all(message["role"] == "tool" for message in told) and told[0]["content"] == "3"
    assert all("error" in message["content"].lower() for message in told[1:])
    assert steps[-1].reward == 1.0 and steps[-1].info["asked"] == 1.0
    assert play(suite, "task:2", "3")[1][-1].info["asked"] == 0.0


def test_tools_stand_in_the_system_prompt_where_the_template_has_none():
    suite = make_suite(config("AssistedSums", schema="system"))
    opening, _ = play(suite, "task:2", "3")
    assert suite.tools is None and "calculator_add" in opening[0]["content"]
    assert [message["role"] for message in opening] == ["system", "user"]


def test_held_out_tasks_are_a_fixed_sample_that_is_never_trained_on():
    one, other = make_suite(config(size=30), 1), make_suite(config(size=30), 2)
    assert one.instance_ids("held_out") == other.instance_ids("held_out") != [f"task:{i}" for i in range(4)]
    assert not set(one.instance_ids("held_out")) & set(one.instance_ids(TRAIN))
    assert len(one.instance_ids(TRAIN)) == 20


@pytest.mark.parametrize("names", [("Sums", ""), ("AssistedSums", ""), ("Secrets", "Guess")], ids=str)
def test_environments_pass_the_check_and_a_rehearsal_with_random_answers(names):
    settings = config(*names)
    check_environment(settings)
    assert rehearse(make_suite(settings), "a test", episodes=2).steps > 0


@pytest.mark.parametrize(
    "settings, named",
    [
        (config("no-such-taskset"), "'no-such-taskset' not found"),
        (config(""), "name a taskset"),
        (config("Gone"), "has no 'Gone'"),
        (config(sizes=3), "for Settings sizes"),
        (config(size=4), "has 4 tasks, of which env.held_out_size=4 are held out"),
        (config("Boxes"), "need a container: harnesses, runtimes and containers are not part"),
        (config("Runs"), "tests_pass takes a runtime: harnesses"),
        (config("Stops"), "enough is a @stop"),
        (config("Breaks"), r"tasksets_of_a_test\.py:\d+: .*no answer column"),
        (config("Sums", "Debate"), "has the agents one, other: only one can be the model"),
    ],
    ids=["id", "none", "class", "config", "too few", "container", "runtime", "stop", "raises", "two agents"],
)
def test_a_mistake_and_what_needs_a_harness_is_told_at_launch(settings, named):
    with pytest.raises(ValueError, match=named):
        check_environment(settings)


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(seeded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install verifiers, in a checkout .*\.\[verifiers\]"):
        check_environment(config())
