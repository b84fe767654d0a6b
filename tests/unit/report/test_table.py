"""A table of runs says what each was, how far it came and what came of it, also of one that never began."""

import json

import pytest

from rlpipe.report.table import run_directories, runs_table

pytestmark = pytest.mark.unit


@pytest.fixture
def root(tmp_path):
    done, refused = tmp_path / "a", tmp_path / "b" / "0"
    for path in (done, refused):
        path.mkdir(parents=True)
        (path / "config.yaml").write_text("recipe: swe_rl\nrun:\n  steps: 2\n")
    records = [
        {"training/global_step": step, "critic/rewards/mean": step / 4, "spec/acceptance_rate": 0.9}
        for step in (1, 2)
    ]
    (done / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    events = [{"kind": "start", "time": 0}, {"kind": "end", "time": 1, "outcome": "done"}]
    (done / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return tmp_path


def test_a_line_says_what_came_of_a_run(root):
    header, done, refused = runs_table([root / "a", root / "b" / "0"]).splitlines()
    assert header.split() == ["run", "recipe", "state", "step", "reward", "held", "out", "acceptance"]
    assert done.split()[1:] == ["swe_rl", "done", "2/2", "0.500", "-", "0.900"]
    assert refused.split()[1:] == ["swe_rl", "not", "begun", "0/2", "-", "-", "-"]


def test_what_sets_runs_apart_stands_last(root):
    table = runs_table([root / "a"], {root / "a": "run.seed=1"}).splitlines()
    assert table[0].endswith("settings") and table[1].endswith("run.seed=1")


def test_run_directories_are_found_at_any_depth(root):
    assert run_directories(root) == [root / "a"]
