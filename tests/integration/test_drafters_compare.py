"""The comparison of drafters through its command line, with the arms that need no training."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helpers.cli import ROOT, environment

pytestmark = pytest.mark.integration


def test_arms_without_training_are_measured_at_once(tmp_path):
    command = [sys.executable, str(ROOT / "recipes/drafters/compare.py"), "--arms", "suffix"]
    command += ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    command += ["--conversations", "3", "--repeats", "1", "--eval-batch", "2"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["cost"]["suffix"]["2"]["step"] > 1 and found["cost"]["suffix"]["2"]["draft"] == 0
    assert len(found["cells"]) == 4
    for cell in found["cells"].values():
        none, suffix = cell["arms"]["none"], cell["arms"]["suffix"]
        assert none["tokens_per_s"] > 0 and "acceptance_length" not in none
        length, error = suffix["acceptance_length"]
        assert 1 <= length < 4 and error is not None
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["settings.json"]
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.count("| suffix |") == 2 + 4 and table in done.stdout
