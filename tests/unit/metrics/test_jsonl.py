"""The JSONL files survive crashes and full disks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlpipe.metrics.jsonl import MetricsFile, read_jsonl

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
