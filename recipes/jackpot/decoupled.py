"""A policy trained from a smaller model's rollouts (decoupled actor): OBRS and TIS against on-policy.

Starts the runs that are missing under `--runs`, then writes `decoupled.json` (and `decoupled.svg` where
matplotlib is installed) next to this file and prints the table. Finished runs are not repeated; unfinished
runs start from the beginning.

    python recipes/jackpot/decoupled.py [key=value ...] [--runs runs/jackpot_decoupled] [--seeds 0]
        [--arms obrs tis on_policy] [--steps 30]

All arms train models/tiny with the same settings, synchronously; validation runs the policy, never the actor.
obrs and tis generate with models/tiny_actor, which learns by PPO and distillation (`+recipe=jackpot`). In
on_policy the policy itself generates. Further arms: none (no correction, only the actor's KL: "Only reverse
KL" of Jackpot Table 1), obrs_fixed (obrs with an actor that does not learn), and small (only the actor is
trained).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from study import legend, mean_of, play, records, rounded, validation

HERE = Path(__file__).resolve().parent
BASE = [
    "pipeline.max_staleness=0",  # the only mismatch is the one between the two models
    "env.held_out_files=[shipped:data/swe/held_instances.jsonl]",
    "cluster=inline",  # synchronous: rollout and trainer take turns anyway
    "run.resume=never",
    "run.save_every=0",
    "metrics.report=false",
]
ARMS = {
    "obrs": ["algo.correction=obrs"],
    "tis": ["algo.correction=tis_token"],
    "on_policy": ["algo.correction=tis_token", "decoupled.path=''"],
    "none": ["algo.correction=none"],
    "small": ["algo.correction=tis_token", "model.path=shipped:models/tiny_actor", "decoupled.path=''"],
    "obrs_fixed": ["algo.correction=obrs", "decoupled.ppo_coef=0", "decoupled.distill_coef=0"],
}
MAIN = ["obrs", "tis", "on_policy"]
FIGURES = {
    "train_reward": "critic/rewards/mean",
    "kl": "decoupled/kl",
    "reverse_kl": "decoupled/reverse_kl",
    "overlap": "decoupled/overlap",
    "actor_grad_norm": "decoupled/grad_norm",
    "grad_norm": "actor/grad_norm",
    "entropy": "actor/entropy",
    "actor_entropy": "decoupled/entropy",
    "acceptance": "rollout_corr/obrs_acceptance",
    "kl_before": "rollout_corr/obrs_kl_before",
    "kl_after": "rollout_corr/obrs_kl_after",
    "k3_kl": "rollout_corr/k3_kl",
    "sample_size": "rollout_corr/rollout_is_eff_sample_size",
}


def curve(directory: Path) -> dict[str, object]:
    """Return validation rewards and training figures of a run by step; null where nothing was measured."""
    lines, steps = records(directory)
    validated = validation(lines)
    figures: dict[str, object] = {
        "validation": [[step, reward] for step, reward, _ in validated],
        "before": validated[0][1],
        "after": validated[-1][1],
        "error": validated[-1][2],
    }
    figures |= {name: [rounded(r.get(key)) for r in steps] for name, key in FIGURES.items()}
    return figures | {"seconds": round(lines[-1]["time"] - lines[0]["time"], 1)}


def table(results: dict[str, dict[str, object]]) -> str:
    """Format a row per run: rewards, and divergences of policy and actor, at the start and at the end."""
    lines = [
        "| run | before | after | KL(p‖q), first 5 steps | last 5 | overlap, last 5 | accepted | KL before "
        "| KL after | sample size |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, r in results.items():
        cells = [f"{r['before']:.3f}", f"{r['after']:.3f} ± {r['error']:.3f}"]
        cells += [mean_of(r["kl"][:5]), mean_of(r["kl"][-5:]), mean_of(r["overlap"][-5:])]
        cells += [mean_of(r[key]) for key in ("acceptance", "kl_before", "kl_after", "sample_size")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(results: dict[str, dict[str, object]], out: Path) -> None:
    """Plot validation of the policy, training reward of the generating model, and KL between the two."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    palette = ["#009E73", "#E69F00", "#999999", "#D55E00", "#CC79A7", "#0072B2"]
    colours = dict(zip(ARMS, palette, strict=True))
    figure, axes = plt.subplots(1, 3, figsize=(12.6, 3.4))
    for name, result in results.items():
        arm = name.rpartition("-")[0]
        line = {"color": colours[arm], "lw": 1.3, "label": arm}
        axes[0].plot(*zip(*result["validation"], strict=True), marker="o", ms=3, **line)
        steps = range(1, len(result["train_reward"]) + 1)
        axes[1].plot(steps, result["train_reward"], **line)
        known = [(step, kl) for step, kl in zip(steps, result["kl"], strict=True) if kl is not None]
        if known:
            axes[2].plot(*zip(*known, strict=True), **line)
    titles = ("policy, held-out instances", "who generates, training", "KL(policy ‖ actor), nat a token")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    axes[2].set_ylim(bottom=0)
    axes[0].set_ylabel("reward (T = 1)")
    legend(axes[0])
    figure.tight_layout()
    figure.savefig(out)


def main() -> None:
    """Run, collect the results, and draw them."""
    parser = argparse.ArgumentParser(description="A policy trained from a smaller model's rollouts.")
    parser.add_argument("--runs", type=Path, default=Path("runs/jackpot_decoupled"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=MAIN)
    parser.add_argument("--steps", type=int, default=30)
    args, overrides = parser.parse_known_args()
    common = [*BASE, f"run.steps={args.steps}", f"val.every={max(1, args.steps // 3)}"]
    results = {}
    for seed in args.seeds:
        for arm in args.arms:
            name = f"{arm}-{seed}"
            own = [*common, *ARMS[arm], f"run.seed={seed}", *overrides]
            play("jackpot", args.runs / name, *own, afresh=True)
            results[name] = curve(args.runs / name)
    told = {"base": common, "arms": ARMS, "overrides": overrides, "runs": results}
    (HERE / "decoupled.json").write_text(json.dumps(told, indent=1) + "\n")
    print(table(results))
    try:
        draw(results, HERE / "decoupled.svg")
    except ImportError:
        print("matplotlib is not installed: decoupled.svg was not drawn (pip install matplotlib)")


if __name__ == "__main__":
    main()
