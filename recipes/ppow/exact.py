"""Compares the exact gradient of acceptance with PPOW and end-to-end TV, from one start at equal steps.

    python -m recipes.ppow.exact [--runs runs/ppow_exact] [--arms exact_window ...] [--seeds 0 1 2 3 4]

1 rollouts  of the frozen model, made once; split by prompt for the warm-up, for the arms and for held-out use
2 warm      a fresh MTP layer learns by soft KL: the start of every arm
3 sweep     each arm at each learning rate, on a separate seed; the best rate is chosen on held-out prompts
            that the result does not use
4 cells     each arm at its rate, for each seed; a seed determines the order of the data, windows and drafts

The trained layer drafts windows in the engine's way, from evenly sampled anchors of held-out texts. Measured
is E[k], the expected number of drafts that chain verification accepts. The anchors and uniforms are the same
for every arm and seed. So verification adds no sampling noise, but the drafts are sampled. All anchors are
used equally often, whereas an engine starts more often at hard ones.

The unit of every interval is the seed (Student's, 95%, over the differences of arms at equal seeds). A
finished cell is not repeated. Writes results.json and table.md into --runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.mtp_adapt.study import write_fresh_draft
from recipes.runs import as_text, choose_rate, kept, rounded_over_seeds

EVEN = {"hard_start": 0.0, "hard_end": 0.0}
ARMS: dict[str, tuple[str, dict[str, Any]]] = {  # objective and settings of windows
    "exact_window": ("exact_window", {}),
    "exact_window, even anchors": ("exact_window", EVEN),
    "ppow": ("ppow", {}),
    "ppow_exact": ("ppow_exact", {}),
    "e2e_tv": ("e2e_tv", {}),
}
DEFAULT = ["exact_window", "ppow", "ppow_exact", "e2e_tv"]
BASELINES = ["e2e_tv", "ppow"]
WARM_SEED, SWEEP_SEED, DATA_SEED = 1001, 1000, 77


class Study:
    """Trajectories, trainers and finished cells of one directory."""

    def __init__(self, args: argparse.Namespace) -> None:
        from rlpipe.adapt.domains import make_suites
        from rlpipe.adapt.rollouts import complete_rollouts
        from rlpipe.api.runs import compose
        from rlpipe.config.paths import resolve

        self.args, self.runs = args, args.runs.resolve()
        self.runs.mkdir(parents=True, exist_ok=True)
        fresh = self.runs / "fresh"
        if not (fresh / "model.safetensors").is_file():
            write_fresh_draft(resolve(args.model), fresh)

        count = args.warm_prompts + args.prompts + 2 * args.eval_prompts
        overrides = ["+recipe=mtp_adapt", f"model.path={fresh}", f"run.dir={self.runs}"]
        overrides += [f"run.seed={DATA_SEED}", f"adapt.prompts={count}", "adapt.samples=1"]
        self.config = compose([*overrides, *args.set])
        suites = make_suites(self.config.adapt, self.config.env, DATA_SEED)
        everything = complete_rollouts(
            self.config,
            suites[self.config.env.name],
            self.runs / "rollouts.jsonl",
            stopped=lambda: False,
            on_event=lambda *_, **__: None,
        )

        # The four parts have no prompt in common.
        sizes = [args.warm_prompts, args.prompts, args.eval_prompts, args.eval_prompts]
        ends = [sum(sizes[: i + 1]) for i in range(4)]
        self.warm_data, self.data, self.sweep_data, self.held_out = (
            everything[end - size : end] for size, end in zip(sizes, ends, strict=True)
        )
        self.start = self.runs / "start"

    def warm(self) -> None:
        """Make the start of all arms, unless it exists."""
        if not (self.start / "config.json").is_file():
            args = self.args
            trainer = self._trainer(self.runs / "fresh", ("kl", {}), args.warm_lr, WARM_SEED, args.warm_steps)
            self._train(trainer, self.warm_data, WARM_SEED, steps=args.warm_steps, out=self.start)

    def cell(self, arm: str, lr: float, seed: int) -> dict[str, Any]:
        """Train an arm from the start and measure it, unless that was done."""
        name = f"{arm.replace(', ', '_').replace(' ', '_')}_lr{lr:g}_seed{seed}.json"

        def compute() -> dict[str, Any]:
            trained, steps = self.runs / "trained", self.args.steps
            trainer = self._trainer(self.start, ARMS[arm], lr, seed, steps)
            seconds = self._train(trainer, self.data, seed, steps=steps, out=trained)
            return self.measure(trained) | {"arm": arm, "lr": lr, "seed": seed, "seconds": seconds}

        return kept(self.runs / "cells" / name, compute)

    def measure(self, model: Path) -> dict[str, float]:
        """Return expected accepted drafts per window, on the prompts of the sweep and of the result."""
        found = {}
        for name, data in (("sweep", self.sweep_data), ("held_out", self.held_out)):
            trainer = self._trainer(model, ("exact_window", EVEN), 0.0, 0, 1)
            metrics = trainer.adapt_step(self._packed(data))  # of the draft before the update (lr is 0)
            trainer.close()
            cost = 1 + self.config.ppow.draft_cost * self.config.draft.depths
            found[name] = metrics["ppow/reward"].value() * cost - 1
        return found

    def _train(self, trainer: Any, data: Sequence[Any], seed: int, *, steps: int, out: Path) -> float:
        """Train into a checkpoint and close the trainer; return the processor seconds of the steps."""
        from rlpipe.adapt.order import DataOrder

        order, started = DataOrder(data, self.args.batch, seed=seed), time.process_time()
        for step in range(steps):
            trainer.adapt_step(self._packed(order[step]))
        seconds = time.process_time() - started
        trainer.save_hf(out)
        trainer.close()
        return round(seconds, 1)

    def _trainer(self, model: Path, arm: tuple[str, dict[str, Any]], lr: float, seed: int, steps: int) -> Any:
        """Make the trainer of an objective; an arm is an objective with settings of windows."""
        from rlpipe.config.draft import DraftConfig
        from rlpipe.trainer.megatron import MegatronTrainer

        config, (objective, windows) = self.config, arm
        draft = DraftConfig(objective=objective, lr=lr, warmup_steps=1, depths=config.draft.depths)
        return MegatronTrainer(
            config.trainer,
            config.algo,
            draft,
            model_path=model,
            total_steps=steps,
            adapt_only=True,
            ppow=replace(config.ppow, **windows),
            seed=seed,
        )

    def _packed(self, trajectories: Sequence[Any]) -> Any:
        from rlpipe.batching.packing import pack

        tokens, temperature = self.config.trainer.micro_batch_tokens, self.config.rollout.temperature
        return pack(trajectories, None, tokens, temperature=temperature)


def summary(cells: dict[str, list[dict[str, Any]]], start: float) -> dict[str, Any]:
    """Return each arm's mean over seeds, gain over the start, and paired differences, with intervals."""
    table: dict[str, Any] = {}
    for arm, found in cells.items():
        values = [cell["held_out"] for cell in found]
        table[arm] = {
            "by_seed": [round(v, 4) for v in values],
            "gain": rounded_over_seeds([v - start for v in values]),
        }
        table[arm]["seconds"] = round(sum(cell["seconds"] for cell in found) / len(found), 1)
        for other in BASELINES:
            if other in cells and other != arm:
                theirs = [cell["held_out"] for cell in cells[other]]
                gaps = [a - b for a, b in zip(values, theirs, strict=True)]
                table[arm][f"minus {other}"] = rounded_over_seeds(gaps)
    return table


def markdown(results: dict[str, Any]) -> str:
    """Format the table of results, best arm first."""
    names = [f"minus {name}" for name in BASELINES]
    lines = [
        f"| arm | lr | E[accepted] | {' | '.join(names)} | CPU s |",
        "|---" * (4 + len(names)) + "|",
    ]
    rows = results["table"]
    for arm in sorted(rows, key=lambda arm: -rows[arm]["gain"][0]):
        row = rows[arm]
        mean = sum(row["by_seed"]) / len(row["by_seed"])
        gaps = [as_text(row[name]) if name in row else "–" for name in names]
        lr = f"{results['lr'][arm]:g}" + (" (edge)" if results["edge"][arm] else "")
        lines.append(f"| {arm} | {lr} | {mean:.3f} | {' | '.join(gaps)} | {row['seconds']} |")
    lines.append(f"| start | | {results['start']:.3f} | {'| ' * len(names)}| |")
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/ppow_exact"))
    parser.add_argument("--model", default="shipped:models/tiny")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=DEFAULT)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--lrs", nargs="+", type=float, default=[3e-4, 1e-3, 3e-3])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8, help="trajectories of a step")
    parser.add_argument("--prompts", type=int, default=160, help="of the arms")
    parser.add_argument("--warm-prompts", type=int, default=160)
    parser.add_argument("--warm-steps", type=int, default=150)
    parser.add_argument("--warm-lr", type=float, default=2e-3)
    parser.add_argument(
        "--eval-prompts", type=int, default=64, help="of the sweep, and as many of the result"
    )
    parser.add_argument("--set", nargs="*", default=[], help="further overrides, as env=reasoning")
    return parser.parse_args()


def main() -> None:
    """Start the missing runs, then write the two files."""
    args = arguments()
    study = Study(args)
    if not study.config.ppow.draft_cost:
        study.config.ppow.draft_cost = 0.2  # known, so that E[k] can be read off the speed-up
    study.warm()

    results: dict[str, Any] = {
        "start": study.measure(study.start)["held_out"],
        "lr": {},
        "sweep": {},
        "edge": {},
    }
    cells: dict[str, list[dict[str, Any]]] = {}
    for arm in args.arms:
        rate = choose_rate({lr: study.cell(arm, lr, SWEEP_SEED)["sweep"] for lr in args.lrs})
        for name, value in rate.items():
            results[name][arm] = value
        cells[arm] = [study.cell(arm, rate["lr"], seed) for seed in args.seeds]
        results["table"] = summary(cells, results["start"])
        results["settings"] = {k: str(v) if k == "runs" else v for k, v in vars(args).items() if k != "runs"}
        (study.runs / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (study.runs / "table.md").write_text(markdown(results))
        print((study.runs / "table.md").read_text(), flush=True)


if __name__ == "__main__":
    main()
