"""Draws Bebop's Figures 3 and 8 from the directories of finished RL runs, without running anything.

    python recipes/mtp_adapt/figures.py target_only=RUN hard_ce=RUN kl=RUN e2e_tv=RUN --out figures.svg
        [--json figures.json]

Left (Fig. 8): acceptance rate of each step against the entropy of the target, with a robust line fitted to
the early phase. Right (Fig. 3): the change of acceptance over the steps (solid), and the part of it that
entropy explains (dashed). The gap between the two lines is mismatch. Intervals of the last window are in the
JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rlpipe.diagnosis.decomposition import ENTROPY, RATE, decompose_each, paired
from rlpipe.metrics.runs import RunData, load_run
from rlpipe.metrics.statistics import Estimate

SHORTEST = 12
LEVEL = 0.95
COLOURS = ["#555555", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]


def labelled(items: list[str]) -> dict[str, RunData]:
    """Read LABEL=RUN arguments. Raises ValueError for a run that is too short or has no drafts."""
    runs = {}
    for item in items:
        label, _, path = item.partition("=")
        run = load_run(Path(path or label))
        if len(paired(run, RATE, ENTROPY)[0]) < SHORTEST:
            raise ValueError(f"{item}: fewer than {SHORTEST} steps with drafts: train longer.")
        runs[label if path else run.name] = run
    if len(runs) < len(items) or len(runs) > len(COLOURS):
        raise ValueError(f"give at most {len(COLOURS)} runs, each a label of its own: LABEL=RUN.")
    return runs


def found(run: RunData) -> dict[str, Any]:
    """Return the slope and the split of the last window, with intervals."""
    last = decompose_each(*paired(run, RATE, ENTROPY), level=LEVEL)[-1]
    parts = {name: plain(getattr(last, name)) for name in ("slope", "total", "entropy", "mismatch")}
    spans = {"early": last.early, "window": last.window}
    return {**spans, "entropy_change": round(last.entropy_change, 4), **parts}


def plain(estimate: Estimate) -> dict[str, float]:
    """Return value and interval."""
    return {key: round(getattr(estimate, key), 4) for key in ("value", "low", "high")} | {"level": LEVEL}


def draw(runs: dict[str, RunData], out: Path) -> None:
    """Draw both figures side by side."""
    import matplotlib

    matplotlib.use("svg" if out.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt

    figure, (against, over) = plt.subplots(1, 2, figsize=(9.5, 3.8))
    for (label, run), colour in zip(runs.items(), COLOURS, strict=False):
        steps, rate, entropy = paired(run, RATE, ENTROPY)
        parts = decompose_each(steps, rate, entropy, level=LEVEL)
        slope, early = parts[-1].slope, steps <= parts[-1].early[1]
        against.plot(entropy, rate, ".", ms=4, alpha=0.5, color=colour)
        ends = [entropy.min(), entropy.max()]
        line = [rate[early].mean() + slope.value * (x - entropy[early].mean()) for x in ends]
        words = f"{label}: {slope.value:+.2f} [{slope.low:.2f}, {slope.high:.2f}] per nat"
        against.plot(ends, line, color=colour, label=words)
        places = [part.window[1] for part in parts]
        over.plot(places, [part.total.value for part in parts], color=colour, label=label)
        over.plot(places, [part.entropy.value for part in parts], "--", lw=0.9, color=colour)
    against.set(xlabel="entropy of the target (nat)", ylabel="acceptance rate", title="Fig. 8: over entropy")
    over.axhline(0, color="k", lw=0.5)
    over.set(
        xlabel="step",
        ylabel="change of acceptance rate",
        title="Fig. 3: total (solid), along the slope (dashed)",
    )
    for axis in (against, over):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6.5)
    figure.tight_layout()
    figure.savefig(out, dpi=150)


def main() -> None:
    """Read the runs, draw the figures, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="LABEL=RUN")
    parser.add_argument("--out", type=Path, default=Path("figures.svg"), help=".svg, .png or .pdf")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    try:
        runs = labelled(args.runs)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    draw(runs, args.out)
    result = {label: found(run) for label, run in runs.items()}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    print(f"figures: {args.out}")


if __name__ == "__main__":
    main()
