"""scripts/gpu_check without a GPU: its plan, its refusal, and rows at small size.

Its judgement and the arithmetic of every row: tests/unit/bench/test_gpu_plan.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from rlpipe.config.paths import shipped
from tests.helpers.cli import ROOT
from tests.helpers.engines import generate, request, running_engine
from tests.helpers.sglang import needs_sglang

pytestmark = pytest.mark.integration


def gpu_check(*options):
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu_check", *options],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def small_rows(folder, *names):
    """Figures by row and name of rows that all ran small."""
    done = gpu_check("--small", "--minutes", "20", "--only", *names, "--json", folder / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((folder / "out").read_text())["rows"]
    assert all(row["outcome"] == "done" for row in rows)
    return {row["name"]: {figure["name"]: figure for figure in row["figures"]} for row in rows}


def test_the_plan_is_printed_with_its_goals_and_what_is_missing():
    done = gpu_check("--dry-run")
    assert done.returncode == 0
    for text in (
        "decoding of 7.8B, rejection and none: ",
        "    rejection / none, batch 64: >= 1.5 times\n",
        "    server paused: <= 0.2 s\n",
        "    would be skipped here: no CUDA device\n",
    ):
        assert text in done.stdout


def test_without_a_gpu_it_names_what_it_can_do():
    done = gpu_check()
    assert done.returncode == 2
    assert "no CUDA device. --dry-run prints the plan" in done.stderr


def test_rows_without_servers_run_small_on_a_cpu(tmp_path):
    found = small_rows(tmp_path, "MoE", "embedded", "save and resume")
    assert len(found) == 3
    values = {name: {key: figure["value"] for key, figure in row.items()} for name, row in found.items()}
    assert values["embedded engine, shipped model"]["rejection, batch 1"] > 0
    saved = values["save and resume of 1.5B, distributed optimizer"]
    assert saved["added on the host"] > 0 and saved["norm after resuming, off by"] < 1e-4
    assert all(figure["held"] is None for row in found.values() for figure in row.values())


def test_tokens_across_updates_bear_their_versions_on_a_server_of_this_machine(tmp_path):
    """A real server; a CPU's does not overlap its steps, so the figure of a GPU may differ."""
    needs_sglang()
    (row,) = small_rows(tmp_path, "versions of tokens").values()
    assert row["wrong"]["value"] == 0 and row["turns across an update"]["value"] >= 1


def test_drafts_of_real_contexts_are_accepted_as_in_use_and_those_of_random_ids_are_not():
    """What a bench of random prompts measured was the cost of drafts, and little of what they gain."""
    contexts = json.loads((ROOT / "scripts" / "bench" / "contexts.json").read_text())[:8]
    random = np.random.default_rng(0).integers(0, 64, (8, 64)).tolist()
    tokens_per_step = []
    for prompts in (contexts, random):
        with running_engine(shipped("models") / "tiny", max_context=512) as engine:
            turns = generate(engine, *(request(n, p, max_new_tokens=40) for n, p in enumerate(prompts)))
        steps = sum(turn.spec.verify_steps for turn in turns)
        tokens_per_step.append(sum(len(turn.output_ids) for turn in turns) / steps)
    assert tokens_per_step[0] > 3 > 2.5 > tokens_per_step[1]
