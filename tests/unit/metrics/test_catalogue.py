"""The linter of the metrics' catalogue sees a name that only one side has."""

from __future__ import annotations

import ast
import runpy

import pytest

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.unit
LINTER = runpy.run_path(str(ROOT / "scripts" / "check_catalogue.py"))

EMITTING = """
m["actor/pg_loss"] = {f"val/{split}/reward": 1, **stats("critic/score", x), "a text": 3, "a/path": 4}
m["actor/new"] = {f"mtp/{name}/depth_{k}": 2, f"val/{split}/new": 1}
self._event("alarm", step=1)
"""


@pytest.fixture(scope="module")
def nodes() -> list[ast.AST]:
    return list(ast.walk(ast.parse(EMITTING)))


def test_a_declared_name_that_nobody_emits_is_seen(nodes: list[ast.AST]) -> None:
    shapes, composed = LINTER["spelled"](nodes), {"probe/{set}/kl/depth_{k}"}
    emitted = ["actor/pg_loss", "val/{split}/reward", "critic/score/max", "probe/{set}/kl/depth_{k}"]
    phantoms = ["actor/phantom", "mtp/phantom/depth_{k}", "probe/{set}/phantom", "weights/{name}"]
    assert LINTER["never_emitted"](emitted + phantoms, shapes, composed) == phantoms


def test_an_emitted_name_that_nobody_declares_is_seen(nodes: list[ast.AST]) -> None:
    assert LINTER["undeclared"](LINTER["spelled"](nodes)) == ["actor/new", "val/{}/new"]


def test_a_raised_event_is_seen(nodes: list[ast.AST]) -> None:
    assert LINTER["raised"](nodes) >= {"alarm"}
