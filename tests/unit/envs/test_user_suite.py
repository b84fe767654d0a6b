"""A suite from outside the package: found, checked, or refused with the reason."""

from __future__ import annotations

import sys
import textwrap

import pytest

from rlpipe.config.env import EnvConfig, EnvName
from rlpipe.envs import ENVIRONMENTS, check_environment, make_suite
from rlpipe.envs.base import sandbox_counts

pytestmark = pytest.mark.unit

GOOD = """
class Suite:
    max_turns = 1
    def __init__(self, options, seed): self.options, self.seed = options, seed
    def splits(self): return ["held"]
    def instance_ids(self, split): return {"train": ["a"], "held": ["b"]}[split]
    def episode(self, instance_id): ...

class Counting(Suite):
    def sandbox_counts(self): return 1, 2

class Miscounting(Suite):
    def sandbox_counts(self): return None

def make(config, seed): return Suite(config.options, seed)

class NoEpisode(Suite):
    episode = None

class Untested(Suite):
    def splits(self): return []

class Empty(Suite):
    def instance_ids(self, split): return []

class Repeated(Suite):
    def instance_ids(self, split): return [split, split, "b" + split]

class Leaks(Suite):
    def instance_ids(self, split): return ["same", split]

class Shuffles(Suite):
    calls = 0
    def instance_ids(self, split):
        Shuffles.calls += 1
        return [split + str(n) for n in (range(3) if Shuffles.calls % 2 else (0, 2, 1))]

def repeated(config, seed): return Repeated({}, 0)
def leaks(config, seed): return Leaks({}, 0)
def shuffles(config, seed): return Shuffles({}, 0)
def slow(config, seed):
    import time
    time.sleep(0.5)
    return Suite({}, 0)
def no_episode(config, seed): return NoEpisode({}, 0)
def untested(config, seed): return Untested({}, 0)
def empty(config, seed): return Empty({}, 0)
def counting(config, seed): return Counting({}, 0)
def miscounting(config, seed): return Miscounting({}, 0)
number = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder a run is started in."""
    (tmp_path / "env_of_mine.py").write_text(textwrap.dedent(GOOD))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield tmp_path
    sys.modules.pop("env_of_mine", None)


def _config(name: str) -> EnvConfig:
    return EnvConfig(suite=f"env_of_mine:{name}", options={"size": 2})


def test_a_suite_beside_the_run_is_made_with_its_options_and_the_seed(folder):
    config = _config("make")
    check_environment(config)
    suite = make_suite(config, seed=5)
    assert (suite.options, suite.seed) == ({"size": 2}, 5)


def test_a_suite_counts_outcomes_of_its_sandbox_only_if_it_can(folder):
    assert sandbox_counts(make_suite(_config("make"))) == (0, 0)
    assert sandbox_counts(make_suite(_config("counting"))) == (1, 2)


def test_every_environment_has_a_row():
    assert set(ENVIRONMENTS) == set(EnvName)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", "Did you mean counting"),
        ("number", "is a int, not a function"),
        ("no_episode", "made a NoEpisode without episode"),
        ("untested", "has no held-out split"),
        ("empty", "no instances in its split 'train'"),
        ("repeated", r"instance_ids\('train'\) has 'train' 2 times \(1 such ids\)"),
        ("leaks", "1 ids of the held-out split 'held' are trained on as well, such as 'same'"),
        ("shuffles", r"changes between calls, at position 1: .*random\.Random\(seed\)"),
        ("miscounting", r"sandbox_counts\(\) returned None"),
    ],
)
def test_what_is_no_suite_is_refused_with_the_reason(folder, name, says):
    with pytest.raises(ValueError, match=says):
        make_suite(_config(name))


def test_a_name_that_is_no_function_of_a_module_is_refused(folder):
    for name in ("env_of_mine", "a:b:c"):
        with pytest.raises(ValueError, match="must be module:function or path"):
            check_environment(EnvConfig(suite=name))
    with pytest.raises(ValueError, match="No module named 'not_there'"):
        check_environment(EnvConfig(suite="not_there:make"))


def test_a_suite_is_played_in_place_of_what_the_name_says():
    assert EnvConfig(name="reasoning", suite="a:b").name == "user"
    with pytest.raises(ValueError, match=r"name it by env\.suite"):
        EnvConfig(name="user")


def test_a_suite_that_takes_long_to_make_says_so_once(folder, monkeypatch, capsys):
    monkeypatch.setattr("rlpipe.envs.user_suite._SLOW_S", 0.01)
    make_suite(_config("slow"))
    [line] = capsys.readouterr().err.splitlines()
    assert "making env.suite='env_of_mine:slow', which each rollout worker does as well" in line
