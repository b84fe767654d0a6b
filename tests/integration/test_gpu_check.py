"""scripts/gpu_check without a GPU: its plan, its refusal, its cheap rows at small size, its judgement."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.integration


def gpu_check(*options):
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu_check", *options],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_plan_names_every_gpu_test_file_and_every_goal():
    done = gpu_check("--dry-run")
    assert done.returncode == 0
    for file in (ROOT / "tests" / "gpu").glob("test_*.py"):
        assert f"tests/gpu/{file.name}\n" in done.stdout
    assert "weight update" in done.stdout and "goal: <= 30 us" in done.stdout
    assert "SGLang decodes with 7.8B, block, batch 64\n" in done.stdout
    assert "would be skipped here: no CUDA device" in done.stdout


def test_without_a_gpu_it_says_what_it_can_do():
    done = gpu_check()
    assert done.returncode == 2
    assert "no CUDA device. --dry-run prints the plan" in done.stderr


def test_rows_of_a_kernel_and_of_the_engine_run_small_on_a_cpu(tmp_path):
    done = gpu_check("--small", "--only", "verification", "embedded", "--json", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "out").read_text())}
    assert len(rows) == 2
    assert all(row["held"] is None and not row["why"] for row in rows.values())
    assert rows["embedded engine, shipped model"]["value"] > 0
