"""Which objective makes the best draft? Compares objectives and anchor weightings from one warm-up.

    python recipes/mtp_adapt/study.py [--runs runs/mtp_adapt_study] [--kinds hard_ce kl ...] [--seeds 0 1 2]

Each of these stages is one or more runs of the main job. Finished runs are not repeated, and interrupted runs
are resumed. If a held-out set is requested later, finished runs are measured on it.

1 fresh     the model with an untrained MTP layer instead of its own, so that there is room to improve
2 warm      a few hundred steps of hard cross-entropy on that model; every cell starts there
3 sweep     each arm at each learning rate, on a separate seed; the rate is chosen by acceptance under
            rejection, on held-out prompts other than those of the result
4 cells     each objective at its rate, for each seed (new rollouts and data order): acceptance on held-out
            prompts in- and out-of-domain, rejection and target-only, by depth

Acceptance is measured in real generation. Writes results.json and table.md into --runs. Rates are Σ accepted
/ Σ drafted in percent. Seeds are summed prompt by prompt, so that all errors are clustered by prompt.
Differences are paired by prompt. They are also reported for each seed, because the errors do not cover the
variation between seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

from rlpipe.adapt.estimates import LENGTH, RATE, TOKENS, Counts, difference, estimate, pooled
from rlpipe.adapt.evaluation import Evaluation
from rlpipe.adapt.run import evaluation_file
from rlpipe.config.paths import resolve
from rlpipe.metrics.statistics import Estimate
from rlpipe.models.checkpoint import MTP_PREFIX, read_weights, write_checkpoint

KINDS = ["hard_ce", "kl", "reverse_kl", "tv", "e2e_tv", "e2e_chain", "lk"]
ANCHORS = ["uniform", "visit"]
MODES = ["rejection", "target_only"]
BASELINES = ["hard_ce/uniform", "kl/uniform"]
WARM_SEED, SWEEP_SEED = 1001, 1000  # separate from the seeds of the result
SELECTION = "swe.held_instances"  # the held-out set that chooses learning rates, unless set otherwise


@dataclass(slots=True, kw_only=True)
class Study:
    """Folders and sizes of a study."""

    runs: Path
    args: argparse.Namespace

    def run(self, name: str, *overrides: str, seed: int, steps: int, evaluate: Sequence[str]) -> Path:
        """Start a run of the main job, unless it is complete already."""
        directory = self.runs / name
        if not is_complete(directory, steps, evaluate):
            command = [sys.executable, "-m", "rlpipe.run", "+recipe=mtp_adapt", f"run.dir={directory}"]
            command += [f"run.seed={seed}", f"run.steps={steps}", "run.save_every=100"]
            command += [f"adapt.rollouts={self.runs / f'rollouts_{seed}.jsonl'}", "adapt.eval_every=0"]
            command += [f"adapt.prompts={self.args.prompts}", f"adapt.batch={self.args.batch}"]
            command += [
                "adapt.eval_first=false",
                "adapt.eval_generated=0",
                "metrics.wandb=off",
                *evaluate,
                *self.args.set,
                *overrides,
            ]
            subprocess.run(command, check=True)
        return directory

    def warm(self) -> Path:
        """Run stages 1 and 2; return the checkpoint that every cell starts from."""
        fresh = self.runs / "fresh"
        if not (fresh / "model.safetensors").is_file():
            write_fresh_draft(resolve(self.args.model), fresh)
        start = [
            f"model.path={fresh}",
            f"draft.objective={self.args.warm_loss}",
            f"draft.lr={self.args.warm_lr}",
        ]
        return self.run(
            "warm", *start, seed=WARM_SEED, steps=self.args.warm_steps, evaluate=self.evaluation()
        )

    def sweep(self, start: Path, objective: str) -> tuple[float, dict[str, float]]:
        """Run stage 3; return the learning rate of an arm, and the acceptance rate that each rate gave."""
        chosen_by = [
            f"adapt.in_domain=[{self.args.select}]",
            "adapt.out_of_domain=[]",
            "adapt.eval_modes=[rejection]",
        ]
        chosen_by += [f"adapt.eval_offset={self.args.eval_prompts}", "adapt.eval_samples=1"]
        chosen_by += [f"adapt.eval_prompts={self.args.sweep_prompts}"]
        found = {}
        for lr in self.args.lrs:
            run = self.train(start, objective, lr, "sweep", SWEEP_SEED, chosen_by)
            counts = last_evaluation(run, self.args.steps).counts(self.args.select, "rejection")
            found[lr] = estimate(counts, RATE).value
        best = max(found, key=found.__getitem__)
        return best, {f"{lr:g}": round(rate, 4) for lr, rate in found.items()}

    def train(
        self, start: Path, objective: str, lr: float, stage: str, seed: int, evaluate: Sequence[str]
    ) -> Path:
        """Train an objective from the warm-up."""
        kind, anchors = objective.split("/")
        name = f"{stage}/{kind}_{anchors}_lr{lr:g}_seed{seed}"
        overrides = [f"model.path={start / 'model'}", f"draft.objective={kind}", f"draft.anchors={anchors}"]
        overrides += [f"draft.lr={lr}", "draft.min_lr=0"]
        return self.run(name, *overrides, seed=seed, steps=self.args.steps, evaluate=evaluate)

    def evaluation(self) -> list[str]:
        """Return the overrides that name the held-out sets of the result."""
        found = [
            f"adapt.in_domain=[{','.join(self.args.in_domain)}]",
            f"adapt.eval_modes=[{','.join(MODES)}]",
        ]
        found += [f"adapt.out_of_domain=[{','.join(self.args.out_of_domain)}]"]
        return [*found, f"adapt.eval_prompts={self.args.eval_prompts}", "adapt.eval_samples=1"]


def write_fresh_draft(model: Path, out: Path) -> None:
    """Write the checkpoint with an untrained MTP layer, initialised as for the tiny model."""
    import torch
    from transformers import Qwen2ForCausalLM

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from recipes.tiny_model.mtp import build_mtp

    torch.manual_seed(0)
    layer = build_mtp(Qwen2ForCausalLM.from_pretrained(model, dtype=torch.float32))
    fresh = {MTP_PREFIX + name: tensor for name, tensor in layer.state_dict().items()}
    weights = read_weights(model)
    if missing := {name for name in weights if name.startswith(MTP_PREFIX)} ^ fresh.keys():
        raise ValueError(f"{model} has another MTP layer than the tiny model's: {sorted(missing)[:4]}.")
    write_checkpoint(out, weights | fresh, model)


def last_evaluation(run: Path, step: int) -> Evaluation:
    """Return the last measurements of a finished run."""
    return Evaluation.read(evaluation_file(run, step))


def is_complete(run: Path, step: int, evaluate: Sequence[str]) -> bool:
    """Return whether a run has its summary, and its last evaluation has the requested held-out sets."""
    if not (run / "results.json").is_file() or not evaluation_file(run, step).is_file():
        return False
    known = [f"{name}." for name in last_evaluation(run, step).domains]
    wanted = [o.split("=")[1].strip("[]") for o in evaluate if o.split("=")[0].endswith("_domain")]
    return all(
        any(name.startswith(f"{domain}.") for name in known)  # `swe` means all of its held-out sets
        for domain in ",".join(wanted).split(",")
        if domain
    )


def summarise(
    warm: Evaluation, cells: dict[str, list[Evaluation]], baselines: Sequence[str]
) -> dict[str, Any]:
    """Return figures of every objective by domain and mode, and paired differences from the baselines."""
    found: dict[str, Any] = {"warm-up": _figures([warm], {}, [])}
    for objective, seeds in cells.items():
        others = {name: cells[name] for name in baselines if name in cells and name != objective}
        found[objective] = _figures(seeds, others, seeds)
    return found


def _figures(
    seeds: list[Evaluation], others: dict[str, list[Evaluation]], own: list[Evaluation]
) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for domain, first in seeds[0].domains.items():
        row: dict[str, Any] = {"in_domain": first.in_domain}
        for mode in first.by_mode:
            counts = _pooled(seeds, domain, mode)
            names = [RATE, LENGTH, TOKENS, *(f"{RATE}/depth_{k}" for k in range(1, seeds[0].gamma + 1))]
            row[mode] = {name: rounded(estimate(counts, name)) for name in names}
            row[mode]["prompts"] = len(counts)
            for name, theirs in others.items():
                gap = difference(counts, _pooled(theirs, domain, mode), RATE)
                by_seed = [
                    difference(a.counts(domain, mode), b.counts(domain, mode), RATE).value
                    for a, b in zip(own, theirs, strict=False)
                ]
                row[mode][f"minus {name}"] = [*rounded(gap), [round(x, 5) for x in by_seed]]
        if set(MODES) <= first.by_mode.keys():
            both = [_pooled(seeds, domain, mode) for mode in MODES]
            row["rejection minus target_only"] = rounded(difference(*both, RATE))
        forced = [e.domains[domain].teacher_forced for e in seeds]
        row["teacher_forced"] = [
            {k: f[k] for k in ("alpha", "predicted", "observed") if k in f} for f in forced
        ]
        table[domain] = row
    return table


def _pooled(seeds: list[Evaluation], domain: str, mode: str) -> Counts:
    return pooled(one.counts(domain, mode) for one in seeds)


def rounded(found: Estimate) -> list[float | None]:
    """Return value and error; None without observations."""
    return [None if x is None or isnan(x) else round(x, 5) for x in (found.value, found.se)]


def markdown(results: dict[str, Any], domains: Sequence[str], baselines: Sequence[str]) -> str:
    """Format Table 2: acceptance rate in percent, ± standard error, by objective, sorted by rejection."""
    lines = []
    for domain in domains:
        lines += [f"### {domain}", "", "| objective | lr | rejection | target-only | by depth, rejection |"]
        lines[-1] += "".join(f" minus {name} |" for name in baselines)
        lines += ["|" + "---|" * (5 + len(baselines))]
        table = {name: row[domain] for name, row in results["table"].items()}
        for name in sorted(table, key=lambda name: -table[name]["rejection"][RATE][0]):
            row = table[name]
            depths = [percent([v[0], None]) for k, v in row["rejection"].items() if "depth" in k]
            cells = [name, results["lr"].get(name, ""), *(percent(row[mode][RATE]) for mode in MODES)]
            cells += [" / ".join(depths)]
            cells += [percent(row["rejection"].get(f"minus {other}"), "+") for other in baselines]
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def percent(value: Sequence[Any] | None, sign: str = "") -> str:
    """Format a value and its error, given as shares, in percent; a dash without observations."""
    if value is None or value[0] is None:
        return "–"
    error = "" if value[1] is None else f" ± {100 * value[1]:.2f}"
    return f"{100 * value[0]:{sign}.2f}{error}"


def arguments(description: str, runs: str) -> argparse.ArgumentParser:
    """Make a parser with the arguments that all studies of this kind share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path(runs))
    parser.add_argument("--model", default="shipped:models/tiny")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--lrs", nargs="+", type=float, default=[3e-4, 1e-3, 3e-3])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="trajectories of a step")
    parser.add_argument("--prompts", type=int, default=256, help="training prompts of a seed's rollouts")
    parser.add_argument("--warm-steps", type=int, default=300)
    parser.add_argument("--warm-loss", default="hard_ce")
    parser.add_argument("--warm-lr", type=float, default=2e-3)
    parser.add_argument("--eval-prompts", type=int, default=80, help="of each held-out set")
    parser.add_argument("--sweep-prompts", type=int, default=80)
    parser.add_argument("--select", default=SELECTION, help="held-out set that chooses the rates")
    parser.add_argument("--in-domain", nargs="+", default=["swe"])
    parser.add_argument("--out-of-domain", nargs="*", default=["reasoning"])
    parser.add_argument(
        "--set", nargs="*", default=[], help="further overrides of every run, as env=reasoning"
    )
    return parser


def compare(study: Study, objectives: Sequence[str], baselines: Sequence[str]) -> None:
    """Start the missing runs, then write the two files."""
    args, warm = study.args, study.warm()
    results: dict[str, Any] = {"lr": {}, "sweep": {}}
    cells: dict[str, list[Evaluation]] = {}
    for objective in objectives:
        lr = args.lrs[0]
        if len(args.lrs) > 1:
            lr, results["sweep"][objective] = study.sweep(warm, objective)
        results["lr"][objective] = f"{lr:g}"
        runs = [study.train(warm, objective, lr, "cells", seed, study.evaluation()) for seed in args.seeds]
        cells[objective] = [last_evaluation(run, args.steps) for run in runs]
        measured = last_evaluation(warm, args.warm_steps)
        results["table"] = summarise(measured, cells, baselines)
        results["settings"] = {k: v for k, v in vars(args).items() if k != "runs"}
        (study.runs / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (study.runs / "table.md").write_text(markdown(results, list(measured.domains), baselines))
    print((study.runs / "table.md").read_text())


def main() -> None:
    """Run the requested objectives from one warm-up."""
    parser = arguments(__doc__, "runs/mtp_adapt_study")
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--anchors", nargs="+", default=ANCHORS)
    args = parser.parse_args()
    objectives = [f"{kind}/{anchors}" for kind in args.kinds for anchors in args.anchors]
    compare(Study(runs=args.runs.resolve(), args=args), objectives, BASELINES)


if __name__ == "__main__":
    main()
