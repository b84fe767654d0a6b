"""How many drafts does a tree accept at temperature 0, and does it pay, compared with a chain?

    python scripts/bench/greedy_trees.py --model DIR --json OUT [--work chat] [--batches 1 8]

Arms of the embedded engine decode the same prompts at temperature 0: no drafts, a chain of three
(`greedy`), a chain of six (as many drafts as the smallest tree has), and trees. All of them emit the argmax
of the target (the engine's tests check this), so only the number of accepted drafts differs. Arms run in
separate processes and take turns within a repeat (`rollout_speed`); a ratio is the median over repeats of the
ratio within a repeat. `--work turns` continues conversations about held-out SWE instances (the shipped
model); `--work chat` answers requests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from generation_speed import chat_workload  # noqa: E402
from harness import bench_parser, load_average, paired_ratio, provenance, write_result  # noqa: E402
from rollout_speed import (  # noqa: E402
    EngineArm,
    Workload,
    decode_in_turns,
    start_arms,
    summary,
    swe_workloads,
    total,
)

from rlpipe.config.openmp import spin_briefly  # noqa: E402
from rlpipe.config.spec import SpecConfig, SpecMode  # noqa: E402

CHAINS = (3, 6)
TREES = ([2, 1, 1], [2, 2, 1], [4, 2, 1])


def specs() -> dict[str, SpecConfig]:
    """Return the arms; the name of a tree lists its number of drafts at each depth."""
    arms = {"none": SpecConfig(mode=SpecMode.NONE)}
    arms |= {f"chain of {gamma}": SpecConfig(mode=SpecMode.GREEDY, gamma=gamma) for gamma in CHAINS}
    return arms | {
        f"tree {'-'.join(map(str, tree))}": SpecConfig(mode=SpecMode.TREE, tree=tree) for tree in TREES
    }


def workload(model: Path, kind: str, *, batch: int, rounds: int, tokens: int) -> Workload:
    """Return the prompts of a run, decoded at temperature 0."""
    if kind == "chat":
        return chat_workload(model, batch * rounds, tokens=tokens, temperature=0.0)
    work = swe_workloads(model)["turns"]
    several = [work.conversations[i % len(work.conversations)] for i in range(batch * rounds)]
    return replace(work, conversations=several, temperature=0.0)


def main() -> int:
    """Run all batches, print and write the result; return the exit status."""
    parser = bench_parser(__doc__, repeats=3)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", choices=["chat", "turns"], default="chat")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer, with --work chat")
    parser.add_argument("--rounds", type=int, default=3, help="prompts per row and repeat")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()

    spin_briefly()
    load, results = load_average(), {}
    for batch in args.batches:
        arms: dict[str, Callable[[], Any]] = {
            name: partial(EngineArm, args.model, spec, batch, args.threads, args.dtype)
            for name, spec in specs().items()
        }
        work = workload(args.model, args.work, batch=batch, rounds=args.rounds, tokens=args.tokens)

        running = start_arms(arms, args.threads)
        speeds, counts = decode_in_turns(running, work, batch, args.repeats)
        for arm in running.values():
            arm.close()

        rows = {name: summary(speeds[name], total(counts[name])) for name in arms}
        ratios = {name: round(paired_ratio(speeds[name], speeds["none"]), 3) for name in arms}
        results[f"batch {batch}"] = {"arms": rows, "over none": ratios}
        print(f"batch {batch}: {ratios}", flush=True)
        for name, row in rows.items():
            print(f"  {name:16s} {row}", flush=True)

    report = {
        "question": "accepted drafts and speed of trees and chains at temperature 0",
        **provenance(args, load, packages=("torch",)),
        "results": results,
    }
    write_result(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
