"""OBRS and the decoupled actor with an SGLang server: one real run of each.

    python -m recipes.jackpot.servers [--runs runs/jackpot_servers] [--out recipes/jackpot] [key=value ...]

`obrs` is swe_rl with OBRS as its correction, so the server returns `algo.obrs.top_k` logprobs with every
sampled token. `decoupled` is the recipe jackpot: one server generates with the actor, and a second one
validates the policy. Rollouts may be one step old. Needs `scripts/install_sglang`. Finished runs are not
repeated. Writes servers.json: means over the steps of each run, its held-out reward, and counts of faults.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from recipes.runs import play, records, validation

RUNS = {"obrs": ("swe_rl", ["algo.correction=obrs"]), "decoupled": ("jackpot", [])}
BASE = ["rollout=sglang", "rollout.device=cpu", "run.steps=12", "val.every=12", "run.save_every=0"]
BASE += ["env.held_out_files=[shipped:data/swe/held_instances.jsonl]", "val.instances=40"]
FIGURES = {
    "accepted": "rollout_corr/obrs_acceptance",
    "KL before": "rollout_corr/obrs_kl_before",
    "KL after": "rollout_corr/obrs_kl_after",
    "Z, estimated over exact": "rollout_corr/obrs_z_ratio",
    "KL of policy and actor": "decoupled/kl",
    "seconds a step": "timing_s/step",
}


def measured(directory: Path) -> dict[str, Any]:
    """Return the figures of one run: means over its steps, held-out rewards, and counts of faults."""
    lines, steps = records(directory)
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    faults = Counter(event["kind"] for event in events if event["level"] == "fault")
    values = {
        title: [step[name] for step in steps if isinstance(step.get(name), float)]
        for title, name in FIGURES.items()
    }
    return {
        "steps": len(steps),
        "held_out": validation(lines),
        "faults": dict(faults),
        "means": {title: round(sum(v) / len(v), 5) for title, v in values.items() if v},
    }


def main() -> None:
    """Run what is missing, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/jackpot_servers"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("overrides", nargs="*", help="further settings of both runs, key=value")
    args = parser.parse_args()

    results = {"settings": [*BASE, *args.overrides], "runs": {}}
    for name, (recipe, settings) in RUNS.items():
        directory = play(recipe, args.runs.resolve() / name, *BASE, *settings, *args.overrides)
        results["runs"][name] = measured(directory)
        print(name, json.dumps(results["runs"][name]), flush=True)
    (args.out / "servers.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
