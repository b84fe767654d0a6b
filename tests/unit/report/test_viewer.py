"""The viewer shows what rollouts recorded of every token, and older runs by their texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpipe.metrics.runs import load_run
from rlpipe.report import viewer
from rlpipe.report.viewer import shown_trajectories, viewer_html
from tests.helpers.long_run import make_long_run

pytestmark = pytest.mark.unit


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_long_run(tmp_path / "run", steps=12, per_step=2, tokens=20)


def test_a_turn_of_the_model_carries_every_token_and_what_is_known_of_it(run: Path) -> None:
    recorded = json.loads((run / "rollouts" / "step_000003.jsonl").read_text().splitlines()[1])
    (shown,) = [
        t for t in shown_trajectories([load_run(run)]) if t["step"] == 3 and t["instance_id"] == "task-1"
    ]
    user, first, tool, second = shown["turns"]
    assert user == {"role": "user", "text": recorded["turns"][0]["text"]}
    assert tool == {"role": "tool", "text": recorded["turns"][2]["text"]}
    for turn, (begin, end) in zip((first, second), ([12, 22], [32, 42]), strict=True):
        assert turn["tokens"] == recorded["token_texts"][begin:end]
        assert turn["a"] == recorded["accepted"][begin:end]
        assert turn["e"] == [round(100 * h) for h in recorded["entropies"][begin:end]]
        assert turn["p"] == [round(-100 * p) for p in recorded["rollout_logprobs"][begin:end]]
    assert (first["v"], second["v"]) == ([[2, 10]], [[3, 10]])
    assert shown["reward"] == recorded["reward"] and shown["exit"] == "done" and "tamper" not in shown


def test_what_an_attempts_changes_touch_is_shown(run: Path) -> None:
    file = run / "rollouts" / "step_000003.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    records[0]["info"]["tamper"] = "exit frames"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    shown = [t["tamper"] for t in shown_trajectories([load_run(run)]) if "tamper" in t]
    assert shown == ["exit frames"]


@pytest.mark.parametrize("drafts", [None, []], ids=["not recorded", "none"])
def test_without_drafts_there_is_no_acceptance_to_colour(run: Path, drafts: list | None) -> None:
    """A run without speculation records that no token was drafted."""
    for file in (run / "rollouts").iterdir():
        records = [json.loads(line) for line in file.read_text().splitlines()]
        accepted = None if drafts is None else [min(depth, 0) for depth in records[0]["accepted"]]
        lines = [record | {"drafts": drafts, "accepted": accepted} for record in records]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = shown_trajectories([load_run(run)])
    assert not any("a" in turn for t in shown for turn in t["turns"])
    assert "colour: entropy" in viewer_html(shown) and "colour: acceptance" not in viewer_html(shown)


def test_rollouts_without_token_texts_are_shown_by_their_texts(run: Path) -> None:
    for file in (run / "rollouts").iterdir():
        lines = [json.loads(line) | {"token_texts": None} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = shown_trajectories([load_run(run)])
    assert len(shown) == 24 and all("text" in turn for t in shown for turn in t["turns"])
    assert "v-colour" not in viewer_html(shown)


def test_a_masked_trajectory_says_so(run: Path) -> None:
    file = run / "rollouts" / "step_000001.jsonl"
    line = json.loads(file.read_text().splitlines()[0]) | {"status": "masked", "reward": None}
    file.write_text(json.dumps(line) + "\n")
    shown = shown_trajectories([load_run(run)])[0]
    assert (shown["status"], shown["reward"]) == ("masked", None)


def test_only_as_many_files_are_read_as_the_budget_allows_spread_over_the_run(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = sum(file.stat().st_size for file in (run / "rollouts").iterdir())
    monkeypatch.setattr(viewer, "MAX_READ_BYTES", whole / 4)
    steps = [t["step"] for t in shown_trajectories([load_run(run)])]
    assert len(set(steps)) in (2, 3) and max(steps) - min(steps) >= 4


def test_a_run_without_trajectories_has_no_viewer() -> None:
    assert viewer_html([]) == ""


def test_what_the_verifier_said_stands_behind_the_last_turn():
    from rlpipe.report.viewer import _row

    info = {"exit_reason": "done", "test_report": "2 of 3 passed", "unreadable": ""}
    row = _row({"reward": 0, "group_id": "g1", "turns": [{"role": "user", "text": "x"}], "info": info}, "")
    assert (
        row["turns"][-1] == {"role": "verifier", "text": "test_report: 2 of 3 passed"}
        and row["group"] == "g1"
    )
