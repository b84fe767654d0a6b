"""A suite from outside the package: found, checked, or refused with the reason."""

from __future__ import annotations

import sys
import textwrap

import pytest

from rlpipe.config.env import EnvConfig
from rlpipe.envs import check_environment, make_suite

pytestmark = pytest.mark.unit

GOOD = """
class Suite:
    max_turns = 1
    def __init__(self, options, seed): self.options, self.seed = options, seed
    def splits(self): return ["held"]
    def instance_ids(self, split): return {"train": ["a"], "held": ["b"]}[split]
    def episode(self, instance_id): ...
    def sandbox_counts(self): return 0, 0

def make(config, seed): return Suite(config.options, seed)

class NoEpisode(Suite):
    episode = None

class Untested(Suite):
    def splits(self): return []

class Empty(Suite):
    def instance_ids(self, split): return []

def no_episode(config, seed): return NoEpisode({}, 0)
def untested(config, seed): return Untested({}, 0)
def empty(config, seed): return Empty({}, 0)
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


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", "cannot be imported from"),
        ("number", "is a int, not a function"),
        ("no_episode", "made a NoEpisode without episode"),
        ("untested", "has no held-out split"),
        ("empty", "no instances in its split 'train'"),
    ],
)
def test_what_is_no_suite_is_refused_with_the_reason(folder, name, says):
    with pytest.raises(ValueError, match=says):
        make_suite(_config(name))


def test_a_name_that_is_no_function_of_a_module_is_refused(folder):
    for name in ("env_of_mine", "a:b:c"):
        with pytest.raises(ValueError, match="must be module:function"):
            check_environment(EnvConfig(suite=name))
    with pytest.raises(ValueError, match="No module named 'not_there'"):
        check_environment(EnvConfig(suite="not_there:make"))


def test_a_suite_is_played_in_place_of_what_the_name_says():
    assert EnvConfig(name="reasoning", suite="a:b").name == "user"
    with pytest.raises(ValueError, match=r"name it by env\.suite"):
        EnvConfig(name="user")
