"""The TensorBoard sink: `tensorboard --logdir RUN/tensorboard`.

Owns the event files, written by tensorboardX (this needs neither TensorFlow nor torch). In a resumed run the
first record hides all earlier points from its step on, so that steps that are written again replace them.
`LAYOUT` defines the tab "Custom scalars": the charts that answer most questions about a run.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from rlpipe.metrics.bus import STEP

SPLIT, PARTS = "acceptance_split", "(total|entropy|mismatch|staleness|contexts)"
# {category: {title: ["Multiline", [regular expressions of tags]]}}
LAYOUT = {
    category: {title: ["Multiline", [f"^{tag}$" for tag in tags]] for title, tags in charts.items()}
    for category, charts in {
        "Training": {
            "Reward": ["critic/rewards/mean"],
            "Held-out reward": ["val/([^/]+/)?reward"],
            "Entropy of the target": ["rollout/entropy"],
            "Staleness of trained trajectories": ["training/off_policy/trajectory_staleness/(mean|max)"],
        },
        "Acceptance": {
            "Acceptance rate by depth": [r"spec/acceptance_rate/depth_\d+"],
            "Tokens per verify step": ["spec/acceptance_length"],
            "Same contexts, newest draft: how it fits": ["probe/fixed/(rejection|target_entropy)/depth_1"],
            "Same drafts: engine against newest weights": ["probe/visited/(observed|current)_rate"],
            "Engines against the newest weights": ["probe/staleness"],
            "Change of the acceptance rate, and its parts": [f"{SPLIT}/{PARTS}"],
            "Change of the acceptance rate at depth 1, and its parts": [f"{SPLIT}/{PARTS}/depth_1"],
        },
        "Time": {
            "Seconds of a step": ["timing_s/(step|wait_rollout|update_actor|update_weights|gen)"],
            "Utilisation": ["perf/utilisation/(rollout|trainer)"],
        },
    }.items()
}


class TensorBoardSink:
    """A sink that writes records as scalars and histograms, under the names of the metrics."""

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None

    def open(self) -> None:
        """Check the installation; raises ValueError when tensorboardX is missing."""
        try:
            import tensorboardX  # noqa: F401
        except ImportError as error:
            raise ValueError(
                'metrics.tensorboard=true needs tensorboardX: pip install -e ".[dashboards]".'
            ) from error

    def record(self, record: dict[str, Any]) -> None:
        """Write one step; non-finite values are left out."""
        from tensorboardX import SummaryWriter

        step, wall = int(record[STEP]), record["time"]

        # The writer opens here, because the first step decides which points of an earlier process are hidden.
        if self._writer is None:
            self._writer = SummaryWriter(str(self._directory), purge_step=step, flush_secs=10)
            self._writer.add_custom_scalars(LAYOUT)
        for name, value in record.items():
            if isinstance(value, dict):
                self._histogram(name, value["edges"], value["counts"], step=step, wall=wall)
            elif value is not None and name not in (STEP, "time"):
                self._writer.add_scalar(name, value, step, walltime=wall)

    def event(self, event: dict[str, Any]) -> None:
        """Write faults and warnings as text, next to the curves."""
        if self._writer is not None and event["level"] != "info":
            fields = {k: v for k, v in event.items() if k not in ("time", "kind", "level")}
            self._writer.add_text(f"{event['level']}/{event['kind']}", str(fields), walltime=event["time"])

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._writer.close()

    def _histogram(
        self, name: str, edges: list[float], counts: list[float], *, step: int, wall: float
    ) -> None:
        """Write a histogram; sums are computed from bin centres, and TensorBoard takes only upper bounds."""
        centres = [(a + b) / 2 for a, b in pairwise(edges)]
        self._writer.add_histogram_raw(
            name,
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(x * n for x, n in zip(centres, counts, strict=True)),
            sum_squares=sum(x * x * n for x, n in zip(centres, counts, strict=True)),
            bucket_limits=edges[1:],
            bucket_counts=counts,
            global_step=step,
            walltime=wall,
        )
