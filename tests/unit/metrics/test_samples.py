"""The sample of a held-out set: the first finished attempt, as texts."""

import pytest

from rlpipe.metrics.samples import first_sample
from rlpipe.types import Trajectory, TrajectoryStatus

pytestmark = pytest.mark.unit


def attempt(answers, *, reward=1.0, status=TrajectoryStatus.COMPLETE):
    opening = [{"role": "system", "text": "Be brief."}, {"role": "user", "text": "What is bread?"}]
    turns = opening + [{"action": answer, "observation": ""} for answer in answers]
    names = {"trajectory_id": "t", "group_id": "g", "instance_id": "i"}
    return Trajectory(**names, reward=reward, status=status, info={"turns": turns})


def test_a_sample_has_the_last_answer_of_the_first_attempt():
    sample = first_sample("short", [attempt(["ls", "It is food."]), attempt(["No."])])
    assert sample == {"split": "short", "prompt": "What is bread?", "answer": "It is food.", "reward": 1.0}


def test_later_messages_of_an_agent_are_not_the_prompt():
    of_agent = attempt(["Food?"])
    of_agent.info["turns"] += [{"role": "user", "text": "Check it."}, {"action": "Food."}]
    sample = first_sample("short", [of_agent])
    assert sample is not None and (sample["prompt"], sample["answer"]) == ("What is bread?", "Food.")


def test_masked_attempts_and_those_without_a_turn_are_passed_over():
    masked = attempt(["lost"], reward=None, status=TrajectoryStatus.MASKED)
    sample = first_sample("short", [masked, attempt([]), attempt(["Food."], reward=0.0)])
    assert sample is not None and (sample["answer"], sample["reward"]) == ("Food.", 0.0)
    assert first_sample("short", [masked]) is None


def test_a_long_answer_is_cut():
    sample = first_sample("short", [attempt(["a" * 5000])])
    assert sample is not None and len(sample["answer"]) < 1000
