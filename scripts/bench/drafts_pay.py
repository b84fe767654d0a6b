"""Do drafts pay on a real model, at which batch and temperature, and what acceptance would each batch need?

    python scripts/bench/drafts_pay.py --model DIR --json OUT [--draft-vocab FILE] [--gammas 1 2 3]

Measures tokens a second with drafts (each gamma, and adaptive up to the largest) over no drafts, with the
embedded engine in bfloat16. Arms run in separate processes and take turns within a repeat (`rollout_speed`);
a ratio is the median over repeats of the ratio within a repeat. Also reports the acceptance at which a gamma
breaks even, from the costs that the adaptive arm measured at its start (`break_even_acceptance`), and the
measured acceptance by depth.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from generation_speed import chat_workload  # noqa: E402
from harness import bench_parser, load_average, paired_ratio, provenance, write_result  # noqa: E402
from rollout_speed import EngineArm, Workload, decode_in_turns, start_arms, summary, total  # noqa: E402

from rlpipe.config.openmp import spin_briefly  # noqa: E402
from rlpipe.config.spec import SpecConfig, SpecMode  # noqa: E402
from rlpipe.spec.gamma import break_even_acceptance  # noqa: E402


class CostsArm(EngineArm):
    """The adaptive arm; a run without work returns the costs that it measured instead of a speed."""

    def run(self, work: Workload | None, batch: int) -> Any:
        """Decode the work; without work, return seconds by (batch, gamma)."""
        return (0, self.costs) if work is None else super().run(work, batch)


def main() -> int:
    """Run all cells, print and write the result; return the exit status."""
    parser = bench_parser(__doc__, repeats=3)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--gammas", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.7, 0.0])
    parser.add_argument("--draft-vocab", default="", help="as spec.draft_vocab")
    args = parser.parse_args()

    spin_briefly()
    load, results, needed = load_average(), {}, {}
    for batch in args.batches:
        vocab = {"draft_vocab": args.draft_vocab}
        specs = {"none": SpecConfig(mode=SpecMode.NONE)}
        specs |= {f"gamma {gamma}": SpecConfig(gamma=gamma, **vocab) for gamma in args.gammas}
        arms = {
            name: partial(EngineArm, args.model, spec, batch, args.threads, "bfloat16")
            for name, spec in specs.items()
        }
        adaptive = SpecConfig(gamma=max(args.gammas), adaptive=True, **vocab)
        arms["adaptive"] = partial(CostsArm, args.model, adaptive, batch, args.threads, "bfloat16")

        running = start_arms(arms, args.threads)
        _, costs = running["adaptive"].run(None, batch)
        needed |= {
            f"batch {rows}, gamma {gamma}": value
            for (rows, gamma), value in break_even_acceptance(costs).items()
            if rows == batch
        }
        print(f"batch {batch}, acceptance needed: {needed}", flush=True)

        for temperature in args.temperatures:
            work = chat_workload(args.model, max(batch, 2), tokens=args.tokens, temperature=temperature)
            speeds, counts = decode_in_turns(running, work, batch, args.repeats)
            rows = {arm: summary(speeds[arm], total(counts[arm])) for arm in arms}
            ratios = {arm: round(paired_ratio(speeds[arm], speeds["none"]), 3) for arm in arms}
            best = max(ratios[arm] for arm in arms if arm != "adaptive")
            results[f"T={temperature}, batch {batch}"] = {
                "arms": rows,
                "over none": ratios,
                "adaptive over best": round(ratios["adaptive"] / best, 3),
            }
            print(f"T={temperature}, batch {batch}: {ratios}", flush=True)
        for arm in running.values():
            arm.close()

    report = {
        "question": "tokens per second with drafts over none on a real model, and the acceptance they need",
        **provenance(args, load, packages=("torch",)),
        "break_even_acceptance": needed,
        "results": results,
    }
    write_result(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
