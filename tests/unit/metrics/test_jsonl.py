"""The JSONL files survive crashes and full disks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlpipe.metrics.jsonl import MetricsFile, read_jsonl, truncate_records
from rlpipe.report.write import write_report

pytestmark = pytest.mark.unit


def test_a_line_cut_by_a_crash_costs_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    sink = MetricsFile(path)
    sink.open()
    sink.record({"a": 3})
    sink.close()
    assert read_jsonl(path) == ([{"a": 1}, {"a": 3}], 1)


def test_a_short_write_is_an_error_and_the_next_line_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = MetricsFile(path)
    sink.open()
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: real(file, data[:4]))
        with pytest.raises(OSError, match="disk full"):
            sink.record({"a": 1})
    sink.record({"a": 2})
    sink.close()
    assert read_jsonl(path) == ([{"a": 2}], 1)


def test_every_record_is_on_disk_before_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = MetricsFile(path)
    sink.open()
    for n in range(3):
        sink.record({"n": n})
        assert len(read_jsonl(path)[0]) == n + 1
    sink.close()


def test_a_missing_file_reads_as_empty(tmp_path: Path) -> None:
    assert read_jsonl(tmp_path / "none.jsonl") == ([], 0)


ODD = [
    "[1, 2]",
    "null",
    '"text"',
    '{"training/global_step": "two", "time": 1}',
    '{"training/global_step": 2, "time": "noon"}',
    "[" * 100_000,
    "1" * 10_000,
]


def test_odd_lines_are_left_out_and_counted_and_odd_values_read_as_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = (
        '{"training/global_step": 1, "time": 1.5, "a": NaN, "b": 1e999, "c": -7, "d": "x\\ud800y", "e": 0.1}'
    )
    path.write_text("\n".join([*ODD, good, ""]))
    item = {"training/global_step": 1, "time": 1.5, "a": None, "b": None, "c": -7, "d": "x?y", "e": 0.1}
    assert read_jsonl(path) == ([item], len(ODD))


def test_a_resume_passes_over_odd_lines_and_names_them(tmp_path: Path) -> None:
    steps = [f'{{"training/global_step": {n}, "time": {n}}}' for n in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([steps[0], "[1]", *steps[1:], ""]))
    played = [f'{{"step": {n}, "turns": []}}' for n in (1, 2, 3)]
    (tmp_path / "trajectories.jsonl").write_text("\n".join([played[0], '{"reward": 1}', *played[1:], ""]))
    assert truncate_records(tmp_path, 2) == ["metrics.jsonl:2", "trajectories.jsonl:2"]
    assert (tmp_path / "metrics.jsonl").read_text() == "\n".join([steps[0], "[1]", steps[1], ""])
    assert (tmp_path / "trajectories.jsonl").read_text() == "\n".join(
        [played[0], '{"reward": 1}', played[1], ""]
    )


def test_there_is_a_report_whatever_the_files_hold(tmp_path: Path) -> None:
    for name in ("metrics", "events", "trajectories"):
        lines = [
            *ODD,
            '{"kind": 7, "time": 1, "level": "info"}',
            '{"kind": "alarm", "time": 1, "level": {}}',
            '{"kind": "advice", "time": 2, "level": "warning", "text": "\\ud800", "step": {}}',
            '{"kind": "alarm", "time": NaN, "level": {}, "text": "\\ud800"}',
            '{"step": 1, "turns": [{"action": "\\udfff", "observation": 5}], "reward": NaN}',
            '{"step": 1, "turns": [{"action": "ls"}], "reward": "one", "instance_id": [], "info": 5}',
            '{"step": 1, "turns": 7}',
            '{"training/global_step": 1, "time": 1, "critic/score/mean": NaN, "spec/num_accepted": [1]}',
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*lines, ""]))
    write_report([tmp_path], tmp_path / "report.html")
    assert "unreadable line(s)" in (tmp_path / "report.html").read_text()
