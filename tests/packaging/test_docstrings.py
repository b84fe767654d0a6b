"""Docstrings are sentences that say what a thing is."""

from __future__ import annotations

import ast

import pytest

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.packaging
OPENINGS = ("Of ", "As ", "See ")


def dangling(source: str) -> list[str]:
    """First lines of docstrings that open with a word that refers to something else."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = (ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, nodes))
    return [text.splitlines()[0] for text in docstrings if text and text.startswith(OPENINGS)]


def test_no_docstring_opens_with_of_as_or_see():
    assert dangling('def f():\n    """Of one run."""') == ["Of one run."]
    files = [path for folder in ("rlpipe", "recipes", "scripts") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    assert {
        str(path.relative_to(ROOT)): found for path in files if (found := dangling(path.read_text()))
    } == {}
