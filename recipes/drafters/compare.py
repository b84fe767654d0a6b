"""Drafters and objectives compared: MTP, EAGLE-3 and suffix lookup, in real generation.

    python recipes/drafters/compare.py [--runs runs/drafters] [--arms mtp/kl eagle3/kl+ppow suffix ...]

Trains what is missing, then measures every arm with the workloads of scripts/bench/drafters.py. Stages and
files are those of recipes/mtp_adapt/study.py: finished runs are not repeated, interrupted runs are resumed.

    none, suffix             nothing is trained
    DRAFTER/warm-up          an untrained drafter after --warm-steps steps of --warm-loss; start of its arms
    DRAFTER/OBJECTIVE        --steps steps of hard_ce, kl or e2e_tv from the warm-up
    DRAFTER/OBJECTIVE+ppow   the first half of the steps of that arm, then as many steps of PPOW

All arms learn from the same rollouts of the frozen model. The number of steps is equal but their cost is not:
a step of PPOW also runs the target on its windows. Learning rates are arguments and are not searched.

Each arm decodes in its own process, and the arms take turns. All errors are clustered by conversation, and
differences are paired by conversation. With one seed they do not cover the variation between seeds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "recipes" / "mtp_adapt"), str(ROOT / "scripts" / "bench")]

import drafters as bench  # noqa: E402
import rollout_speed  # noqa: E402
import study as adaptation  # noqa: E402

from rlpipe.adapt.estimates import LENGTH, RATE, Counts, PromptCounts, difference, estimate  # noqa: E402
from rlpipe.config.paths import resolve  # noqa: E402
from rlpipe.config.spec import SpecConfig  # noqa: E402
from rlpipe.types import SpecCounts  # noqa: E402

TRAINED = ("mtp", "eagle3")
OBJECTIVES = ("hard_ce", "kl", "e2e_tv")
WARM_UP, PPOW = "warm-up", "+ppow"
LEARNT = [f"{drafter}/{kind}{more}" for drafter in TRAINED for kind in OBJECTIVES for more in ("", PPOW)]
ARMS = ["suffix", *(f"{drafter}/{WARM_UP}" for drafter in TRAINED), *LEARNT]


# Settings that every run under --runs depends on but its name does not contain.
TRAINING = ("model", "steps", "batch", "prompts", "gamma", "warm_steps", "warm_loss", "warm_lr", "set")
TRAINING += ("mtp_lr", "eagle3_lr", "ppow_lr")


class DrafterStudy(adaptation.Study):
    """The warm-up and the runs of this study, for both drafters."""

    def evaluation(self) -> list[str]:
        """Return a short evaluation: the arms are measured together when all are trained."""
        found = [f"adapt.in_domain=[{adaptation.SELECTION}]", "adapt.out_of_domain=[]"]
        return [*found, "adapt.eval_modes=[rejection]", "adapt.eval_prompts=4", "adapt.eval_samples=1"]

    def trained(self, arm: str, seed: int) -> Path:
        """Return the model or EAGLE-3 directory that an arm drafts with; train it if it is missing."""
        drafter, objective = arm.split("/")
        kind, steps = objective.removesuffix(PPOW), self.args.steps
        if kind == WARM_UP:
            return self._start(drafter)
        loss = [f"draft.objective={kind}", f"draft.lr={vars(self.args)[f'{drafter}_lr']}"]
        run = self._learn(
            f"{arm.removesuffix(PPOW)}_seed{seed}", self._start(drafter), drafter, loss, seed, steps
        )
        if objective.endswith(PPOW):
            start, ppow = run / "checkpoints" / f"step_{steps // 2}" / "hf", ["draft.objective=ppow"]
            ppow.append(f"draft.lr={self.args.ppow_lr}")
            run = self._learn(f"{arm}_seed{seed}", start, drafter, ppow, seed, steps - steps // 2)
        return run / product(drafter)

    def _start(self, drafter: str) -> Path:
        """Return the warm-up that all arms of a drafter start from; train it if it is missing."""
        args = self.args
        if drafter == "mtp":
            return self.warm() / product(drafter)
        settings = [f"model.path={args.model}", "adapt.drafter=eagle3"]
        settings += [
            f"draft.objective={args.warm_loss}",
            f"draft.lr={args.warm_lr}",
            f"draft.depths={args.gamma}",
        ]
        seed = adaptation.WARM_SEED
        run = self.run("warm_eagle3", *settings, seed=seed, steps=args.warm_steps, evaluate=self.evaluation())
        return run / product(drafter)

    def _learn(
        self, name: str, start: Path, drafter: str, objective: list[str], seed: int, steps: int
    ) -> Path:
        """Train the draft in `start` for some steps of an objective."""
        if drafter == "mtp":
            settings = [f"model.path={start}"]
        else:
            settings = [f"model.path={self.args.model}", "adapt.drafter=eagle3", f"eagle3.start={start}"]
        settings += [f"draft.depths={self.args.gamma}", "draft.min_lr=0"]
        settings.append(f"run.save_every={self.args.steps // 2}")
        return self.run(name, *settings, *objective, seed=seed, steps=steps, evaluate=self.evaluation())


def product(drafter: str) -> str:
    """Return the file or folder for engines in a finished run's directory."""
    return "draft" if drafter == "eagle3" else "model"


def engine_of(arm: str, trained: Path | None, args: argparse.Namespace) -> tuple[Path, SpecConfig]:
    """Return an arm's model and its drafting settings."""
    drafter, model = arm.split("/")[0], resolve(args.model)
    spec = bench.spec_of(drafter, args.gamma, trained if drafter == "eagle3" else None)
    return (trained if drafter == "mtp" and trained else model), spec


def measure(engines: dict[str, tuple[Path, SpecConfig]], args: argparse.Namespace) -> dict[str, Any]:
    """Return by cell and arm the speed of each repeat and the counts of each conversation."""
    makers = {
        arm: partial(rollout_speed.EngineArm, model, spec, args.eval_batch, args.threads, "float32")
        for arm, (model, spec) in engines.items()
    }
    running = rollout_speed.start_arms(makers, args.threads)
    found: dict[str, Any] = {}
    for cell, work in bench.workloads(resolve(args.model), args.conversations).items():
        print(f"measuring {cell}", flush=True)
        speeds, counts = rollout_speed.decode_in_turns(running, work, args.eval_batch, args.repeats)
        found[cell] = {arm: (speeds[arm], counts[arm]) for arm in engines}
    for arm in running.values():
        arm.close()
    return found


def joined(several: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the measurements of seeds: repeats are concatenated, counts added by conversation."""
    whole = several[0]
    for more in several[1:]:
        for cell, arms in more.items():
            for arm, (speeds, counts) in arms.items():
                before, sums = whole[cell][arm]
                added = [rollout_speed.total(pair) for pair in zip(sums, counts, strict=True)]
                whole[cell][arm] = ([*before, *speeds], added)
    return whole


def step_seconds(
    engines: dict[str, tuple[Path, SpecConfig]], args: argparse.Namespace
) -> dict[str, dict[tuple[int, int], float]]:
    """Return each drafter's seconds per decode step by (batch, gamma), as used by adaptive gamma."""
    spawn, found = multiprocessing.get_context("spawn"), {}
    for arm, engine in engines.items():
        drafter = arm.split("/")[0]
        if drafter not in (*found, "none"):
            with ProcessPoolExecutor(1, spawn) as process:  # a separate process, as for every arm
                settings = (*engine, args.eval_batch, args.threads, args.repeats)
                found[drafter] = process.submit(least_step_seconds, *settings).result()
    return found


def least_step_seconds(
    model: Path, spec: SpecConfig, batch: int, threads: int, repeats: int
) -> dict[tuple[int, int], float]:
    """Return the engine's own measurement (`rlpipe.rollout.embedded.costs`), the least of several."""
    found: list[dict[tuple[int, int], float]] = []
    for _ in range(repeats):
        arm = rollout_speed.EngineArm(model, replace(spec, adaptive=True), batch, threads, "float32")
        found.append(arm.costs)
        arm.close()
    return {cell: min(costs[cell] for costs in found) for cell in found[0]}


def price(seconds: dict[str, dict[tuple[int, int], float]], gamma: int) -> dict[str, dict[str, Any]]:
    """Return by drafter and batch the cost of a `step` with gamma drafts, and of its parts.

    The unit is a decode step without drafts. step = gamma draft + verify (`recipes.theory.step_cost`). A
    lookup runs no model, so its step is `verify`. Another drafter's step minus `verify` is the cost of gamma
    drafts.

    >>> suffix, mtp = {(1, 0): 2.0, (1, 3): 3.0}, {(1, 0): 2.0, (1, 3): 4.5}
    >>> price({"suffix": suffix, "mtp": mtp}, 3)["mtp"]["1"]
    {'step': 2.25, 'verify': 1.5, 'draft': 0.25}
    """
    plain, found = seconds["suffix"], {}
    for drafter, mine in seconds.items():
        found[drafter] = {}
        for batch in sorted({batch for batch, _ in mine}):
            step, verify = (s[batch, gamma] / plain[batch, 0] for s in (mine, plain))
            row = {"step": step, "verify": verify, "draft": (step - verify) / gamma}
            found[drafter][str(batch)] = {name: round(value, 4) for name, value in row.items()}
    return found


def by_conversation(counts: list[SpecCounts]) -> Counts:
    """Return the counts in the form that `rlpipe.adapt.estimates` reads."""
    return {str(n): PromptCounts(spec=mine) for n, mine in enumerate(counts) if mine.verify_steps}


def compared(arms: list[str]) -> list[tuple[str, str]]:
    """Return the pairs of arms whose difference is reported.

    >>> compared(["mtp/hard_ce", "mtp/kl", "mtp/kl+ppow"])
    [('mtp/kl', 'mtp/hard_ce'), ('mtp/kl+ppow', 'mtp/kl')]
    """
    found = []
    for arm in arms:
        drafter, _, objective = arm.partition("/")
        if objective not in ("", WARM_UP):
            other = arm.removesuffix(PPOW) if arm.endswith(PPOW) else f"{drafter}/hard_ce"
            found += [(arm, other)] if other in arms and other != arm else []
    return found


def summarise(measured: dict[str, Any], gamma: int) -> dict[str, Any]:
    """Return by cell the figures of every arm with errors, and differences of acceptance length and rate."""
    figures, found = [LENGTH, RATE, *(f"{RATE}/depth_{k}" for k in range(1, gamma + 1))], {}
    for cell, arms in measured.items():
        rows, counts = {}, {arm: by_conversation(mine) for arm, (_, mine) in arms.items()}
        for arm, (speeds, mine) in arms.items():
            rows[arm] = rollout_speed.summary(speeds, rollout_speed.total(mine))
            if arm != "none":
                rows[arm] |= {name: adaptation.rounded(estimate(counts[arm], name)) for name in figures}
                rows[arm]["speed against none"] = rollout_speed.paired_ratio(speeds, arms["none"][0])
        gaps = {
            f"{ours} minus {theirs}": {
                name: adaptation.rounded(difference(counts[ours], counts[theirs], name))
                for name in (LENGTH, RATE)
            }
            for ours, theirs in compared(list(arms))
        }
        found[cell] = {"arms": rows, "differences": gaps}
    return found


def markdown(results: dict[str, Any], gamma: int, seeds: list[int]) -> str:
    """Return a table of what drafts cost, then two tables for each cell."""
    several = "one seed: errors speak of prompts, not of seeds"
    if len(seeds) > 1:
        several = f"{len(seeds)} seeds, added up: errors speak of prompts"
    lines = [f"{several[0].upper()}{several[1:]}.", "", "### cost, in decode steps without drafts", ""]
    lines += [f"| drafter | batch | verify step of {gamma} | each draft | both |", "|---|---|---|---|---|"]
    for drafter, batches in results["cost"].items():
        for batch, row in batches.items():
            lines.append(
                f"| {drafter} | {batch} | {row['verify']:.2f} | {row['draft']:.3f} | {row['step']:.2f} |"
            )
    for cell, found in results["cells"].items():
        head = ["arm", "acceptance length", *(f"depth {k}, %" for k in range(1, gamma + 1))]
        head += ["tokens/s", "against none"]
        lines += ["", f"### {cell}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for arm, row in found["arms"].items():
            cells = ["–"] * (gamma + 1)
            if LENGTH in row:
                cells = [with_error(row[LENGTH])]
                cells += [adaptation.percent(row[f"{RATE}/depth_{k}"]) for k in range(1, gamma + 1)]
            cells += [str(row["tokens_per_s"]), str(row.get("speed against none", 1))]
            lines.append("| " + " | ".join([arm, *cells]) + " |")
        if found["differences"]:
            lines += ["", "| difference | acceptance length | acceptance rate, % |", "|---|---|---|"]
        for pair, row in found["differences"].items():
            lines.append(
                f"| {pair} | {with_error(row[LENGTH], '+')} | {adaptation.percent(row[RATE], '+')} |"
            )
    return "\n".join(lines) + "\n"


def with_error(value: list[float | None], sign: str = "") -> str:
    """Format a figure and its standard error."""
    return "–" if value[0] is None else f"{value[0]:{sign}.3f} ± {value[1] or 0:.3f}"


def arguments() -> argparse.Namespace:
    """Read the command line; exit with a message if it is invalid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/drafters"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="for results.json, table.md")
    parser.add_argument("--model", default="shipped:models/tiny")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, metavar="ARM", help=", ".join(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=150, help="of every arm after the warm-up; even")
    parser.add_argument("--batch", type=int, default=8, help="trajectories of a step")
    parser.add_argument("--prompts", type=int, default=64, help="training prompts of a seed's rollouts")
    parser.add_argument("--gamma", type=int, default=3, help="drafts of a verify step, depths trained")
    parser.add_argument("--warm-steps", type=int, default=150)
    parser.add_argument("--warm-loss", choices=OBJECTIVES, default="hard_ce")
    parser.add_argument("--warm-lr", type=float, default=2e-3)
    parser.add_argument("--mtp-lr", type=float, default=1e-3)
    parser.add_argument("--eagle3-lr", type=float, default=1e-3)
    parser.add_argument("--ppow-lr", type=float, default=1e-4)
    parser.add_argument("--conversations", type=int, default=32, help="of each domain")
    parser.add_argument("--eval-batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], help="further overrides of every run, key=value")
    args = parser.parse_args()
    if args.steps < 2 or args.steps % 2:
        parser.error(
            f"--steps {args.steps}: half of them are supervised in arms that end in {PPOW}: even, >= 2."
        )
    return args


def keep_settings(args: argparse.Namespace) -> None:
    """Store the settings that the runs depend on. Raises ValueError if stored runs had others."""
    file, mine = args.runs / "settings.json", {name: vars(args)[name] for name in TRAINING}
    if file.is_file() and (theirs := json.loads(file.read_text())) != mine:
        unlike = [f"{k}={theirs[k]}, now {v}" for k, v in mine.items() if theirs[k] != v]
        raise ValueError(
            f"--runs {args.runs} holds runs with {'; '.join(unlike)}: name another directory, or give them "
            "again."
        )
    args.runs.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(mine) + "\n")


def main() -> None:
    """Train the missing arms, measure all, and write the results."""
    args, load = arguments(), os.getloadavg()
    keep_settings(args)
    study = DrafterStudy(runs=args.runs.resolve(), args=args)
    arms = [arm for arm in ARMS if arm in args.arms]
    trained = {
        seed: {arm: study.trained(arm, seed) if "/" in arm else None for arm in ("none", *arms)}
        for seed in args.seeds
    }
    engines = {
        seed: {arm: engine_of(arm, path, args) for arm, path in paths.items()}
        for seed, paths in trained.items()
    }
    some = engines[args.seeds[0]]
    seconds = step_seconds(some | {"suffix": engine_of("suffix", None, args)}, args)
    measured = joined([measure(mine, args) for mine in engines.values()])
    settings = {name: value for name, value in vars(args).items() if name not in ("runs", "out")}
    results = {
        "question": "acceptance, speed and cost by drafter and objective, at equal steps",
        **rollout_speed.decoding_provenance(args, load),
        "config": settings,
        "columns": ["value", "standard error, clustered by conversation"],
        "cost": price(seconds, args.gamma),
        "cells": summarise(measured, args.gamma),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "table.md").write_text(markdown(results, args.gamma, args.seeds))
    print((args.out / "table.md").read_text())


if __name__ == "__main__":
    main()
