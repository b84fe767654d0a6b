"""Several environments in one run: shares, names, limits, metrics, and what is refused."""

import asyncio
import json
from collections import Counter

import pytest

from rlpipe.config.env import EnvConfig, EnvName
from rlpipe.config.mix import members_of
from rlpipe.config.run import Config
from rlpipe.envs import check_environment, make_suite
from rlpipe.envs.base import GroupMember, SplitTable, StepResult
from rlpipe.envs.contract import step_of
from rlpipe.envs.mixture import MixtureSuite
from rlpipe.loop.prompts import MixedPrompts, PromptStream
from rlpipe.metrics.collect import member_metrics
from rlpipe.metrics.names import declared
from rlpipe.types import Group, Prompt, Trajectory, TrajectoryStatus

pytestmark = pytest.mark.unit
SUMS = {"share": 0.75, "name": "reasoning", "reasoning": {"tasks": ["chain_sum"], "train_size": 9}}
GCD = {"share": 0.25, "name": "reasoning", "reasoning": {"tasks": ["gcd"], "held_out_size": 3}}


def test_prompts_come_by_their_shares_at_every_moment_and_each_set_in_epochs_of_its_own():
    sets = [(0.6, ["a1", "a2", "a3"]), (0.3, ["b1", "b2"]), (0.1, ["c1"])]
    stream = MixedPrompts([(share, [ids]) for share, ids in sets], seed=3)
    names = [stream[n].instance_id for n in range(200)]
    for n in range(1, 201):
        counts = Counter(name[0] for name in names[:n])
        assert all(abs(counts[ids[0][0]] - share * n) <= 1 for share, ids in sets), (n, counts)
    of_a = [name for name in names if name[0] == "a"]
    assert all(sorted(of_a[n : n + 3]) == ["a1", "a2", "a3"] for n in range(0, len(of_a) - 2, 3))


def test_a_resumed_mixture_continues_the_same_sequence_and_another_seed_has_another():
    sets = [(0.5, [[f"{name}{n}" for n in range(20)]]) for name in "ab"]
    whole = [MixedPrompts(sets, seed=1)[n] for n in range(100)]
    resumed, other = MixedPrompts(sets, seed=1), MixedPrompts(sets, seed=2)
    assert [resumed[n] for n in range(60, 100)] == whole[60:]
    assert [other[n].instance_id for n in range(100)] != [prompt.instance_id for prompt in whole]


def test_a_member_goes_through_its_curriculum_in_order():
    staged = SUMS | {"reasoning": SUMS["reasoning"] | {"levels": [2, 0]}}
    sets = make_suite(EnvConfig(mix={"sums": staged, "gcd": GCD})).train_sets()
    stream = MixedPrompts(sets, seed=1)
    names = [name for name in map(stream.instance, range(20)) if name.startswith("sums/")]
    assert "@2" in names[0] and "@0" in names[-1] and names == sorted(names, key=lambda name: "@0" in name)


def test_a_prompt_of_a_mixture_has_the_seed_and_the_group_of_any_other():
    one, mixed = PromptStream(["a"], seed=1), MixedPrompts([(0.5, [["a"]]), (0.5, [["a"]])], seed=1)
    assert [one[n] for n in range(4)] == [mixed[n] for n in range(4)]


def test_members_keep_their_own_data_held_out_sets_and_rewards():
    config = EnvConfig(mix={"sums": SUMS, "gcd": GCD}, threads=7)
    assert config.name is EnvName.MIX
    check_environment(config)
    suite = make_suite(config, seed=0)
    assert list(suite.splits()) == ["sums.held_out", "gcd.held_out"]
    assert len(suite.instance_ids("gcd.held_out")) == 3
    (first, [sums]), (second, [gcd]) = suite.train_sets()
    assert (first, second, len(sums)) == (0.75, 0.25, 9)
    assert [*sums, *gcd] == suite.instance_ids("train")

    instance = suite.instance_ids("gcd.held_out")[0]
    own = make_suite(members_of(config)["gcd"][1], seed=0).episode(instance.removeprefix("gcd/"))
    assert suite.episode(instance).messages() == own.messages()
    assert members_of(config)["gcd"][1].threads == 7


class Counting(SplitTable):
    """Ends after `ends` actions; `finish` gives half a point."""

    def __init__(self, max_turns, *, ends=99, awaited=False, tools=None):
        super().__init__({"train": ["i"], "held_out": ["j"]})
        self.max_turns, self.ends, self.awaited, self.tools = max_turns, ends, awaited, tools
        self.closed, self.arguments = 0, []

    def episode(self, instance_id, seed):
        self.arguments.append((instance_id, seed))
        return CountingEpisode(self)


class CountingEpisode:
    def __init__(self, suite):
        self.suite, self.turn = suite, 0

    def messages(self):
        return [{"role": "user", "content": "count"}]

    def step(self, action):
        self.turn += 1
        result = 1.0 if self.turn == self.suite.ends else StepResult(observation="on", reward=0.25)
        return self._later(result) if self.suite.awaited else result

    def finish(self):
        return self._later(0.5) if self.suite.awaited else 0.5

    def close(self):
        self.suite.closed += 1

    async def _later(self, result):
        await asyncio.sleep(0)
        return result


def result_of(returned):
    async def waited():
        return await returned

    return asyncio.run(waited()) if hasattr(returned, "__await__") else returned


@pytest.mark.parametrize("awaited", [False, True])
def test_a_member_with_fewer_turns_ends_by_its_own_limit_with_what_finish_adds(awaited):
    short, long = Counting(2, awaited=awaited), Counting(5)
    suite = MixtureSuite({"short": (0.5, short), "long": (0.5, long)})
    assert suite.max_turns == 5
    episode = suite.episode("short/i", seed=4)
    assert result_of(episode.step("one")).reward == 0.25
    last = result_of(episode.step("two"))
    assert (last.done, last.truncated, last.reward) == (True, True, 0.75)
    episode.close()
    assert short.closed == 1 and short.arguments == [("i", 4)]
    assert [result_of(suite.episode("long/i").step("x")).done for _ in range(3)] == [False] * 3


def test_a_member_that_ends_in_its_last_turn_is_not_cut():
    suite = MixtureSuite({"short": (0.5, Counting(1, ends=1)), "long": (0.5, Counting(2))})
    assert result_of(suite.episode("short/i").step("x")).reward == 1.0
    assert not result_of(suite.episode("short/i").step("x")).truncated


def test_members_with_different_tools_are_refused_and_the_same_tools_are_shown():
    tools = [{"type": "function", "function": {"name": "look"}}]
    with pytest.raises(ValueError, match=r"show the tools of with_tools with every prompt.*schema=system"):
        MixtureSuite({"with_tools": (0.5, Counting(1, tools=tools)), "none": (0.5, Counting(1))})
    same = MixtureSuite({"a": (0.5, Counting(1, tools=tools)), "b": (0.5, Counting(1, tools=tools))})
    assert same.tools == tools


def test_two_suites_of_the_user_train_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(
            "class Guess:\n"
            "    def messages(self):\n"
            f"        return [{{'role': 'user', 'content': '{name}'}}]\n"
            "    def step(self, action):\n"
            "        return 1.0\n"
        )
    member = {"share": 0.5, "train_size": 4, "held_out_size": 2}
    config = EnvConfig(mix={n: member | {"suite": f"{n}.py:Guess"} for n in ("one", "two")})
    suite = make_suite(config, seed=0)
    asked = {i.partition("/")[0]: suite.episode(i).messages() for i in suite.instance_ids("train")}
    assert {name: messages[0]["content"] for name, messages in asked.items()} == {"one": "one", "two": "two"}


def test_two_data_files_train_together_each_with_its_reward(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(
        "def one(completion):\n    return 1.0\n"
        "def two(completions, **columns):\n    return [2.0] * len(completions)\n"
    )
    for name in ("one", "two"):
        rows = [{"prompt": f"{name} {n}", "answer": str(n)} for n in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    member = {"share": 0.5, "name": "function"}
    mix = {n: member | {"data": {"train": f"{n}.jsonl"}, "reward": f"rewards.py:{n}"} for n in ("one", "two")}
    mixed = Config(env=EnvConfig(mix=mix)).env
    check_environment(mixed)
    suite = make_suite(mixed, seed=0)
    for name, reward in {"one": 1.0, "two": 2.0}.items():
        instance = next(i for i in suite.instance_ids("train") if i.startswith(f"{name}/"))
        episode = suite.episode(instance)
        assert episode.messages()[-1]["content"].startswith(name)
        alone = step_of(result_of(episode.step("an answer")))
        # What scores several answers gets all attempts at once.
        member = GroupMember(text="an answer", turns=["an answer"], reward=alone.reward, info={})
        assert suite.score_group(instance, [member, member]) == [reward, reward]


def test_siblings_are_compared_by_the_reward_of_their_member():
    class Plain(SplitTable):
        max_turns = 1

        def __init__(self):
            super().__init__({"train": ["1"], "held_out": ["2"]})

    class Compared(Plain):
        def score_group(self, instance_id, results):
            return [float(result.reward == max(r.reward for r in results)) for result in results]

    results = [GroupMember(text="", turns=[], reward=reward, info={}) for reward in (2.0, 3.0)]
    suite = MixtureSuite({"plain": (0.5, Plain()), "compared": (0.5, Compared())})
    assert suite.score_group("plain/1", results) == [2.0, 3.0]
    assert suite.score_group("compared/1", results) == [0.0, 1.0]
    assert not hasattr(MixtureSuite({"plain": (1.0, Plain())}), "score_group")


@pytest.mark.parametrize(
    ("mix", "says"),
    [
        ({"a": SUMS, "b": GCD | {"share": 0.5}}, "shares a 0.75, b 0.5, in all 1.25: make them add up to 1"),
        ({"a": SUMS | {"share": 1}}, "one member, 'a'"),
        ({"a": SUMS | {"share": "half"}}, "env.mix.a.share='half': give the member's share"),
        ({"a": SUMS | {"share": 0}}, "env.mix.a.share=0"),
        ({"a": SUMS | {"share": True}}, "env.mix.a.share=True"),
        ({"a": {"name": "reasoning"}}, "env.mix.a.share=None"),
        ({"a": {"share": 0.5}}, "env.mix.a has neither name nor suite"),
        ({"a": 0.5}, "env.mix.a=0.5: give settings"),
        ({"a/b": SUMS}, "env.mix.a/b: name a member by letters"),
        ({"a": SUMS | {"threads": 3}}, "env.mix.a.threads: it is one for the run, set env.threads"),
        ({"a": SUMS | {"name": "reasonin"}}, "reasonin"),
        ({"a": SUMS | {"max_turn": 3}}, "env.mix.a has no setting 'max_turn'. Did you mean max_turns?"),
        (
            {"a": SUMS | {"reasoning": {"task": ["gcd"]}}},
            "env.mix.a.reasoning has no setting 'task'. Did you",
        ),
        ({"a": SUMS | {"reasoning": {"tasks": "gcd"}}}, "env.mix.a.reasoning.tasks='gcd': give a list"),
        ({"a": SUMS | {"max_turns": "many"}}, "env.mix.a.max_turns='many': give a int"),
        ({"a": SUMS | {"reasoning": 3}}, "env.mix.a.reasoning=3: give a section"),
    ],
)
def test_a_wrong_mixture_is_refused_with_member_value_and_hint(mix, says):
    with pytest.raises(ValueError) as refused:
        EnvConfig(mix=mix)
    assert says in str(refused.value)


def test_an_unknown_task_names_its_member():
    wrong = GCD | {"reasoning": {"tasks": ["chain_summ"]}}
    with pytest.raises(ValueError, match=r"env.mix.b: env.reasoning.tasks: reasoning-gym has no data set"):
        check_environment(EnvConfig(mix={"a": SUMS, "b": wrong}))


def group(instance, rewards, length):
    prompt = Prompt(instance_id=instance, group_id=instance)
    trajectories = []
    for reward in rewards:
        t = Trajectory(trajectory_id="t", group_id=instance, instance_id=instance)
        t.reward, t.loss_mask = reward, t.loss_mask.__class__((length,), bool)
        t.loss_mask[:] = True
        t.status = TrajectoryStatus.MASKED if reward is None else TrajectoryStatus.COMPLETE
        trajectories.append(t)
    return Group(prompt=prompt, trajectories=trajectories)


def test_every_member_has_its_own_reward_length_and_signal():
    groups = [
        group("a/1", [1.0, 0.0], 4),
        group("a/2", [1.0, 1.0], 2),
        group("b/1", [0.0, None], 6),
    ]
    values = {name: value.value() for name, value in member_metrics(groups, ["a", "b", "c"]).items()}
    assert values == {
        "env/member/a/reward": 0.75,
        "env/member/a/response_length": 3.0,
        "env/member/a/no_signal": 0.5,
        "env/member/a/groups": 2,
        "env/member/b/reward": 0.0,
        "env/member/b/response_length": 6.0,
        "env/member/b/no_signal": 1.0,
        "env/member/b/groups": 1,
        "env/member/c/groups": 0,
    }
    assert all(declared(name) for name in values)
