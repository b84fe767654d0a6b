"""Every promise of the documents names a test, and that test exists."""

import re

import pytest

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.packaging
PAGES = [ROOT / "docs" / "developer" / "promises.md"]
DEFINED = {
    name
    for file in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^ *(?:async )?def (test_\w+)", file.read_text(), flags=re.MULTILINE)
}
_NAMED = re.compile(r"`((?:tests/[\w/]+/)?test_\w+(?:\.py)?)`")


def missing(text):
    """Names of tests in a text that no file of tests defines."""
    return [
        name
        for name in _NAMED.findall(text)
        if not (
            list((ROOT / "tests").rglob(name.rpartition("/")[2])) if name.endswith(".py") else name in DEFINED
        )
    ]


def unproven(text):
    """Rows of tables with a last column `test` that name none and do not refer to the row above."""
    rows = []
    for table in re.findall(r"^\|[^\n]*\| test \|\n\|[-|]+\|\n((?:\|[^\n]*\n)+)", text, flags=re.MULTILINE):
        for row in table.splitlines():
            proof = row.strip("|").split(" | ")[-1].strip(" |")
            if not (_NAMED.search(proof) or proof.startswith("the same")):
                rows.append(row)
    return rows


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_promise_names_a_test_that_exists(page):
    text = page.read_text()
    assert len(_NAMED.findall(text)) > 10, "the page names its tests"
    assert missing(text) == [] and unproven(text) == []


def test_a_promise_without_a_test_is_found():
    table = "| promise | test |\n|---|---|\n| a | `test_a_promise_without_a_test_is_found` |\n| b | soon |\n"
    assert unproven(table) == ["| b | soon |"] and missing(table) == []
    assert missing("`test_gone`, `tests/unit/test_gone.py`, `tests/packaging/test_promises.py`") == [
        "test_gone",
        "tests/unit/test_gone.py",
    ]
