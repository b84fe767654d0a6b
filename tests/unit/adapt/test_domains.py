"""Held-out sets by name: which there are, which prompts, and what is refused."""

import json

import pytest

from rlpipe.adapt.domains import make_domains, make_suites
from rlpipe.config.adapt import AdaptConfig
from rlpipe.config.env import EnvConfig, EnvName
from rlpipe.config.run import Config
from rlpipe.preflight.settings import check_adapt

pytestmark = pytest.mark.unit


class Suite:
    """Two held-out sets of five prompts."""

    def splits(self):
        return ["easy", "hard"]

    def instance_ids(self, split):
        return [f"{split}{i}" for i in range(5)]


SUITES = {EnvName.SWE: Suite(), EnvName.REASONING: Suite()}


def domains(**settings):
    return make_domains(AdaptConfig(**settings), EnvConfig(), SUITES)


def test_the_environments_own_sets_are_in_domain_by_default():
    found = domains(out_of_domain=["reasoning.hard"])
    assert [(d.name, d.in_domain) for d in found] == [
        ("swe.easy", True),
        ("swe.hard", True),
        ("reasoning.hard", False),
    ]


def test_prompts_are_the_first_after_the_offset():
    assert domains(eval_prompts=2, eval_offset=3)[0].instance_ids == ["easy3", "easy4"]
    assert len(domains(eval_prompts=0)[0].instance_ids) == 5
    with pytest.raises(ValueError, match="eval_offset=5"):
        domains(eval_offset=5)


def test_a_file_of_conversations_is_a_held_out_set(tmp_path):
    file = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file.write_text(json.dumps({"messages": chat}))
    (found,) = domains(in_domain=[str(file)])
    assert (found.name, found.instance_ids) == ("chats", ["chats:0"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"in_domain": ["swe", "swe.easy"]}, "once"),
        ({"in_domain": ["swe.train"]}, "trained on"),
    ],
)
def test_sets_that_cannot_be_held_out_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        domains(**settings)


def test_what_is_neither_environment_nor_file_is_refused_before_anything_starts():
    config = Config(adapt=AdaptConfig(out_of_domain=["cooking"]))
    with pytest.raises(ValueError, match=r"'cooking'.*swe, reasoning"):
        check_adapt(config)


@pytest.mark.parametrize(
    "settings",
    [
        {"prompts": 0},
        {"eval_every": -1},
        {"warmup": 1.5},
        {"context_weight": -0.1},
        {"eval_modes": []},
        {"eval_modes": ["greedy"]},
        {"eval_modes": ["rejection", "rejection"]},
    ],
)
def test_settings_that_cannot_work_are_refused(settings):
    with pytest.raises(ValueError, match="adapt." + next(iter(settings))):
        AdaptConfig(**settings)


def test_an_environment_that_is_only_evaluated_makes_few_training_tasks():
    suites = make_suites(AdaptConfig(out_of_domain=["reasoning"]), EnvConfig(), seed=0)
    assert list(suites) == [EnvName.SWE, EnvName.REASONING]
    assert len(suites[EnvName.REASONING].instance_ids("train")) < 100
