"""Settings of metrics: what is shown, where it goes, when the report is made.

Owns the fields and their checks; `rlpipe.metrics` does the work. `metrics.jsonl` and `events.jsonl`
are always written.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.config.choice import Choice


class WandbMode(Choice):
    """Where Weights & Biases records go."""

    AUTO = "auto"  # online when logged in, offline otherwise
    OFFLINE = "offline"  # wandb/ in the run directory; upload later with `wandb sync`
    ONLINE = "online"  # needs a login
    OFF = "off"


@dataclass(slots=True, kw_only=True)
class MetricsConfig:
    """console: show progress on the terminal (one plain line per step when it is not a terminal).
    wandb: where W&B records go. wandb_project: its project.
    report: write report.html when the run ends, also after an interruption or a failure.
    report_every: additionally every this many steps; 0 means only at the end.
    """

    console: bool = True
    wandb: WandbMode = WandbMode.AUTO
    wandb_project: str = "rlpipe"
    report: bool = True
    report_every: int = 0

    def __post_init__(self) -> None:
        if self.report_every < 0:
            raise ValueError(
                f"metrics.report_every={self.report_every} is negative. Set a number of steps, or 0 to "
                "write the report only at the end."
            )
        if not self.wandb_project:
            raise ValueError("metrics.wandb_project is empty. Name a W&B project, or set metrics.wandb=off.")
