"""Figures 3 and 8 by one command from run directories, with the numbers of a known truth."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.cli import ROOT, environment
from tests.helpers.synthetic_runs import synthetic_run

pytestmark = pytest.mark.unit
SCRIPT = ROOT / "recipes" / "mtp_adapt" / "figures.py"


def recorded(path: Path, steps: int = 120, **law: float) -> str:
    """A run directory whose acceptance follows a law that is known."""
    run = synthetic_run(np.random.default_rng(3), sigma=0.002, steps=steps, **law)
    path.mkdir()
    records = [
        {"training/global_step": int(s), "spec/acceptance_rate": float(a), "rollout/entropy": float(h)}
        for s, a, h in zip(run.steps, run.observed, run.entropy, strict=True)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return f"{path.name}={path}"


def draw(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )


def test_one_command_makes_both_figures_and_finds_the_law(tmp_path: Path) -> None:
    steep = recorded(tmp_path / "target_only", slope=-0.4, entropy_drift=0.2)
    flat = recorded(tmp_path / "e2e_tv", slope=-0.05, mismatch_drift=-0.1)
    done = draw(tmp_path, steep, flat, "--json", "out.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    for label, slope in (("target_only", -0.4), ("e2e_tv", -0.05)):
        assert found[label]["slope"]["low"] <= slope <= found[label]["slope"]["high"]
        parts = found[label]["entropy"]["value"] + found[label]["mismatch"]["value"]
        assert parts == pytest.approx(found[label]["total"]["value"], abs=2e-4)
    assert found["target_only"]["entropy"]["high"] < 0 and found["e2e_tv"]["mismatch"]["high"] < 0
    picture = (tmp_path / "figures.svg").read_text()
    assert picture.count("<path") > 50 and "Fig" in picture


def test_a_run_that_is_too_short_is_refused(tmp_path: Path) -> None:
    short = recorded(tmp_path / "short", steps=120)
    lines = (tmp_path / "short" / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "short" / "metrics.jsonl").write_text("\n".join(lines[:5]) + "\n")
    done = draw(tmp_path, short)
    assert done.returncode == 2 and "fewer than 12 steps with drafts" in done.stderr
