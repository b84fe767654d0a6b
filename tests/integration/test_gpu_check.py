"""scripts/gpu_check without a GPU: its plan, its refusal, its cheap rows at small size, its judgement."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys
from itertools import product

import pytest

from tests.helpers.cli import ROOT
from tests.helpers.sglang import needs_sglang

pytestmark = pytest.mark.integration

GOALS = {
    "verification from Python, batch 8": "<= 30 us",
    "TV loss, 8192 rows of 151936 logits": "<= 3.5 ms",
    "TV loss from hidden states of 4096": "<= 30 ms",
    "TV loss from hidden states of 4096, memory": "<= 1000 MB",
    "fingerprint of 1.5B where it lies": ">= 500 GB/s",
    "embedded engine, shipped model": ">= 10000 tokens/s",
    "embedded engine decodes, shipped model, rejection, batch 64": ">= 10000 tokens/s",
    "peak memory of a trainer against its estimate": "<= 1.1 times",
    "peak memory of training 1.5B on 32768 tokens": "<= 80 GB",
    "SGLang decodes with 7.8B, rejection, batch 64 over rejection, stock": ">= 1.13 times",
    "SGLang decodes with 1.5B, rejection, batch 64 over rejection, stock": ">= 1.25 times",
    "SGLang decodes with 7.8B, rejection, batch 1 over none": ">= 2.5 times",
    "SGLang decodes with 7.8B, rejection, batch 64 over none": ">= 1.5 times",
    "SGLang decodes with 7.8B, rejection, batch 64, step over target_only": "<= 1.05 times",
    "law of 1e6 first tokens of a server": "<= 4.1 as a standard normal score",
    "first tokens behind an EAGLE-3 draft of a part of the vocabulary": "<= 4.1 as a standard normal score",
    "update of 1.5B on one card by ipc: whole": "<= 1 s",
    "update of 1.5B on one card by ipc: server paused": "<= 0.3 s",
    "update of 7.8B on one card by ipc: whole": "<= 3 s",
    "update of 7.8B on one card by ipc: server hash": "passes",
    "loop of 1.5B with SGLang, rejection: weight update": "<= 1 s",
    "loop of 1.5B with SGLang, step of none over rejection": ">= 1.6 times",
}


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
    for size, mode, batch in product(("1.5B", "7.8B"), ("none", "target_only", "rejection"), (1, 8, 32, 64)):
        for arm in (mode, f"{mode}, stock"):
            assert f"SGLang decodes with {size}, {arm}, batch {batch}\n" in done.stdout
    assert "SGLang decodes with 7.8B, block, batch 64\n" in done.stdout
    assert "would be skipped here: no CUDA device" in done.stdout
    goals = dict(re.findall(r"^(\S.*)\n    goal: (.*)$", done.stdout, re.MULTILINE))
    assert {name: goals.get(name) for name in GOALS} == GOALS


def test_without_a_gpu_it_says_what_it_can_do():
    done = gpu_check()
    assert done.returncode == 2
    assert "no CUDA device. --dry-run prints the plan" in done.stderr


def test_rows_of_kernels_and_of_the_engine_run_small_on_a_cpu(tmp_path):
    rows_of = "verification", "embedded", "fingerprint of"
    done = gpu_check("--small", "--only", *rows_of, "--json", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "out").read_text())}
    assert len(rows) == 6
    assert all(row["held"] is None and not row["why"] for row in rows.values())
    assert rows["embedded engine, shipped model"]["value"] > 0
    assert rows["embedded engine decodes, shipped model, rejection, batch 1"]["value"] > 0
    assert rows["fingerprint of 1.5B where it lies"]["value"] > 0


def test_rows_of_servers_run_small_on_a_cpu(tmp_path):
    """A mode of decoding, and the distribution of first tokens, each on a real server."""
    needs_sglang()
    mode = "SGLang decodes with 1.5B, rejection, batch 1"
    done = gpu_check("--small", "--minutes", "20", "--only", mode, "law of", "--json", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "out").read_text())}
    assert rows["SGLang decodes with 1.5B, rejection, batch 1"]["value"] > 0
    assert -9 < rows["law of 1e6 first tokens of a server"]["value"] < 4.1


@pytest.fixture
def script(monkeypatch):
    """scripts/gpu_check as a module."""
    path = ROOT / "scripts" / "gpu_check"
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    monkeypatch.setitem(sys.modules, loader.name, module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    loader.exec_module(module)
    return module


def row_that_writes(script, value, **options):
    """One that needs no GPU: a process that writes this figure."""
    command = f"{{python}} -c \"open('{{out}}', 'w').write('{value}')\""
    return script.Row(
        command=command, small=command, read=lambda out: float(out.read_text()), unit="times", **options
    )


@pytest.mark.parametrize(("step", "held"), [(3.3, True), (3.1, False)])
def test_a_row_over_another_judges_their_ratio(script, tmp_path, step, held):
    row = row_that_writes(script, step, name="none over rejection", over="rejection", goal=1.6, at_most=False)
    how = {"small": False, "folder": tmp_path, "seconds": 60, "cache": {}}
    found = script.run(row, **how, values={"rejection": 2.0})
    assert found.value == pytest.approx(step / 2) and found.held is held
    alone = script.run(row, **how, values={})
    assert alone.held is None and "no figure of the row 'rejection'" in alone.why


def test_rows_whose_small_run_asks_for_a_server_say_so_where_there_is_none(script, tmp_path):
    row = row_that_writes(script, 1, name="update", sglang=True, sglang_small=True)
    assert script.lacks(row, small=True, sglang=False) == [script.NO_SGLANG]
    assert script.lacks(row, small=True, sglang=True) == []
