"""Differences in the tables of the studies on SmolLM2 say what would decide them, where they are open."""

from __future__ import annotations

import sys

import pytest

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.unit


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts/bench"), *sys.path])
    from answers import smollm

    return smollm


@pytest.mark.parametrize(
    ("ends", "count", "text"),
    [
        ([0.2, 0.1, 0.3], 2, "+0.200 [+0.100, +0.300]"),
        ([-0.2, -0.3, -0.1], 2, "-0.200 [-0.300, -0.100]"),
        ([0.1, -0.1, 0.3], 9, "+0.100 [-0.100, +0.300] (9 seeds)"),
        ([0.0, -0.1, 0.1], None, "+0.000 [-0.100, +0.100] (more than 200 seeds)"),
    ],
)
def test_an_interval_with_0_is_followed_by_the_seeds_that_would_decide(answers, ends, count, text):
    row = {"minus kl": ends, "seeds to decide, minus kl": count}
    assert answers.difference(row, "kl", "seeds") == text
    assert answers.difference(row, "tv", "seeds") == "–"
