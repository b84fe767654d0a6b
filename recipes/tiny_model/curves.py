"""Draws the metrics.jsonl of a warm start.

    python -m recipes.tiny_model.curves RUN [--out curves.svg]

Left: teacher-forced accuracy on the model's own tokens, during the stages skill and imitation.
Right: expected acceptance Σ_v min(p, q) of each depth, while the MTP layer learns. A dot is one record.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

STAGES = {"skill": "#0072B2", "imitation": "#D55E00", "mtp": "#009E73"}


def main() -> None:
    """Read the metrics and draw the curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("curves.svg"))
    args = parser.parse_args()
    stages: dict[str, dict[int, dict]] = {stage: {} for stage in STAGES}
    for line in (args.run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        stages[record["stage"]][record["step"]] = record  # a resumed run repeats some records

    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "tiny_model"
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
    start = 0
    for stage in ("skill", "imitation"):
        own = stages[stage].values()
        steps = [start + r["step"] for r in own]
        left.plot(steps, [r["written_accuracy"] for r in own], ".-", color=STAGES[stage], lw=1, label=stage)
        start = max(steps, default=start)
    own = list(stages["mtp"].values())
    for depth in range(1, sum(key.startswith("overlap/") for key in own[0]) + 1):
        values = [r[f"overlap/depth_{depth}"] for r in own]
        right.plot(
            [r["step"] for r in own],
            values,
            (".-", ".--", ".:")[(depth - 1) % 3],
            color=STAGES["mtp"],
            lw=1,
            label=f"depth {depth}",
        )
    left.set(xlabel="step", ylim=(0, 1), title="written_accuracy")
    right.set(xlabel="step of the mtp stage", title="overlap")
    for axis in (left, right):
        axis.title.set_fontsize(9)
        axis.legend(fontsize=8, loc="lower right")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(args.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
