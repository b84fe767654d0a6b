"""Command lines: settings and options in any order."""

import re
import shlex

import pytest
from hydra._internal.utils import get_args_parser

from rlpipe.cli import doctor
from rlpipe.cli.hydra_errors import check_arguments, settings_first
from rlpipe.cli.run import config_of

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    "line",
    [
        "--multirun +recipe=swe_rl run.seed=0,1",
        "+recipe=swe_rl --multirun run.seed=0,1",
        "+recipe=swe_rl run.seed=0,1 --multirun",
        "+recipe=swe_rl -m run.seed=0,1 --config-dir .",
    ],
)
def test_settings_may_stand_on_both_sides_of_an_option(line):
    ordered = settings_first(line.split())
    given, unknown = get_args_parser().parse_known_args(ordered)
    assert given.multirun and given.overrides == ["+recipe=swe_rl", "run.seed=0,1"] and not unknown
    check_arguments(ordered)


def test_the_value_of_an_option_stays_behind_it():
    line = "+recipe=mine --config-dir a=b ~x --cfg job spec.mode=none"
    ordered = settings_first(line.split())
    assert " ".join(ordered) == "+recipe=mine ~x spec.mode=none --config-dir a=b --cfg job"


@pytest.fixture
def recipe_folder(tmp_path):
    (tmp_path / "recipe").mkdir()
    text = "# @package _global_\nrecipe: mine\nenv:\n  suite: user:make\n  options: {size: 3}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(text)
    return tmp_path


def test_a_recipe_of_another_folder_is_composed_without_a_launch(recipe_folder):
    config, _ = config_of(["+recipe=mine", "--config-dir", str(recipe_folder), "run.steps=3"])
    assert (config.env.options, config.run.steps) == ({"size": 3}, 3)


def test_doctor_takes_the_folder_of_a_recipe_as_run_does(recipe_folder, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "CHECKS", ())
    seen = []
    monkeypatch.setattr(doctor, "check_run", lambda settings: seen.append(config_of(settings)) or [])
    monkeypatch.setattr(doctor, "show", lambda findings: None)
    assert doctor.main(["+recipe=mine", "--config-dir", str(recipe_folder), "run.steps=3"]) == 0
    assert seen[0][0].env.suite == "user:make" and seen[0][0].run.steps == 3


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("data.template", "Question: {question}"),
        ("data.system", "Think first, then answer."),
        ("data.system", """Don't say "why", answer."""),
    ],
)
def test_a_text_that_hydra_splits_or_cannot_read_is_answered_with_an_argument_that_works(key, text):
    with pytest.raises(ValueError) as refused:
        config_of(["+recipe=swe_rl", f"{key}={text}"])

    (argument,) = shlex.split(re.search(rf"'{key}=\".*\"'", str(refused.value))[0])
    config, _ = config_of(["+recipe=swe_rl", argument])
    assert getattr(config.data, key.partition(".")[2]) == text


@pytest.mark.parametrize("word", ["env.options={tasks: [a]}", "env.options.tasks=[a]"])
def test_a_new_key_of_a_mapping_is_refused_with_the_plus_that_adds_it(word):
    with pytest.raises(ValueError, match="plus") as refused:
        config_of(["+recipe=swe_rl", word])
    assert f"+{word}" in str(refused.value)
    config, _ = config_of(["+recipe=swe_rl", f"+{word}"])
    assert config.env.options == {"tasks": ["a"]}
