"""Data sets of every format give the same episodes, and rewards of every form are computed and added up."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.data import DataConfig, FunctionTask
from rlpipe.config.env import EnvConfig, EnvName
from rlpipe.envs import make_suite
from rlpipe.envs.base import GroupMember
from rlpipe.envs.function.code_tests import unittest_module
from rlpipe.envs.function.rewards import score_answers
from tests.helpers import reward_examples

pytestmark = pytest.mark.unit
ROWS = [{"prompt": f"Say {n} é.", "answer": str(n), "level": str(n % 3)} for n in range(20)]


def suite_of(reward: Any = "exact_match", **data: Any) -> Any:
    task = FunctionTask(data=DataConfig(**data), reward=reward, model="shipped:models/tiny")
    return make_suite(EnvConfig(name=EnvName.FUNCTION, function=task))


def rewards_of(suite: Any, answers: list[str], number: int = 1) -> list[float]:
    """The rewards of answers to one row."""
    return [reward for reward, _ in score_answers(suite.rewards, suite.example(f"train/{number}"), answers)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trl.py").write_text(reward_examples.TRL)
    (tmp_path / "verl_reward.py").write_text(reward_examples.VERL)
    return tmp_path


def write_jsonl(path: Path, rows: list[dict[str, Any]] = ROWS, head: str = "") -> None:
    text = head + "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def write_csv(path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]))
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_saved(path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(str(path))


WRITERS = {
    "t.jsonl": write_jsonl,
    "t.ndjson": lambda path: write_jsonl(path, head="\ufeff"),
    "t.jsonl.gz": write_jsonl,
    "t.json": lambda path: path.write_text(json.dumps(ROWS)),
    "t.csv": write_csv,
    "t.parquet": write_parquet,
    "saved": write_saved,
    "plain": lambda path: (path.mkdir(), write_jsonl(path / "train.jsonl")),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_examples_in_the_same_order(folder, name):
    WRITERS[name](folder / name)
    suite, reference = suite_of(train=name), folder / "reference.jsonl"
    write_jsonl(reference)
    wanted = suite_of(train=str(reference))
    assert suite.instance_ids("train") == wanted.instance_ids("train")
    assert suite.instance_ids("held_out") == wanted.instance_ids("held_out")
    ids = [*suite.instance_ids("train"), *suite.instance_ids("held_out")]
    assert sorted(suite.example(name).row["answer"] for name in ids) == sorted(row["answer"] for row in ROWS)
    for instance_id in ids:
        assert suite.example(instance_id).row == wanted.example(instance_id).row
        assert suite.episode(instance_id).messages() == wanted.episode(instance_id).messages()


def test_places_are_lines_of_the_file_blank_ones_counted(folder):
    write_jsonl(folder / "t.jsonl")
    assert [suite_of(train="t.jsonl").example(f"train/{n}").place for n in (1, 2)] == [
        "t.jsonl:1",
        "t.jsonl:3",
    ]


def test_a_run_of_another_seed_holds_the_same_rows_out_and_data_seed_others(folder):
    write_jsonl(folder / "t.jsonl")
    first, again, other = (
        suite_of(train="t.jsonl", seed=seed).instance_ids("held_out") for seed in (0, 0, 1)
    )
    assert first == again != other
    in_order = suite_of(train="t.jsonl", shuffle=False, held_out=0.25, limit=12)
    assert in_order.instance_ids("held_out") == ["train/1", "train/2", "train/3"]
    assert in_order.instance_ids("train") == [f"train/{n}" for n in range(4, 13)]


def test_held_out_rows_come_from_a_file_or_another_split(folder):
    from datasets import Dataset, DatasetDict

    write_jsonl(folder / "t.jsonl", ROWS[:15])
    write_csv(folder / "held.csv")
    suite = suite_of(train="t.jsonl", held_out="held.csv", shuffle=False)
    assert suite.instance_ids("held_out") == [f"held_out/{n}" for n in range(1, 21)]
    assert suite.example("held_out/20").row == ROWS[19]
    assert len(suite.instance_ids("train")) == 15

    DatasetDict(train=Dataset.from_list(ROWS[:9]), test=Dataset.from_list(ROWS[9:])).save_to_disk("both")
    suite = suite_of(train="both", held_out="split:test", shuffle=False)
    assert suite.example(suite.instance_ids("held_out")[0]).row == ROWS[9]


def test_templates_system_and_filter_make_the_prompts(folder):
    write_jsonl(folder / "t.jsonl")
    (folder / "t.txt").write_text("Level {level}: {{{prompt}}}")
    (folder / "f.py").write_text(
        "def easy(row):\n    return row['level'] == '0'\n"
        "def chat(row):\n    return [{'role': 'user', 'content': row['prompt'].upper()}]\n"
    )
    suite = suite_of(train="t.jsonl", template="t.txt", system="Be brief.", filter="f.py:easy")
    ids = [*suite.instance_ids("train"), *suite.instance_ids("held_out")]
    assert sorted(ids) == sorted(f"train/{n}" for n in range(1, 21, 3))
    assert suite.episode("train/4").messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Level 0: {Say 3 é.}"},
    ]
    assert suite_of(train="t.jsonl", template="f.py:chat").example("train/2").text == "SAY 1 É."


def test_trls_examples_give_the_rewards_that_its_document_gives(folder):
    write_jsonl(folder / "t.jsonl", [{"prompt": "p", "ground_truth": "2", "task": "math"}] * 2)
    boxed = [r" The solution is \boxed{2}.", r" The solution is \boxed{6}."]
    assert rewards_of(suite_of("trl.py:reward_func", train="t.jsonl"), boxed) == [1.0, 0.0]
    texts = [" blue.", " in the sky."]
    assert rewards_of(suite_of("trl.py:length_in_characters", train="t.jsonl"), texts) == [6.0, 12.0]
    assert rewards_of(suite_of("trl.py:async_reward_func", train="t.jsonl"), ["a", ""]) == [1.0, 0.0]

    tokens = suite_of("trl.py:length_in_tokens", train="t.jsonl")
    assert rewards_of(tokens, ["grep", "grep grep grep"]) == [1.0, 5.0]

    # None of one function leaves the reward to the others.
    both = suite_of(["trl.py:math_reward_func", "trl.py:coding_reward_func"], train="t.jsonl")
    ((reward, info),) = score_answers(both.rewards, both.example("train/1"), ["It is 4"])
    assert (reward, info) == (1.0, {"reward_math_reward_func": 1.0})


def test_trls_conversational_format_is_that_of_prompts_with_messages(folder):
    asked = [{"role": "user", "content": "What is (1 + 2) * 4?"}]
    write_jsonl(folder / "t.jsonl", [{"prompt": asked}] * 2)
    right = "<think>The sum of 1 and 2 is 3, times 4 is 12.</think><answer>(1 + 2) * 4 = 12</answer>"
    suite = suite_of("trl.py:format_reward_func", train="t.jsonl")
    assert rewards_of(suite, [right, "It is 8."]) == [1.0, 0.0]


def test_trls_logging_functions_record_what_they_are_given(folder):
    write_jsonl(folder / "t.jsonl")
    (folder / "r.py").write_text(
        "def score(completions, log_extra=None, log_metric=None, **kwargs):\n"
        "    log_extra('seen', [c.upper() for c in completions])\n"
        "    log_metric('length', 2.5)\n"
        "    return [0.0] * len(completions)\n"
    )
    suite = suite_of("r.py:score", train="t.jsonl")
    infos = [info for _, info in score_answers(suite.rewards, suite.example("train/1"), ["a", "b"])]
    assert infos == [{"seen": seen, "length": 2.5, "reward_score": 0.0} for seen in "AB"]


def test_verls_layout_and_examples_work_from_its_parquet_files(folder):
    write_parquet(folder / "t.parquet", reward_examples.verl_rows(6))
    suite = suite_of("verl_reward.py:my_reward_fn", train="t.parquet")
    assert rewards_of(suite, ["a" * 50]) == [0.5]

    (folder / "gsm8k.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, method='strict'):\n"
        "    right = solution_str.endswith(f'#### {ground_truth}') and data_source == 'openai/gsm8k'\n"
        "    return {'score': float(right), 'acc': right, 'index': extra_info['index'], 'method': method}\n"
    )
    suite = suite_of({"gsm8k.py:compute_score": {"method": "flexible"}}, train="t.parquet")
    ((reward, info),) = score_answers(suite.rewards, suite.example("train/4"), ["It is #### 6"])
    assert reward == 1.0
    assert info == {"acc": True, "index": 3, "method": "flexible", "reward_compute_score": 1.0}


def test_verls_scorer_of_gsm8k_as_it_is_installed_works(folder):
    write_parquet(folder / "t.parquet", reward_examples.verl_rows(6))
    suite = suite_of("verl.utils.reward_score.gsm8k:compute_score", train="t.parquet")
    assert rewards_of(suite, ["#### 6", "#### 7", "six"], number=4) == [1.0, 0.0, 0.0]


def test_rewards_are_added_by_their_weights_and_recorded_by_their_names(folder):
    write_jsonl(folder / "t.jsonl")
    (folder / "a.py").write_text("def score(completion): return len(completion)\n")
    (folder / "b.py").write_text(
        "async def score(completion, level, row): return int(level) == int(row['level'])\n"
    )
    suite = suite_of({"a.py:score": 0.5, "b.py:score": 2, "exact_match": -1}, train="t.jsonl")
    ((reward, info),) = score_answers(suite.rewards, suite.example("train/8"), ["7"])
    assert info == {"reward_a_score": 1.0, "reward_b_score": 1.0, "reward_exact_match": 1.0}
    assert reward == 0.5 * 1 + 2 * 1 - 1


def test_an_episode_is_one_answer_with_its_reward(folder):
    write_jsonl(folder / "t.jsonl")
    suite = suite_of(train="t.jsonl")
    step = suite.episode("train/6").step(" 5\n")
    assert (step.done, step.reward, step.info["reward_exact_match"]) == (True, 1.0, 1.0)
    assert not hasattr(suite, "score_group")


def test_a_function_of_several_answers_sees_all_attempts_at_a_prompt_at_once(folder):
    write_jsonl(folder / "t.jsonl")
    (folder / "a.py").write_text(
        "def shortest(completions, **kwargs):\n"
        "    return [float(len(c) == min(map(len, completions))) for c in completions]\n"
    )
    suite = suite_of({"a.py:shortest": 1.0, "exact_match": 0.5}, train="t.jsonl")
    assert suite.episode("train/6").step("5").reward == 0.0  # what counts comes with the group

    results = [GroupMember(text=text, turns=[text], reward=0.0, info={"n": 1}) for text in ("5", "five")]
    assert suite.score_group("train/6", results) == [1.5, 0.0]
    assert results[1].info == {"n": 1, "reward_shortest": 0.0, "reward_exact_match": 0.0}


READY = [
    ("exact_match", {}, {"answer": "Yes"}, {"Yes ": 1, "yes": 0}),
    ("exact_match", {"ignore_case": True}, {"answer": "Yes"}, {"yes": 1, "no": 0}),
    (
        "regex",
        {"pattern": r"answer is (\d+)"},
        {"answer": "4"},
        {"answer is 3, answer is 4": 1, "answer is 3": 0},
    ),
    ("regex", {"pattern": r"^\w+\.$"}, {"answer": "4"}, {"Yes.": 1, "Yes": 0}),
    (
        "json_schema",
        {"schema": {"type": "object", "required": ["a"]}},
        {"answer": ""},
        {'{"a": 1}': 1, 'So:\n```json\n{"a": 2}\n```': 1, '{"b": 1}': 0, "a": 0},
    ),
    ("json_schema", {}, {"schema": '{"type": "integer"}'}, {"3": 1, '"3"': 0}),
    (
        "math_verify",
        {},
        {"answer": r"\frac{1}{2}"},
        {"$0.5$": 1, r"\boxed{\frac{2}{4}}": 1, "$0.6$": 0, "": 0},
    ),
    (
        "reasoning_gym",
        {},
        {"question": "q", "answer": "1", "metadata": {"source_dataset": "gcd"}},
        {"<answer>1</answer>": 1, "1": 1, "<answer>2</answer>": 0},
    ),
]


MBPP = [
    "assert double(2) == 4",
    "import math\nassert math.isclose(double(1.5), 3)",
    "assert sorted(double([2, 1])) == [1, 1, 2, 2]",
]
UNITTEST = """import unittest
from solution import double
class Test(unittest.TestCase):
    def test_two(self):
        self.assertEqual(double(2), 4)
"""
RIGHT = "So:\n```python\ndef double(x):\n    return x * 2\n```\nDone."
CHEAT = "import unittest\nunittest.TestCase.assertEqual = lambda *_: None\ndef double(x): return x"


@pytest.mark.parametrize(
    ("tests", "options", "cases"),
    [
        (MBPP, {}, {RIGHT: 1, "def double(x): return 4": 0, "def other(x): return 4": 0, "no code": 0}),
        (MBPP, {"partial": True}, {"def double(x): return 4": 1 / 3}),
        (UNITTEST, {}, {RIGHT: 1, CHEAT: 0, "import os; os._exit(0)": 0}),
    ],
)
def test_code_is_rewarded_by_tests_that_it_cannot_reach(folder, tests, options, cases):
    write_jsonl(folder / "t.jsonl", [{"prompt": "p", "test_list": tests}] * 2)
    suite = suite_of({"code_tests": options}, train="t.jsonl")
    for completion, wanted in cases.items():
        assert rewards_of(suite, [completion]) == [pytest.approx(wanted)], completion


@pytest.mark.parametrize(
    ("tests", "says"),
    [("x = 1", "holds no test"), ("assert (", "not valid Python"), (3, "holds no test")],
)
def test_a_row_without_tests_of_code_is_refused(tests, says):
    with pytest.raises(ValueError, match=says):
        unittest_module(tests)


@pytest.mark.parametrize(("name", "options", "row", "cases"), READY)
def test_a_ready_reward_tells_right_from_wrong(folder, name, options, row, cases):
    write_jsonl(folder / "t.jsonl", [{"prompt": "p"} | row] * 2)
    suite = suite_of({name: options}, train="t.jsonl")
    for completion, wanted in cases.items():
        assert rewards_of(suite, [completion]) == [float(wanted)], completion
