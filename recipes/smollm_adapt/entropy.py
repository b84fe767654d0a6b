"""Measures acceptance of the first draft against the target's entropy, under rejection and target-only.

    python -m recipes.smollm_adapt.entropy MODEL [--recipe NAME] [--temperatures 1 0.7] [--out DIR]
        [KEY=VALUE ...]

The model answers the held-out prompts of the recipe (adapt.in_domain, adapt.out_of_domain; adapt.eval_prompts
of each) without drafts. One pass of target and draft over these answers yields, at every context, the
target's entropy and the exact probability that a first draft is accepted:

    rejection     sum_v min(p(v), q(v))
    target-only   p(argmax q)

So both rules are compared at the same contexts, and no sampling of the verifier adds noise. Slopes are per
nat, over contexts and over the means of prompts; all errors are clustered by prompt. Writes entropy.json,
entropy.svg and entropy.png.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.adapt.generation import generate_domains
from rlpipe.adapt.run import check_adaptation
from rlpipe.batching.packing import pack, trainable
from rlpipe.cli.run import check_before, config_of
from rlpipe.config.paths import resolve_model
from rlpipe.config.run import Config
from rlpipe.config.spec import SpecMode
from rlpipe.diagnosis.regression import clustered_error, cross_section
from rlpipe.metrics.statistics import Estimate
from rlpipe.trainer.megatron import MegatronTrainer

RULES = {"rejection": "rejection", "target_only": "target-only"}  # column of the tables -> name
BINS = 10  # each with the same number of contexts
PANELS = 4  # next to each other
LEVEL = 0.95
Z = 1.96


@dataclass(slots=True, kw_only=True)
class Contexts:
    """Contexts of a held-out set at a temperature, [n] each; prompts: index of the prompt."""

    entropy: np.ndarray
    accept: dict[str, np.ndarray]
    prompts: np.ndarray


def measure(config: Config, trainer: MegatronTrainer) -> dict[str, Contexts]:
    """Roll out every held-out set without drafts, and read target and draft at its contexts."""
    _, domains = check_adaptation(config)
    rollouts = generate_domains(config, domains, SpecMode.NONE, weights=None, on_event=print)
    measured = {}
    for domain in domains:
        trajectories = [t for t in rollouts[domain.name].trajectories if trainable(t)]
        batch = pack(
            trajectories,
            None,
            config.trainer.micro_batch_tokens,
            temperature=config.rollout.temperature,
            share_prefixes=trainer.shares_prefixes,
        )

        # Only depth 1, because it depends on acceptance whether deeper depths are reached.
        order = {instance_id: number for number, instance_id in enumerate(domain.instance_ids)}
        tables = [
            (order[t.instance_id], table[1])
            for t, table in zip(trajectories, trainer.draft_tables(batch), strict=True)
            if table is not None
        ]
        columns = {
            name: np.concatenate([values[name][:, 0] for _, values in tables])
            for name in (*RULES, "target_entropy")
        }
        measured[domain.name] = Contexts(
            entropy=columns.pop("target_entropy"),
            accept=columns,
            prompts=np.concatenate([np.full(len(v["rejection"]), prompt) for prompt, v in tables]),
        )
    return measured


def analyse(contexts: Contexts) -> dict[str, Any]:
    """Compute means, slopes and bins of both rules, and the difference between the rules."""
    result: dict[str, Any] = {
        "contexts": len(contexts.entropy),
        "prompts": len(np.unique(contexts.prompts)),
        "entropy": round(float(contexts.entropy.mean()), 4),
    }
    bins = np.array_split(np.argsort(contexts.entropy, kind="stable"), BINS)
    for rule, name in RULES.items():
        accept = contexts.accept[rule]
        result[name] = {
            "acceptance": mean(accept, contexts.prompts),
            "slope_per_context": slope(accept, contexts.entropy, contexts.prompts),
            "slope_per_prompt": slope(*by_prompt(accept, contexts)),
            "bins": [
                [round(float(contexts.entropy[some].mean()), 4), *mean(accept[some], contexts.prompts[some])]
                for some in bins
                if len(some)
            ],
        }
    gap = contexts.accept["rejection"] - contexts.accept["target_only"]
    result["rejection minus target-only"] = mean(gap, contexts.prompts)
    return result


def mean(values: np.ndarray, prompts: np.ndarray) -> list[float | None]:
    """Return mean and standard error, clustered by prompt; None for the error of one prompt."""
    error = clustered_error(values - values.mean(), prompts) / len(values)
    return [round(float(values.mean()), 4), round(float(error), 4) if np.isfinite(error) else None]


def by_prompt(accept: np.ndarray, contexts: Contexts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean acceptance, mean entropy and number of every prompt."""
    labels, members = np.unique(contexts.prompts, return_inverse=True)
    sizes = np.bincount(members)
    return (
        np.bincount(members, weights=accept) / sizes,
        np.bincount(members, weights=contexts.entropy) / sizes,
        labels,
    )


def slope(accept: np.ndarray, entropy: np.ndarray, clusters: np.ndarray) -> dict[str, float]:
    """Estimate acceptance per nat, with its interval."""
    estimate: Estimate = cross_section(accept, entropy, clusters, level=LEVEL)
    return {name: round(getattr(estimate, name), 4) for name in ("value", "se", "low", "high")}


def as_text(fit: dict[str, float]) -> str:
    """Format a slope with its interval."""
    return f"{fit['value']:+.3f} [{fit['low']:+.3f}, {fit['high']:+.3f}]"


def draw(results: dict[str, dict[str, Any]], files: Sequence[Path]) -> None:
    """Draw a panel per held-out set: bins with intervals, and the slope per context in the legend."""
    from matplotlib.figure import Figure

    from rlpipe.report.png import PALETTE, TEXT

    sets = list(next(iter(results.values())))
    columns = min(PANELS, len(sets))
    rows = -(-len(sets) // columns)
    figure = Figure(figsize=(3.7 * columns, 3.6 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for panel, held_out in zip(panels.flat, sets, strict=False):
        for (temperature, by_set), style in zip(results.items(), ("-", "--", ":", "-."), strict=False):
            for colour, name in zip(PALETTE, RULES.values(), strict=False):
                row = by_set[held_out][name]
                x, y, errors = zip(*row["bins"], strict=True)
                fit = row["slope_per_context"]
                panel.errorbar(
                    x,
                    y,
                    yerr=[Z * (error or 0) for error in errors],
                    ls=style,
                    marker="o",
                    ms=4,
                    lw=1.6,
                    elinewidth=1,
                    capsize=2,
                    color=colour,
                    mfc=colour if style == "-" else "white",
                    label=f"{name}, T = {temperature}: {as_text(fit)}",
                )
        panel.set_title(held_out, color=TEXT, fontsize=11)
        panel.set_xlabel("entropy of the target (nats)", color=TEXT)
        panel.set_ylim(0, 1)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(b=False)
        panel.legend(
            title="slope per nat, 95%", fontsize=7, title_fontsize=7, frameon=False, loc="upper right"
        )

    for panel in panels.flat[len(sets) :]:
        panel.remove()
    for panel in panels[:, 0]:
        panel.set_ylabel("acceptance of the first draft", color=TEXT)
    for file in files:
        figure.savefig(file, dpi=90, metadata={"Date": None} if file.suffix == ".svg" else None)


def main() -> None:
    """Measure at every temperature, analyse, write and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="checkpoint with an MTP layer")
    parser.add_argument("--recipe", default="mtp_adapt", help="that names the held-out sets (%(default)s)")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[1.0, 0.7])
    parser.add_argument("--out", type=Path, default=Path("runs/entropy"))
    parser.add_argument("settings", nargs="*", help="as of rlpipe run, for example adapt.eval_prompts=40")
    args = parser.parse_intermixed_args()

    words = [
        f"+recipe={args.recipe}",
        f"model.path={args.model}",
        f"run.dir={args.out}",
        "adapt.eval_samples=1",
    ]
    results: dict[str, dict[str, Any]] = {}
    try:
        config, _ = config_of([*words, *args.settings])
        check_before(config)
    except ValueError as error:
        parser.error(str(error))

    trainer = MegatronTrainer(
        config.trainer,
        config.algo,
        replace(config.draft, depths=1),
        model_path=resolve_model(config.model.path),
        total_steps=1,
        adapt_only=True,
    )
    try:
        for temperature in args.temperatures:
            rollout = replace(config.rollout, temperature=temperature)
            measured = measure(replace(config, rollout=rollout), trainer)
            results[f"{temperature:g}"] = {name: analyse(contexts) for name, contexts in measured.items()}
    finally:
        trainer.close()

    args.out.mkdir(parents=True, exist_ok=True)
    settings = {"model": args.model, "recipe": args.recipe, "settings": args.settings, "level": LEVEL}
    columns = {"acceptance": ["value", "standard error"], "bins": ["entropy", "acceptance", "standard error"]}
    result = settings | {"columns": columns, "temperatures": results}
    (args.out / "entropy.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(results, [args.out / "entropy.svg", args.out / "entropy.png"])
    for temperature, by_set in results.items():
        for held_out, row in by_set.items():
            for name in RULES.values():
                fit, accept = row[name]["slope_per_context"], row[name]["acceptance"]
                print(
                    f"T={temperature} {held_out} {name}: acceptance {accept[0]:.3f}, per nat {as_text(fit)} "
                    f"over {row['contexts']} contexts"
                )
    print(f"figure: {args.out / 'entropy.svg'}")


if __name__ == "__main__":
    main()
