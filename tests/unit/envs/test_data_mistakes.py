"""Mistakes with data sets and reward functions: what, where, value and remedy of each, before a run starts.

A row is the files of a folder, the settings, and parts that the message must hold. `train.jsonl` and `r.py`
are right unless a row replaces them.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rlpipe.config.data import DataConfig, FunctionTask
from rlpipe.config.env import EnvConfig, EnvName
from rlpipe.config.run import Config
from rlpipe.envs import make_suite
from rlpipe.envs.function import rows as rows_module
from rlpipe.envs.function.rehearsal import rehearse_rewards
from rlpipe.preflight.settings import _check_function

pytestmark = pytest.mark.unit


def lines(rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def numbered(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"Say {n}.", "answer": str(n)} | more for n in range(count)]


def with_row(number: int, row: Any, count: int = 20) -> str:
    """A file whose line `number` is another."""
    rows = numbered(count)
    return (
        lines(rows[: number - 1])
        + (row if isinstance(row, str) else json.dumps(row))
        + "\n"
        + lines(rows[number:])
    )


GOOD = "def score(completion, answer):\n    return float(answer in completion)\n"
TRL = "def score(completions, **columns):\n    return {}\n"
REWARD = "r.py:score"


def launch(
    folder: Path,
    files: dict[str, Any],
    reward: Any = REWARD,
    *,
    tokens: int = 50,
    call_s: float = 0.3,
    **data: Any,
) -> list[str]:
    """Make the suite and rehearse it, as a launch does; return the notes."""
    for name, content in ({"train.jsonl": lines(numbered(20)), "r.py": GOOD} | files).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is None:
            path.mkdir(exist_ok=True)
        else:
            path.write_text(content)
    settings = DataConfig(**({"train": "train.jsonl"} | data))
    task = FunctionTask(data=settings, reward=reward, model="shipped:models/tiny")
    suite = make_suite(EnvConfig(name=EnvName.FUNCTION, function=task))
    suite.drop_long(lambda messages: sum(len(m["content"].split()) for m in messages), tokens)
    return [*suite.notes, *rehearse_rewards(suite, budget_s=60, call_s=call_s)]


# name: (files, settings, parts of the message)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    # --- files
    "misspelt file": ({}, {"train": "trian.jsonl"}, ["data.train=trian.jsonl", "Did you mean train.jsonl?"]),
    "no data set named": ({}, {"train": ""}, ["data.train is empty", "data.train=train.jsonl"]),
    "empty file": ({"train.jsonl": ""}, {}, ["data.train=train.jsonl is empty", "two"]),
    "blank lines only": ({"train.jsonl": "\n\n \n"}, {}, ["data.train=train.jsonl is empty"]),
    "unknown ending": ({"rows.xlsx": "x"}, {"train": "rows.xlsx"}, ["rows.xlsx", ".xlsx", "data.format="]),
    "folder without data": (
        {"empty": None},
        {"train": "empty"},
        ["data.train=empty", "empty folder", "name one"],
    ),
    "folder of other files": (
        {"other/readme.txt2": "x"},
        {"train": "other"},
        ["data.train=other cannot be loaded", "name a folder with data files"],
    ),
    "folder as a file": (
        {"d": None},
        {"train": "d", "format": "jsonl"},
        ["data.train=d is a folder", "format=hf"],
    ),
    "gzip that is none": (
        {"t.jsonl.gz": lines(numbered(3))},
        {"train": "t.jsonl.gz"},
        ["t.jsonl.gz is not a whole gzip file", "rename it without .gz"],
    ),
    "gzip cut short": (
        {"t.jsonl.gz": gzip.compress(lines(numbered(500)).encode())[:-40]},
        {"train": "t.jsonl.gz"},
        ["t.jsonl.gz is not a whole gzip file"],
    ),
    "gzip without the ending": (
        {"train.jsonl": gzip.compress(b"{}")},
        {},
        ["train.jsonl holds gzip data", "rename it to train.jsonl.gz"],
    ),
    "latin-1 in JSONL": (
        {"train.jsonl": lines(numbered(1)).encode() + b'{"prompt": "caf\xe9", "answer": "1"}\n'},
        {},
        ["train.jsonl:2", "0xe9", "UTF-8", "iconv"],
    ),
    "latin-1 in CSV": (
        {"t.csv": b"prompt,answer\ncaf\xe9,1\n"},
        {"train": "t.csv"},
        ["t.csv", "0xe9", "UTF-8"],
    ),
    "UTF-16 in JSONL": (
        {"train.jsonl": lines(numbered(3)).encode("utf-16")},
        {},
        ["train.jsonl:2", "not UTF-8", "iconv -f UTF-16 -t UTF-8"],
    ),
    "UTF-16 in CSV": (
        {"t.csv": "prompt,answer\na,b\n".encode("utf-16")},
        {"train": "t.csv"},
        ["data.train=t.csv", "0xff", "iconv -f UTF-16 -t UTF-8"],
    ),
    "line ends of old Macs": (
        {"train.jsonl": lines(numbered(3)).replace("\n", "\r")},
        {},
        ["train.jsonl:1 is not JSON at column 37", "Extra data"],
    ),
    "two rows on a line": (
        {"train.jsonl": with_row(3, '{"prompt": "a"} {"prompt": "b"}')},
        {},
        ["train.jsonl:3 is not JSON at column 17", "Extra data", "Correct the line"],
    ),
    "file cut short": (
        {"train.jsonl": lines(numbered(20))[:-12]},
        {},
        ["train.jsonl:20 is not JSON", "Unterminated string", "or remove it"],
    ),
    "number of thousands of digits": (
        {"train.jsonl": with_row(3, '{"prompt": "a", "answer": %s}' % ("1" * 5000))},
        {},
        ["train.jsonl:3 cannot be read", "4300 digits", "store that value as text"],
    ),
    "value nested too deeply": (
        {"train.jsonl": with_row(3, '{"prompt": "a", "answer": %s}' % ("[" * 99999 + "]" * 99999))},
        {},
        ["train.jsonl:3 cannot be read", "recursion depth", "leave it out"],
    ),
    "JSON nested too deeply": (
        {"t.json": "[" * 99999 + "]" * 99999},
        {"train": "t.json"},
        ["data.train=t.json cannot be read", "recursion depth"],
    ),
    "CSV with semicolons": (
        {"t.csv": "prompt;answer\nSay 1.;1\n"},
        {"train": "t.csv"},
        ["data.train=t.csv separates its columns by ';'", "prompt;answer", "commas"],
    ),
    "CSV without rows": (
        {"t.csv": "prompt,answer\n"},
        {"train": "t.csv"},
        ["data.train=t.csv is empty", "no row"],
    ),
    "line that is not JSON": (
        {"train.jsonl": with_row(3, '{"prompt": "a", "answer": }')},
        {},
        ["train.jsonl:3 is not JSON at column 27", "Correct the line"],
    ),
    "several lines with faults": (
        {"train.jsonl": with_row(3, "{") + with_row(5, "[1]")},
        {},
        ["train.jsonl:3 is not JSON", "other faults: train.jsonl:25"],
    ),
    "line that is a list": ({"train.jsonl": "[1, 2]\n"}, {}, ["train.jsonl:1 is a list", "data.format=json"]),
    "JSON that is JSONL": (
        {"t.json": lines(numbered(3))},
        {"train": "t.json"},
        ["t.json:2", "Extra data", "data.format=jsonl"],
    ),
    "JSON that is an object": (
        {"t.json": '{"rows": []}'},
        {"train": "t.json"},
        ["t.json is a dict with the keys 'rows'", "store the list only"],
    ),
    "JSON row that is a number": (
        {"t.json": '[{"prompt": "a"}, 3]'},
        {"train": "t.json"},
        ["t.json, row 2", "int"],
    ),
    "CSV with a broken row": (
        {"t.csv": "prompt,answer\nSay 1.,1\nSay, 2.,2\n"},
        {"train": "t.csv"},
        ["t.csv:3 has 3 values", "2 columns (prompt, answer)", "quote"],
    ),
    "CSV with an open quote": (
        {"t.csv": 'prompt,answer\n"Say 1.,1\nSay 2.,2\n'},
        {"train": "t.csv"},
        ["t.csv:3 is not CSV", "quotes"],
    ),
    "CSV with a column twice": (
        {"t.csv": "prompt,answer,answer\na,b,c\n"},
        {"train": "t.csv"},
        ["names a column twice", "rename one"],
    ),
    "parquet that is none": (
        {"t.parquet": b"PAR0 nothing of the kind"},
        {"train": "t.parquet"},
        ["data.train=t.parquet is not a parquet file", "to_parquet"],
    ),
    "hub id without a network": (
        {},
        {"train": "nobody/nothing-like-this"},
        ["data.train=nobody/nothing-like-this cannot be loaded", "no network", "name a file or folder"],
    ),
    # --- splits
    "share of nothing": ({}, {"held_out": 0}, ["data.held_out=0", "between 0 and 1"]),
    "share of everything": ({}, {"held_out": 1}, ["data.held_out=1", "between 0 and 1", "0.1"]),
    "share below nothing": ({}, {"held_out": -0.5}, ["data.held_out=-0.5", "between 0 and 1"]),
    "held-out file that is trained on": (
        {},
        {"held_out": "./train.jsonl"},
        ["data.held_out=./train.jsonl is data.train=train.jsonl", "data.held_out=0.1"],
    ),
    "held-out split that is trained on": (
        {},
        {"held_out": "split:train"},
        ["split:train", "what was trained on"],
    ),
    "split of a file": (
        {},
        {"held_out": "split:test"},
        ["data.held_out=split:test", "data.train=train.jsonl is a file", "data.held_out=0.1"],
    ),
    "misspelt held-out file": (
        {},
        {"held_out": "tset.jsonl"},
        ["data.held_out=tset.jsonl", "there is no file"],
    ),
    "one row": ({"train.jsonl": lines(numbered(1))}, {}, ["train.jsonl has 1 usable rows", "give more rows"]),
    "equal rows only": (
        {"train.jsonl": lines([{"prompt": "a", "answer": "b"}] * 9)},
        {},
        ["1 different held-out prompts", "leaves none to train on"],
    ),
    "negative limit": ({}, {"limit": -1}, ["data.limit=-1", "at least 0", "no limit"]),
    "subset of a file": (
        {"t.jsonl": ""},
        {"train": __file__, "subset": "main"},
        ["data.subset=main", "Leave it out"],
    ),
    # --- columns and rows
    "misspelt column": (
        {},
        {"answer": "anser"},
        ["data.answer=anser", "train.jsonl", "Did you mean answer?"],
    ),
    "no usual column": (
        {"train.jsonl": lines([{"text": "a", "label": "b"}] * 3)},
        {},
        ["train.jsonl has no column of a usual name", "text, label", "data.prompt=COLUMN"],
    ),
    "no answers": (
        {"train.jsonl": lines([{"prompt": f"Say {n}."} for n in range(9)])},
        {},
        ["r.py:score needs answer", "train.jsonl has no column", "Set data.answer=COLUMN"],
    ),
    "no answers among the held-out rows": (
        {"test.jsonl": lines([{"prompt": "new"}])},
        {"held_out": "test.jsonl"},
        ["r.py:score needs answer", "test.jsonl has no column", "it has prompt"],
    ),
    "row without the column": (
        {"train.jsonl": with_row(7, {"question": "a", "answer": "b"})},
        {},
        ["train.jsonl:7 has no column 'prompt'", "question, answer", "data.filter"],
    ),
    "empty prompt": (
        {"train.jsonl": with_row(4, {"prompt": " ", "answer": "1"})},
        {},
        ["train.jsonl:4", "empty"],
    ),
    "missing prompt": (
        {"train.jsonl": with_row(4, {"prompt": None, "answer": "1"})},
        {},
        ["train.jsonl:4", "None (NoneType)", "give a text"],
    ),
    "prompt that is a number": (
        {"train.jsonl": with_row(4, {"prompt": 3, "answer": "1"})},
        {},
        ["train.jsonl:4", "3"],
    ),
    "answers of two types": (
        {"train.jsonl": with_row(9, {"prompt": "a", "answer": 4})},
        {},
        ["the answer is text in 19 rows", "number in train.jsonl:9", "store one type"],
    ),
    "prompts of two types": (
        {"train.jsonl": with_row(9, {"prompt": [{"role": "user", "content": "a"}], "answer": "4"})},
        {},
        ["the prompt is text in 19 rows", "messages in train.jsonl:9"],
    ),
    "answer that is NaN": (
        {"train.jsonl": with_row(5, '{"prompt": "a", "answer": NaN}')},
        {},
        ["train.jsonl:5", "answer is nan", "data.filter"],
    ),
    "unknown role": (
        {"train.jsonl": lines([{"prompt": [{"role": "human", "content": "a"}], "answer": "b"}] * 3)},
        {},
        ["train.jsonl:1", "'human'", "system, user, assistant, tool"],
    ),
    "messages of another format": (
        {"train.jsonl": lines([{"messages": [{"from": "human", "value": "a"}], "answer": "b"}] * 3)},
        {},
        ["train.jsonl:1", "rename from/value to role/content"],
    ),
    "messages that end with the answer": (
        {"train.jsonl": lines([{"prompt": [{"role": "assistant", "content": "a"}], "answer": "b"}] * 3)},
        {},
        ["train.jsonl:1", "ends with a message of the assistant", "column of its own"],
    ),
    "images": (
        {
            "train.jsonl": lines(
                [{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "b"}] * 3
            )
        },
        {},
        ["train.jsonl:1", "images are not supported"],
    ),
    "half a surrogate pair": (
        {"train.jsonl": with_row(2, '{"prompt": "a \\ud800", "answer": "1"}')},
        {},
        ["train.jsonl:2", "half a surrogate pair", "errors='replace'"],
    ),
    "prompts beyond the context": (
        {"train.jsonl": lines([{"prompt": f"{n} word " * 60, "answer": "b"} for n in range(9)])},
        {},
        ["have more than 50 tokens (the longest 120", "train.jsonl:", "raise rollout.max_context"],
    ),
    # --- templates and filters
    "template with a missing column": (
        {},
        {"template": "Q: {question}"},
        ["no column 'question'", "prompt, answer", "{{ and }}"],
    ),
    "template without a column": ({}, {"template": "Say it."}, ["data.template='Say it.'", "no {column}"]),
    "template with an open brace": (
        {},
        {"template": "Q: {prompt"},
        ["data.template='Q: {prompt'", "{{ and }}"],
    ),
    "template file that is missing": ({}, {"template": "t.txt"}, ["data.template=t.txt", "there is no file"]),
    "template function that returns a number": (
        {"t.py": "def make(row):\n    return 3\n"},
        {"template": "t.py:make"},
        ["t.py:2", "its template returned is 3", "train.jsonl:1"],
    ),
    "filter that drops all": (
        {"f.py": "def keep(row):\n    return False\n"},
        {"filter": "f.py:keep"},
        ["leaves none of the 20 rows of train.jsonl", "return True"],
    ),
    "filter that returns nothing": (
        {"f.py": "def keep(row):\n    row['answer'] == '1'\n"},
        {"filter": "f.py:keep"},
        ["f.py:2", "data.filter returned None", "return True or False", "train.jsonl:1"],
    ),
    "filter that raises": (
        {"f.py": "def keep(row):\n    return row['level'] > 3\n"},
        {"filter": "f.py:keep"},
        ["f.py:2", "KeyError: 'level'", "train.jsonl:1"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_with_data_is_refused_with_its_place_and_a_remedy(name, tmp_path, monkeypatch):
    files, data, parts = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError) as refusal:
        launch(tmp_path, files, **data)
    assert [part for part in parts if part not in str(refusal.value)] == [], refusal.value


def reward(body: str) -> dict[str, Any]:
    return {"r.py": body}


# name: (files, the setting `reward`, parts of the message)
REFUSED_REWARDS: dict[str, tuple[dict[str, Any], Any, list[str]]] = {
    "none": ({}, None, ["reward is empty", "reward=my_reward.py:score"]),
    "file that is missing": ({}, "gone.py:score", ["gone.py", "there is no file"]),
    "misspelt function": ({}, "r.py:scroe", ["r.py has no 'scroe'", "Did you mean score?"]),
    "file without function": ({}, "r.py", ["r.py", "add the function"]),
    "syntax error": (reward("def score(:\n"), REWARD, ["r.py:1", "SyntaxError", "Correct that line"]),
    "not a function": (reward("score = 3\n"), REWARD, ["r.py:score' is a int", "function"]),
    "class": (
        reward("class score:\n    def __call__(self, completion): return 1\n"),
        REWARD,
        ["is a class", "name an instance"],
    ),
    "unclear signature": (
        reward("def score(text, gold): return 1\n"),
        REWARD,
        ["score(text, gold)", "score(completion, answer)", "score(completions, **columns)", "solution_str"],
    ),
    "forms that are mixed": (
        reward("def score(completions, solution_str): return 1\n"),
        REWARD,
        ["mixes the forms of TRL and verl"],
    ),
    "argument that is no column": (
        reward("def score(completion, anser): return 1\n"),
        REWARD,
        ["needs 'anser'", "Did you mean answer?", "prompt, answer"],
    ),
    "positional only": (
        reward("def score(completion, answer, /): return 1\n"),
        REWARD,
        ["passed by name", "`/`"],
    ),
    "argument that is no column of one row": (
        {
            "train.jsonl": lines([{"level": 1} | row for row in numbered(9)]) + lines(numbered(1)),
            "r.py": "def score(completion, level):\n    return float(level)\n",
        },
        REWARD,
        ["train.jsonl:10 has no column 'level'", "r.py:score needs", "data.filter"],
    ),
    "no argument at all": (
        reward("def score():\n    return 1\n"),
        REWARD,
        ["r.py:score()", "no form that is recognised", "score(completion, answer)"],
    ),
    "state of the trainer": (
        reward("def score(completions, trainer_state): return 1\n"),
        REWARD,
        ["trainer_state", "rollout workers, which have none", "default"],
    ),
    "text": (
        reward("def score(completion):\n    return 'good'\n"),
        REWARD,
        ["r.py:2", "'good' (str)", "a number"],
    ),
    "nothing": (reward("def score(completion):\n    pass\n"), REWARD, ["r.py:2", "None", "return a number"]),
    "list": (
        reward("def score(completion):\n    return [1.0]\n"),
        REWARD,
        ["r.py:2", "[1.0] (list)", "a number"],
    ),
    "NaN": (reward("def score(completion):\n    return float('nan')\n"), REWARD, ["r.py:2", "nan", "finite"]),
    "infinity": (
        reward("def score(completion):\n    return -float('inf')\n"),
        REWARD,
        ["r.py:2", "-inf", "return a finite number"],
    ),
    "number too large": (
        reward("def score(completion):\n    return 10**400\n"),
        REWARD,
        ["r.py:2", "1000", "return a finite number"],
    ),
    "generator": (
        reward("def score(completion):\n    yield 1.0\n"),
        REWARD,
        ["r.py:1", "generator", "return a finite number"],
    ),
    "import that is missing": (
        reward("import nunpy\ndef score(completion):\n    return 1\n"),
        REWARD,
        ["r.py:1", "No module named 'nunpy'", "install it"],
    ),
    "file that it reads and that is missing": (
        reward("def score(completion):\n    return float(open('gone.txt').read())\n"),
        REWARD,
        ["r.py:2", "FileNotFoundError", "gone.txt", "train.jsonl:"],
    ),
    "alarm": (
        reward("import signal\ndef score(completion):\n    signal.signal(signal.SIGALRM, print)\n"),
        REWARD,
        ["r.py:3", "main thread"],
    ),
    "endless recursion": (
        reward("def score(completion):\n    return score(completion)\n"),
        REWARD,
        ["r.py:", "RecursionError", "train.jsonl:"],
    ),
    "division by the length of an empty answer": (
        reward("def score(completion):\n    return 1 / len(completion)\n"),
        REWARD,
        ["r.py:2", "ZeroDivisionError", "train.jsonl:"],
    ),
    "number of a batch": (reward(TRL.format("1.0")), REWARD, ["r.py:2", "1.0 (float)", "return a list"]),
    "list of another length": (
        reward(TRL.format("[1.0]")),
        REWARD,
        ["r.py:2", "1 rewards for 3 answers", "one number per answer"],
    ),
    "text in a list": (
        reward(TRL.format("['a'] * len(columns['answer'])")),
        REWARD,
        ["r.py:2", "'a' (str)", "return a number"],
    ),
    "None for every function": (
        reward(TRL.format("[None] * len(completions)")),
        REWARD,
        ["train.jsonl:", "every reward function returned None", "data.filter"],
    ),
    "dict without a score": (
        reward("def score(solution_str, ground_truth):\n    return {'acc': 1}\n"),
        REWARD,
        ["r.py:2", "{'acc': 1}", "'score'"],
    ),
    "raising on one row of a thousand": (
        {
            "train.jsonl": lines(numbered(1000)),
            "r.py": "def score(completion, answer):\n    return 1 / (int(answer) - 617)\n",
        },
        REWARD,
        ["r.py:2", "ZeroDivisionError", "train.jsonl:618", "InfrastructureError"],
    ),
    "messages expected of text": (
        reward(
            "def score(completions, **columns):\n    return [float(c[0]['content'] > '') for c in "
            "completions]\n"
        ),
        REWARD,
        ["r.py:2", "TypeError", "conversational", "'role': 'user'"],
    ),
    "that hangs": (
        reward("import time\ndef score(completion):\n    while True:\n        time.sleep(0.01)\n"),
        REWARD,
        ["r.py:", "score has not returned after 0.3 s", "train.jsonl:", "timeout"],
    ),
    "that hangs and is async": (
        reward("import asyncio\nasync def score(completion):\n    await asyncio.sleep(60)\n"),
        REWARD,
        ["r.py:2", "score has not returned after 0.3 s", "timeout"],
    ),
    "async that raises": (
        reward("async def score(completion):\n    return 1 / 0\n"),
        REWARD,
        ["r.py:2", "ZeroDivisionError"],
    ),
    "exit": (
        reward("import sys\ndef score(completion):\n    sys.exit(3)\n"),
        REWARD,
        ["r.py:3", "SystemExit: 3"],
    ),
    "weight that is NaN": ({}, {REWARD: float("nan")}, ["the weight of r.py:score is nan", "finite number"]),
    "weight that is true": ({}, {REWARD: True}, ["the weight of r.py:score is True"]),
    "weight that is text": ({}, {REWARD: "much"}, ["the weight of r.py:score is 'much'"]),
    "named twice": ({}, [REWARD, REWARD], ["r.py:score twice", "once"]),
    "misspelt ready one": ({}, "exact_mach", ["exact_mach", "Did you mean exact_match?", "file.py:NAME"]),
    "misspelt option": (
        {},
        {"exact_match": {"ignorecase": True}},
        ["exact_match has no option 'ignorecase'", "Did you mean ignore_case?"],
    ),
    "option of a function that it does not take": (
        {},
        {REWARD: {"method": "strict"}},
        ["r.py:score", "'method'", "score(completion, answer)"],
    ),
    "regex without a pattern": ({}, "regex", ["reward=regex needs a pattern"]),
    "regex that is none": ({}, {"regex": {"pattern": "("}}, ["pattern='('", "regular expression"]),
    "regex with two groups": ({}, {"regex": {"pattern": "(a)(b)"}}, ["2 groups", "(?:...)"]),
    "schema that is missing": ({}, "json_schema", ["json_schema needs a schema", "column schema"]),
    "schema that is none": (
        {},
        {"json_schema": {"schema": {"type": "nope"}}},
        ["the schema is not valid", "nope"],
    ),
    "schema file that is missing": (
        {},
        {"json_schema": {"schema": "s.json"}},
        ["there is no file", "s.json"],
    ),
    "scorer without its columns": ({}, "reasoning_gym", ["needs the column metadata", "prompt, answer"]),
}


@pytest.mark.parametrize("name", REFUSED_REWARDS)
def test_a_mistake_with_rewards_is_refused_with_its_place_and_a_remedy(name, tmp_path, monkeypatch):
    files, setting, parts = REFUSED_REWARDS[name]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as refusal:
        launch(tmp_path, files, setting)
    assert [part for part in parts if part not in str(refusal.value)] == [], refusal.value


# name: (files, settings, parts of a note)
NOTED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "a leak": (
        {"test.jsonl": lines([{"prompt": " Say  3.", "answer": "3"}, {"prompt": "new", "answer": "1"}])},
        {"held_out": "test.jsonl"},
        ["LEAK: 1 of 20 rows", "train.jsonl:4 = test.jsonl:1", "Remove them"],
    ),
    "duplicates": (
        {"train.jsonl": lines([*numbered(20), *numbered(2)])},
        {"held_out": "split.jsonl", "shuffle": False},
        ["2 of 22 rows to train on repeat an earlier prompt", "train.jsonl:21 = train.jsonl:1"],
    ),
    "duplicates of held-out rows": (
        {"train.jsonl": lines([*numbered(10), *numbered(10)])},
        {"shuffle": False, "held_out": 0.25},
        ["5 rows repeat held-out prompts and are not trained on"],
    ),
    "some prompts that are too long": (
        {"train.jsonl": with_row(3, {"prompt": "word " * 70, "answer": "1"})},
        {"held_out": "split.jsonl"},
        ["1 of 20 train prompts have more than 50 tokens (the longest 70, train.jsonl:3)"],
    ),
    "rows that a filter leaves out": (
        {"f.py": "def keep(row):\n    return row['answer'] != '3'\n"},
        {"filter": "f.py:keep"},
        ["1 of 20 rows of train.jsonl are left out by data.filter"],
    ),
    "a reward that depends on global state": (
        reward("calls = 0\ndef score(completion):\n    global calls\n    calls += 1\n    return calls\n"),
        {},
        ["score gave one answer 1.0 and then 4.0", "train.jsonl:", "depends on more than its arguments"],
    ),
    "rewards that are all equal": (
        reward("def score(completion):\n    return 0.5\n"),
        {},
        ["all made-up answers to 20 prompts, the right ones among them, got the reward 0.5", "nothing is"],
    ),
    "rewards that are all equal, and no right answer known": (
        reward("def score(completion):\n    return 0.5\n")
        | {"train.jsonl": lines([{"prompt": f"number {n}"} for n in range(20)])},
        {},
        ["all made-up answers to 20 prompts got the reward 0.5"],
    ),
}


def test_the_page_lists_forty_mistakes_that_are_cases_here():
    page = (Path(__file__).parents[3] / "docs/developer/data_mistakes.md").read_text()
    listed = re.findall(r"^\| \d+ \| .*? \| `(.*?)` \|", page, re.MULTILINE)
    assert len(set(listed)) == 40 and set(listed) <= REFUSED.keys() | REFUSED_REWARDS.keys() | NOTED.keys()


@pytest.mark.parametrize("name", NOTED)
def test_what_is_no_fault_but_worth_knowing_is_said(name, tmp_path, monkeypatch):
    files, data, parts = NOTED[name]
    monkeypatch.chdir(tmp_path)
    other = {"split.jsonl": lines([{"prompt": "other", "answer": "1"}])}
    notes = launch(tmp_path, files | other, **data)
    assert any(all(part in note for part in parts) for note in notes), notes


def test_a_note_names_the_template_as_the_origin_of_the_prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (note,) = launch(tmp_path, {}, template="Question: {prompt}")
    assert "(prompt: from data.template, answer: answer)" in note


def test_what_is_in_order_is_not_complained_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch(tmp_path, {}) == [
        "data: 18 rows to train on and 2 held out (prompt: prompt, answer: answer)"
    ]


def test_a_large_file_that_would_fill_the_memory_is_refused_and_jsonl_is_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rows_module, "_LARGEST", 100)
    with pytest.raises(ValueError, match=r"data\.train=t\.json has .* GB.*store it as JSONL"):
        launch(tmp_path, {"t.json": json.dumps(numbered(20))}, train="t.json")
    assert launch(tmp_path, {})


@pytest.mark.parametrize(("library", "file"), [("datasets", "some/id"), ("pyarrow.parquet", "t.parquet")])
def test_a_missing_library_is_named_with_what_installs_it(library, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ValueError, match=f"pip install {library.partition('.')[0]}"):
        launch(tmp_path, {"t.parquet": b""}, train=file)


def test_a_missing_math_verify_is_named_with_what_installs_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r"reward=math_verify needs .* pip install math-verify"):
        launch(tmp_path, {}, "math_verify")


def test_a_split_that_does_not_exist_is_answered_with_those_that_do(tmp_path, monkeypatch):
    from datasets import Dataset, DatasetDict

    monkeypatch.chdir(tmp_path)
    DatasetDict(train=Dataset.from_list(numbered(9)), test=Dataset.from_list(numbered(2))).save_to_disk(
        "saved"
    )
    with pytest.raises(ValueError, match=r"no split 'tets': it has train, test\. Did you mean test\?"):
        launch(tmp_path, {}, train="saved", held_out="split:tets")


def test_a_data_set_that_the_environment_does_not_use_is_refused():
    config = Config(data=DataConfig(train="train.jsonl"), reward=REWARD)
    with pytest.raises(ValueError, match=r"data\.train and reward .* env\.name=swe .* add env=function"):
        _check_function(config)
