"""Demonstrators: their computed observations are those of a real shell."""

import os
import random
import subprocess

import pytest

from recipes.tiny_model.demonstrators import Demonstrator, demonstrate, wrong_fixes
from recipes.tiny_model.families import TRAIN_FAMILIES
from recipes.tiny_model.generate import make_instance

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("who", list(Demonstrator))
def test_observations_equal_those_of_a_real_shell(who, tmp_path):
    rng = random.Random(str(who))
    for number in range(2):
        record = make_instance(rng, TRAIN_FAMILIES)
        messages = demonstrate(rng, record, who)
        folder = tmp_path / str(number)
        folder.mkdir()
        for path, text in record["files"].items():
            (folder / path).write_text(text)
        environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
        for action, observation in zip(messages[1:-1:2], messages[2::2], strict=True):
            shell = ["sh", "-c", action["content"]]
            done = subprocess.run(shell, cwd=folder, env=environment, capture_output=True, text=True)
            assert done.stdout.rstrip("\n") == observation["content"], action
        assert messages[-1] == {"role": "assistant", "content": "submit"}


def test_a_careful_demonstrator_submits_after_a_passed_test_and_an_untested_one_does_not():
    rng = random.Random(1)
    record = make_instance(rng, TRAIN_FAMILIES)
    assert demonstrate(rng, record, Demonstrator.CAREFUL)[-2]["content"] == "OK"
    untested = demonstrate(rng, record, Demonstrator.UNTESTED)
    assert untested[-2]["content"] == "" and record["fixed_line"] not in untested[-3]["content"]


def test_wrong_fixes_are_neither_the_bug_nor_the_fix():
    rng = random.Random(2)
    for _ in range(30):
        record = make_instance(rng, TRAIN_FAMILIES)
        bug = record["files"][record["file"]].split("\n")[record["line"] - 1]
        assert not {bug, record["fixed_line"]} & set(wrong_fixes(record))
