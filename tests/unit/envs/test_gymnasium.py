"""Gymnasium's environments as text: the oracle wins, mistakes in the settings are told at launch."""

import gymnasium
import numpy as np
import pytest

from rlpipe.config.env import EnvConfig, EnvName, GymnasiumConfig
from rlpipe.envs import check_environment, make_suite, seeded
from rlpipe.envs.rehearsal import rehearse

pytestmark = pytest.mark.unit
LAKE = {"is_slippery": False, "render_mode": "ansi"}
ROUTE = ["down", "I go down.", "RIGHT", "right", "down", "right"]
BROKEN = '''
import gymnasium
from gymnasium import spaces


class Fine(gymnasium.Env):
    """Guess the seed's parity."""

    observation_space = spaces.Text(20)
    action_space = spaces.Discrete(2)

    def __init__(self, bonus=0.0):
        self.bonus = bonus

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.answer = int(self.np_random.integers(2))
        return f"hint{self.answer}", {}

    def step(self, action):
        return "over", float(action == self.answer) + self.bonus, True, False, {}

    def get_action_meanings(self):
        return ["even", "odd"]


class Liar(Fine):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 7, {}


class Crasher(Fine):
    def step(self, action):
        raise KeyError("lost")
'''


def config(name="FrozenLake-v1", *, max_turns=20, train_size=6, held_out_size=4, **settings):
    return EnvConfig(
        name=EnvName.GYMNASIUM,
        max_turns=max_turns,
        train_size=train_size,
        held_out_size=held_out_size,
        gymnasium=GymnasiumConfig(id=name, **{"kwargs": LAKE} | settings),
    )


def play(episode, actions):
    steps = [episode.step(action) for action in actions]
    episode.close()
    return steps


def test_the_route_around_the_holes_reaches_the_goal_and_the_map_shows_where_the_player_is():
    episode = make_suite(config()).episode("seed:0")
    (message,) = episode.messages()
    assert message["content"].startswith("[S]FFF\nFHFH\nFFFH\nHFFG\n")
    assert message["content"].endswith("Answer with one of left, down, right, up.")

    steps = play(episode, ROUTE)
    assert steps[0].observation == "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert [step.done for step in steps] == [False] * 5 + [True]
    assert [step.reward for step in steps] == [0.0] * 5 + [1.0]
    assert steps[-1].info == {"score": 1.0, "invalid_turns": 0, "submitted": True}


def test_a_turn_without_an_action_says_what_to_write_costs_its_penalty_and_moves_nobody():
    episode = make_suite(config(invalid_reward=-0.25)).episode("seed:0")
    steps = play(episode, ["left or right", *ROUTE])
    assert steps[0].observation.endswith("Answer with one of left, down, right, up.")
    assert "[S]FFF" in steps[0].observation and not steps[0].done
    assert [step.reward for step in steps] == [-0.25, *[0.0] * 5, 1.0]
    assert steps[-1].info["invalid_turns"] == 1 and steps[-1].info["score"] == 1.0


def test_gymnasiums_time_limit_ends_an_episode():
    episode = make_suite(config(kwargs=LAKE | {"max_episode_steps": 3})).episode("seed:0")
    last = play(episode, ["left"] * 3)[-1]
    assert last.done and last.truncated and last.reward == 0.0 and last.info["submitted"] is False


def test_an_instance_is_a_seed_so_siblings_start_alike_and_held_out_seeds_are_never_trained_on():
    many = config(kwargs=LAKE | {"desc": ["SSSS", "SHSH", "SSSH", "HSSG"]}, train_size=30)
    one, other = make_suite(many, 1), make_suite(many, 2)
    opening = [one.episode(name).messages() for name in one.instance_ids("train")]
    assert opening == [one.episode(name).messages() for name in one.instance_ids("train")]
    assert len({str(messages) for messages in opening}) > 5
    assert one.instance_ids("held_out") == other.instance_ids("held_out")
    assert not set(one.instance_ids("train")) & {*other.instance_ids("train"), *one.instance_ids("held_out")}


@pytest.mark.parametrize("name", ["Blackjack-v1", "CartPole-v1", "MountainCarContinuous-v0", "Taxi-v4"])
def test_observations_of_other_environments_are_numbers_and_a_rehearsal_accepts_all_of_them(name):
    settings = config(name, kwargs={})
    check_environment(settings)
    suite = make_suite(settings)
    first = suite.episode("seed:0").messages()[0]["content"].splitlines()
    assert np.isfinite([float(number) for line in first[:-1] for number in line.split()]).all()
    assert rehearse(suite, name, episodes=2).steps > 0


@pytest.mark.parametrize("form", ["games:Fine", "games.py:Fine"])
def test_a_class_of_the_users_is_taken_by_its_module_or_file(form, tmp_path, monkeypatch):
    (tmp_path / "games.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    settings = config(form, kwargs={"bonus": 0.5})
    check_environment(settings)
    episode = make_suite(settings).episode("seed:3")
    hint, what = episode.messages()[0]["content"].splitlines()
    assert what == "Answer with one of even, odd."
    assert episode.step(["even", "odd"][int(hint[-1])]).reward == 1.5


@pytest.mark.parametrize(
    "settings, named",
    [
        (config("FrozenLak-v1"), r"Did you mean FrozenLake-v1, FrozenLake8x8-v1\?"),
        (config(""), "Give an id such as FrozenLake-v1"),
        (config(kwargs={"holes": 3}), "unexpected keyword argument 'holes'"),
        (config(actions=["left", "right"]), "has 2 names for 4 actions"),
        (config("no_such_module:Thing"), "no_such_module"),
        (config("games:Liar", kwargs={}), r"games:Liar.*not within the observation space"),
        (config("games:Crasher", kwargs={}), r"games:Crasher.*lost"),
    ],
    ids=["misspelt", "none", "kwargs", "names", "module", "check_env", "raises"],
)
def test_a_mistake_in_the_settings_or_the_environment_is_told_at_launch(
    settings, named, tmp_path, monkeypatch
):
    (tmp_path / "games.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=named):
        check_environment(settings)


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(seeded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install gymnasium, in a checkout .*\.\[gymnasium\]"):
        check_environment(config())


def test_answers_that_name_no_action_are_never_paid():
    with pytest.raises(ValueError, match=r"invalid_reward=0\.5"):
        GymnasiumConfig(invalid_reward=0.5)


def test_the_version_that_is_tested_is_the_one_with_these_names():
    for name, size in {"FrozenLake-v1": 4, "CliffWalking-v1": 4, "Taxi-v4": 6, "Blackjack-v1": 2}.items():
        env = gymnasium.make(name)
        assert env.action_space.n == size
        env.close()
