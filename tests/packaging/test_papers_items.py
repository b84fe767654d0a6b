"""The list of the papers' items: each has a state; a complete one has code and a test or a result."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/developer/papers_items.md").read_text()
ROW = re.compile(r"^\| (\d+) \| (.*) \| (complete|absent) \| (.*?) \| (.*?) \| (.*?) ?\|$", re.MULTILINE)
ROWS = {int(row[0]): row[1:] for row in ROW.findall(PAGE)}


def test_all_items_are_there_once_and_counted():
    assert list(ROWS) == list(range(1, 198)) and len(ROW.findall(PAGE)) == 197
    counts = Counter(row[1] for row in ROWS.values())
    assert f"{counts['complete']} are complete, {counts['absent']} absent" in PAGE

    # What was measured without a language model is counted where the states are.
    worlds = sum("in enumerated worlds" in row[4] for row in ROWS.values() if row[1] == "complete")
    assert f"{worlds} of the complete ones" in PAGE

    areas = re.findall(r"^\| [^|]+ \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert [sum(int(a[i]) for a in areas) for i in (0, 1)] == [counts["complete"], counts["absent"]]


@pytest.mark.parametrize("number", [n for n, row in ROWS.items() if row[1] == "complete"])
def test_a_complete_item_names_code_and_a_test_or_a_result_that_exist(number):
    _, _, code, tests, remark = ROWS[number]
    paths = re.findall(r"`([^`]+)`", code)
    assert paths and all((ROOT / path).is_file() for path in paths), paths

    results = re.findall(r"\[result\]\(\.\./\.\./([^)]+)\)", remark)
    named = [part.split(" ") for part in tests.split("; ") if part]
    assert results or named
    for path in results:
        assert (ROOT / path).is_file(), path
    for file, *name in named:
        text = (ROOT / "tests" / file.strip("`")).read_text()
        assert not name or f"def {name[0]}(" in text, (file, name)


def test_an_absent_item_says_why():
    for number, row in ROWS.items():
        if row[1] == "absent":
            assert len(row[4]) > 10, number
