"""Runs of smollm_rl with drafts, frozen or trained during RL: acceptance by depth, step time and the split.

    python -m recipes.smollm_adapt.along [--runs runs/smollm_along] [--out DIR] [key=value ...]

One run per arm, synchronous, so each arm has its own policy; `replay` compares drafts at equal policies, over
several runs. The dashboards (report.html, and W&B with `metrics.wandb=offline`) are in the run directories.
Finished runs are not repeated. Writes along.json: means over the first and the last third of the steps, and
the split of the change at the last step, in the form [value, low, high].
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from recipes.runs import play, records
from rlpipe.diagnosis.acceptance_split import OVERALL, STEP, of_run
from rlpipe.metrics.runs import load_run

STEPS, DEPTHS = 12, 3
BASE = [f"run.steps={STEPS}", f"val.every={STEPS}", "val.instances=10", f"spec.gamma={DEPTHS}"]
BASE += ["spec.draft_vocab=checkpoint", "metrics.wandb=offline", "rollout.threads=1", "trainer.threads=1"]
ARMS = {
    "frozen": ["spec.mode=rejection", "draft.train=off"],
    "e2e_tv": ["spec.mode=rejection", "draft.train=online", "draft.objective=e2e_tv"],
    "hard_ce": ["spec.mode=rejection", "draft.train=online", "draft.objective=hard_ce"],
    "target_only": ["spec.mode=target_only", "draft.train=online", "draft.objective=kl"],
}
FIGURES = {
    "entropy": "rollout/entropy",
    **{f"depth {depth}": f"spec/acceptance_rate/depth_{depth}" for depth in range(1, DEPTHS + 1)},
    "seconds a step": "timing_s/step",
    "of it generation": "timing_s/wait_rollout",
    "of it training": "timing_s/update_actor",
}


def measured(directory: Path) -> dict[str, Any]:
    """Return first and last third of each figure, and the split at the last step."""
    _, steps = records(directory)
    steps, third = steps[:STEPS], STEPS // 3
    figures = {
        title: [round(fmean(step[name] for step in part), 4) for part in (steps[:third], steps[-third:])]
        for title, name in FIGURES.items()
    }
    split = of_run(load_run(directory)).at(OVERALL, steps[-1][STEP])
    parts = {} if split is None else split.parts
    ends = {name: [round(x, 4) for x in (p.value, p.low, p.high)] for name, p in parts.items()}
    return {"steps": len(steps), "figures": figures, "split": ends}


def main() -> None:
    """Run what is missing, measure, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm_along"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("overrides", nargs="*", help="further settings of all runs, key=value")
    args = parser.parse_args()

    results: dict[str, Any] = {"settings": [*BASE, *args.overrides], "arms": {}}
    for arm, settings in ARMS.items():
        directory = play("smollm_rl", args.runs.resolve() / arm, *BASE, *settings, *args.overrides)
        results["arms"][arm] = measured(directory)
        print(arm, json.dumps(results["arms"][arm]), flush=True)
    (args.out / "along.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
