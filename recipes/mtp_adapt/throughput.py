"""Does throughput follow acceptance? Bebop's Fig. 9b for the pairs of rules that were timed in this project.

    python -m recipes.mtp_adapt.throughput [--json recipes/mtp_adapt/results/throughput.json]

A pair is one model and batch size, decoded with target-only and with rejection in one run. Two gains of
rejection are compared: in accepted tokens per step and in tokens per second. Everything is read from
committed results: stock SGLang on an H100, and the embedded engine on a CPU. Writes the pairs, Pearson's r
and its 95% interval by Fisher's z.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).resolve().parents[2] / "scripts/bench/results"
CPU = ("rollout_speed_1thread.json", "rollout_speed_27m.json")
GPU, SERVER = "gpu_h100.json", "sglang, 7.8B, bf16, gamma 3, 200 tokens"


def pairs() -> list[dict[str, Any]]:
    """Return the pairs, each with its name, gain in accepted tokens per step, ratio of tokens per second."""
    found = []
    batches = json.loads((RESULTS / GPU).read_text())["results"][SERVER]
    for batch, arms in batches.items():
        lengths = arms["acceptance_length"]
        found.append(_pair(f"H100, {SERVER}, batch {batch}", lengths, arms))
    for file in CPU:
        for model, cases in json.loads((RESULTS / file).read_text())["results"].items():
            for case, measured in cases.items():
                rules = {rule: measured["arms"][rule] for rule in ("target_only", "rejection")}
                lengths = {rule: arm["acceptance_length"] for rule, arm in rules.items()}
                speeds = {rule: arm["tokens_per_s"] for rule, arm in rules.items()}
                found.append(_pair(f"CPU, {model}, {case}", lengths, speeds))
    return found


def _pair(name: str, lengths: dict[str, float], speeds: dict[str, float]) -> dict[str, Any]:
    gain = lengths["rejection"] - lengths["target_only"]
    return {
        "pair": name,
        "gain": round(gain, 3),
        "speed": round(speeds["rejection"] / speeds["target_only"], 3),
    }


def correlation(x: Sequence[float], y: Sequence[float]) -> list[float]:
    """Return Pearson's r with the ends of its 95% interval by Fisher's z.

    >>> correlation([0, 1, 2, 3, 4], [0, 1, 2, 3, 5])[0]
    0.986
    """
    r = float(np.corrcoef(x, y)[0, 1])
    reach = 1.96 / math.sqrt(len(x) - 3)
    return [
        round(value, 3) for value in (r, math.tanh(math.atanh(r) - reach), math.tanh(math.atanh(r) + reach))
    ]


def of_pairs(found: Sequence[dict[str, Any]]) -> list[float]:
    """Return `correlation` of gains and speeds."""
    return correlation([pair["gain"] for pair in found], [pair["speed"] for pair in found])


def main() -> None:
    """Read the results, correlate them, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results/throughput.json")
    args = parser.parse_args()
    found = pairs()
    results = {"pairs": found, "r": of_pairs(found)}
    results["r, trained models"] = of_pairs([pair for pair in found if "random" not in pair["pair"]])
    args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(results["r"], results["r, trained models"])


if __name__ == "__main__":
    main()
