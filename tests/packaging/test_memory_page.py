"""docs/memory.md is what its script prints."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.packaging


def test_the_page_shows_what_the_estimate_says():
    spec = importlib.util.spec_from_file_location("memory_table", ROOT / "scripts" / "memory_table.py")
    script = sys.modules["memory_table"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (ROOT / "docs" / "memory.md").read_text()
    assert page == "\n".join(script.page()) + "\n"
    assert len([line for line in page.splitlines() if line.startswith("| ")]) == 1 + 5 * 4
