"""Does adaptive gamma find the best number of drafts at every batch size?

Fixed gamma 0 .. 4 and adaptive gamma (0 .. 4) decode the same prompts with the shipped model at batch sizes 1
to 64, by rejection, 128 tokens a prompt, sampled at temperature 1. Two kinds of prompts make the best gamma
differ: held-out SWE instances, which the draft was trained for, and reasoning tasks, which it was not. Each
arm has its own process and they take turns (see rollout_speed.py). Before it is measured, the adaptive arm
runs --learning extra times, to reach the state that it would have in a run of hours. All arms are launched
--launches times, because two processes of one arm differ by 2% throughout their lives. Two figures are
reported. One is the ratio of adaptive to the best fixed gamma in each cell (median over repeats of the ratio
within a repeat, with its 95% interval; the goal is at least 0.95). The other is the ratio of adaptive to each
fixed gamma over the whole range (geometric mean over cells; the goal is above 1 for each).

    python scripts/bench/adaptive_gamma.py --json OUT [--launches 3] [--repeats 8] [--batches 1 2 4 ...]
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from math import comb
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from drafters import reasoning  # noqa: E402
from harness import bench_parser, load_average, paired_ratio, write_result  # noqa: E402
from rollout_speed import (  # noqa: E402
    NEW_TOKENS,
    EngineArm,
    decoding_provenance,
    measure,
    summary,
    swe_workloads,
    total,
)

from rlpipe.config.paths import resolve  # noqa: E402
from rlpipe.config.spec import SpecConfig, SpecMode  # noqa: E402
from rlpipe.types import SpecCounts  # noqa: E402

MAX_GAMMA = 4


def median_interval(values: list[float]) -> list[float]:
    """Return the median's 95% interval, from order statistics; the full range for less than six values."""
    ordered, n = sorted(values), len(values)
    outside = accumulate(comb(n, k) / 2**n for k in range(n))  # Pr(at most k values are below the median)
    left = next((k for k, chance in enumerate(outside) if chance > 0.025), 0)
    return [round(ordered[max(left - 1, 0)], 3), round(ordered[min(n - left, n - 1)], 3)]


def arms(model: Path, batch: int, threads: int) -> dict[str, Any]:
    """Return, by name, functions that make the arms."""
    specs = {"gamma 0": SpecConfig(mode=SpecMode.NONE)}
    specs |= {f"gamma {gamma}": SpecConfig(gamma=gamma) for gamma in range(1, MAX_GAMMA + 1)}
    specs["adaptive"] = SpecConfig(gamma=MAX_GAMMA, adaptive=True)
    return {name: partial(EngineArm, model, spec, batch, threads, "float32") for name, spec in specs.items()}


def main() -> None:
    """Run the requested cells and write one JSON."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=8, help="of each launch")
    parser.add_argument("--learning", type=int, default=8, help="runs of adaptive before the first repeat")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--shipped", type=Path, default=resolve("shipped:models/tiny"))
    args = parser.parse_args()
    load = load_average()
    workloads = {
        "swe": swe_workloads(args.shipped)["fixed"],
        "reasoning": replace(reasoning(args.shipped), stops=(), max_new_tokens=NEW_TOKENS),
    }
    results: dict[str, Any] = {}
    ratios: dict[str, list[float]] = {}
    for batch, (domain, work) in product(args.batches, workloads.items()):
        prompts = max(batch, 8)  # a run of a small batch would be too short to time
        several = [work.conversations[i % len(work.conversations)] for i in range(prompts)]
        makers = arms(args.shipped, batch, args.threads)
        work = replace(work, conversations=several)
        speeds: dict[str, list[float]] = {arm: [] for arm in makers}
        found: dict[str, list[SpecCounts]] = {arm: [] for arm in makers}
        for _ in range(args.launches):
            measured, counted = measure(
                makers, work, batch, args.threads, args.repeats, {"adaptive": args.learning}
            )
            for arm in makers:
                speeds[arm] += measured[arm]
                found[arm].append(counted[arm])
        counts = {arm: total(each) for arm, each in found.items()}
        rows = {arm: summary(speeds[arm], counts[arm]) for arm in makers}
        fixed = [arm for arm in makers if arm != "adaptive"]
        best = max(fixed, key=lambda arm: rows[arm]["tokens_per_s"])
        against = {arm: paired_ratio(speeds["adaptive"], speeds[arm]) for arm in fixed}
        for arm, ratio in against.items():
            ratios.setdefault(arm, []).append(ratio)
        within = median_interval([a / b for a, b in zip(speeds["adaptive"], speeds[best], strict=True)])
        results[f"{domain}, batch {batch}"] = {
            "arms": rows,
            "best": best,
            "adaptive / best": against[best],
            "adaptive / best, 95% interval": within,
        }
        print(f"{domain}, batch {batch}: adaptive / best ({best}) {against[best]} {within}", flush=True)
        for arm, row in rows.items():
            print(
                f"  {arm:9s} {row['tokens_per_s']:6d} tok/s  {row.get('acceptance_length', '')}", flush=True
            )
        over_all = {arm: round(statistics.geometric_mean(values), 3) for arm, values in ratios.items()}
        report = {
            "question": "adaptive gamma against each fixed gamma over batch sizes, in- and out-of-domain",
            **decoding_provenance(args, load),
            "results": results,
            "adaptive / fixed over all cells": over_all,
        }
        write_result(args.json, report)  # after each cell, as one takes minutes
    print("adaptive / fixed, geometric mean over cells:", over_all)


if __name__ == "__main__":
    main()
