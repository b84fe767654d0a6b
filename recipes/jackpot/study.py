"""Corrections under staleness, without PPO's clip: none, TIS, TIS adjusted, OBRS; several seeds each.

Rollouts decode with weights that are `staleness` optimizer steps old (`injection.stale_steps`), in addition
to the steps that a batch itself makes. The script starts the runs that are missing under `--runs`, then
writes `staleness.json` (and `staleness.svg` where matplotlib is installed) next to this file and prints the
table. Finished runs are not repeated; unfinished runs start from the beginning, because a checkpoint has no
old weights.

    python recipes/jackpot/study.py [key=value ...] [--runs runs/jackpot_study] [--seeds 0 1 2]
        [--staleness 16 64] [--arms none tis tis_adjusted obrs] [--steps 192]

The setting differs from the paper's Tables 3 and 7. There a batch is cut into 64 or 128 optimizer steps, so
that only its last step is so stale. Here every token is equally stale, and a batch makes `MINIBATCHES` steps.
Only because of these steps does TIS (weight towards the policy at the start of the batch, times PPO's ratio)
differ from TIS adjusted (weight towards the current policy, no ratio).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from runs import legend, play, records, validation  # noqa: E402

MINIBATCHES = 8  # optimizer steps of a training step
BASE = [
    f"algo.minibatches={MINIBATCHES}",
    f"pipeline.prompts_per_step={MINIBATCHES}",
    "pipeline.max_staleness=0",  # only the injected staleness
    *(f"algo.{bound}=1e9" for bound in ("clip_low", "clip_high", "clip_dual")),
    "run.resume=never",
    "run.save_every=0",
    "val.every=8",
    "env.held_out_files=[shipped:data/swe/held_instances.jsonl]",
    "cluster=inline",  # synchronous: rollout and trainer take turns anyway
    "metrics.report=false",
]
ARMS = {
    "none": ["algo.correction=none", "algo.proximal=start"],
    "tis": ["algo.correction=tis_token", "algo.proximal=start"],
    "tis_adjusted": ["algo.correction=tis_token", "algo.proximal=current"],
    "obrs": ["algo.correction=obrs", "algo.proximal=current"],
}
ON_POLICY = "on_policy"  # no staleness, no correction: the baseline
FIGURES = {
    "train_reward": "critic/rewards/mean",
    "entropy": "rollout/entropy",
    "grad_norm": "actor/grad_norm",
    "k3_kl": "rollout_corr/k3_kl",
    "sample_size": "rollout_corr/rollout_is_eff_sample_size",
    "acceptance": "rollout_corr/obrs_acceptance",
    "kl_before": "rollout_corr/obrs_kl_before",
    "kl_after": "rollout_corr/obrs_kl_after",
    "z_ratio": "rollout_corr/obrs_z_ratio",
    "kappa": "rollout_corr/obrs_kappa",
}


def curve(directory: Path) -> dict[str, object]:
    """Return validation reward and training figures of a run by optimizer step; null where not measured."""
    lines, steps = records(directory)
    validated = [[step * MINIBATCHES, reward] for step, reward, _ in validation(lines)]
    rewards = [reward for _, reward in validated]
    return {
        "validation": validated,
        "before": rewards[0],
        "after": rewards[-1],
        "best": max(rewards),
        **{name: [rounded(r.get(key)) for r in steps] for name, key in FIGURES.items()},
        "skipped_steps": sum(r.get("actor/skipped_steps", 0) for r in steps),
        "seconds": round(lines[-1]["time"] - lines[0]["time"], 1),
    }


def rounded(value: float | None) -> float | None:
    """Round to five significant digits."""
    return None if value is None else float(f"{value:.5g}")


def table(results: dict[str, dict[str, object]]) -> str:
    """Format a row for each staleness and arm: means over seeds, standard deviation of the last reward."""
    cells: dict[str, list[dict[str, object]]] = {}
    for name, result in results.items():
        cells.setdefault(name.rpartition("-")[0], []).append(result)
    lines = [
        "| staleness, arm | seeds | before | after | best | sample size | KL before | KL after | accepted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in cells.items():
        after = [r["after"] for r in runs]
        spread = f" ± {statistics.stdev(after):.3f}" if len(after) > 1 else ""
        means = [f"{statistics.mean(r[key] for r in runs):.3f}" for key in ("before", "after", "best")]
        means[1] += spread
        means += [
            mean_of(value for r in runs for value in r[key])
            for key in ("sample_size", "kl_before", "kl_after", "acceptance")
        ]
        lines.append(f"| {name} | {len(runs)} | " + " | ".join(means) + " |")
    return "\n".join(lines)


def mean_of(values) -> str:
    """Format the mean of the measurements, or a dash."""
    found = [value for value in values if value is not None]
    return f"{statistics.mean(found):.4g}" if found else "–"


def draw(results: dict[str, dict[str, object]], staleness: list[int], out: Path) -> None:
    """Plot validation reward over optimizer steps: panels by staleness, a line per run, colour by arm."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    colours = dict(
        zip([ON_POLICY, *ARMS], ["#999999", "#D55E00", "#E69F00", "#0072B2", "#009E73"], strict=True)
    )
    figure, axes = plt.subplots(
        1, len(staleness), figsize=(4.8 * len(staleness), 3.4), sharey=True, squeeze=False
    )
    for axis, stale in zip(axes[0], staleness, strict=True):
        for name, result in results.items():
            age, arm, _ = name.split("-")
            if age in (str(stale), "0"):
                axis.plot(*zip(*result["validation"], strict=True), color=colours[arm], lw=1.2, label=arm)
        axis.set(title=f"{stale} optimizer steps stale", xlabel="optimizer step", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("validation reward (T = 1)")
    legend(axes[0][0], axes[0][-1], loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(out)


def plan(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return name ("staleness-arm-seed") and overrides of every run."""
    runs = {}
    length = f"run.steps={args.steps // MINIBATCHES}"
    for seed in args.seeds:
        own = [*BASE, length, f"run.seed={seed}"]
        runs[f"0-{ON_POLICY}-{seed}"] = [*own, *ARMS["none"]]
        for stale in args.staleness:
            for arm in args.arms:
                injected = f"injection.stale_steps={stale // MINIBATCHES}"
                runs[f"{stale}-{arm}-{seed}"] = [*own, injected, *ARMS[arm]]
    return runs


def main() -> None:
    """Run, collect the results, and draw them."""
    parser = argparse.ArgumentParser(description="Corrections under injected staleness.")
    parser.add_argument("--runs", type=Path, default=Path("runs/jackpot_study"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--staleness", type=int, nargs="+", default=[16, 64], help="in optimizer steps")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--steps", type=int, default=192, help="optimizer steps of a run")
    args, overrides = parser.parse_known_args()
    if any(amount % MINIBATCHES for amount in [*args.staleness, args.steps]):
        parser.error(f"--staleness and --steps are in optimizer steps, {MINIBATCHES} to a training step.")
    results = {}
    for name, settings in plan(args).items():
        play("swe_rl", args.runs / name, *settings, *overrides, afresh=True)
        results[name] = curve(args.runs / name)
    told = {"base": BASE, "arms": ARMS, "overrides": overrides, "steps": args.steps, "runs": results}
    (HERE / "staleness.json").write_text(json.dumps(told, indent=1) + "\n")
    print(table(results))
    try:
        draw(results, args.staleness, HERE / "staleness.svg")
    except ImportError:
        print("matplotlib is not installed: staleness.svg was not drawn (pip install matplotlib)")


if __name__ == "__main__":
    main()
