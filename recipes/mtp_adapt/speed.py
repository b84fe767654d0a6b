"""How much does adaptation speed up a rollout: acceptance length and tokens a second, before and after?

    python recipes/mtp_adapt/speed.py --before shipped:models/tiny --after runs/adapted/model --json OUT

The benchmark is scripts/bench/rollout_speed.py with its `turns` workload, conversations about held-out SWE
instances. The arms are: no drafts, then each draft in each mode. Arms run in separate processes and take
turns within a repeat; a ratio is the median over repeats of the ratio within the repeat.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))

import rollout_speed as bench

from rlpipe.config.paths import resolve
from rlpipe.config.spec import SpecConfig, SpecMode

MODES = (SpecMode.REJECTION, SpecMode.TARGET_ONLY)


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", default="shipped:models/tiny")
    parser.add_argument("--after", required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    load, models = os.getloadavg(), {"before": resolve(args.before), "after": resolve(args.after)}
    work = bench.swe_workloads(models["before"])["turns"]
    work.conversations = work.conversations[: 3 * args.batch]

    def arm(model: Path, mode: SpecMode) -> partial:
        spec = SpecConfig(mode=mode, gamma=bench.GAMMA)
        return partial(bench.EngineArm, model, spec, args.batch, args.threads, args.dtype)

    arms = {"none": arm(models["before"], SpecMode.NONE)}
    arms |= {f"{name}, {mode}": arm(models[name], mode) for mode in MODES for name in models}
    speeds, counts = bench.measure(arms, work, args.batch, args.threads, args.repeats)
    rows = {name: bench.summary(speeds[name], counts[name]) for name in arms}
    ratios = {
        str(mode): bench.paired_ratio(speeds[f"after, {mode}"], speeds[f"before, {mode}"]) for mode in MODES
    }
    for name, row in rows.items():
        print(f"{name:22s} {row}")
    print(f"tokens per second, after / before: {ratios}")
    if args.json:
        question = "tokens per second and acceptance of rollouts, before and after adaptation"
        report = {
            "question": question,
            **bench.decoding_provenance(args, load),
            "arms": rows,
            "after / before": ratios,
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
