"""Settings of metrics: what is displayed, where records are written, when the report is written.

Owns the fields and their checks; `rlpipe.metrics` reads them. `metrics.jsonl` and `events.jsonl` are always
written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpipe.config.alarms import AdviceConfig, AlarmsConfig
from rlpipe.config.choice import Choice
from rlpipe.config.limits import at_least
from rlpipe.config.probe import ProbeConfig


class WandbMode(Choice):
    """Whether records for Weights & Biases are uploaded, stored locally or not written."""

    AUTO = "auto"  # online if logged in, offline otherwise
    OFFLINE = "offline"  # stored in wandb/ of the run directory, to upload later with `wandb sync`
    ONLINE = "online"  # needs a login
    OFF = "off"


@dataclass(slots=True, kw_only=True)
class MetricsConfig:
    """Settings of how a run records and displays its measurements."""

    console: bool = True
    """Show progress on the terminal (or one plain line per step if standard output is not a terminal)."""

    wandb: WandbMode = WandbMode.AUTO
    """Whether W&B records are uploaded. See `WandbMode`."""

    wandb_project: str = "rlpipe"
    """Project of the W&B records."""

    tensorboard: bool = False
    """Write tensorboard/ in the run directory (needs the extra `dashboards`)."""

    prometheus_port: int = 0
    """Port that serves the newest values to Prometheus (needs the extra `dashboards`); 0: no port."""

    prometheus_host: str = "127.0.0.1"
    """Address on which this port listens; 0.0.0.0 for a scraper on another machine."""

    trace: bool = True
    """Write trace.json.gz, which Perfetto opens: the activities of every actor over time."""

    rollouts_per_step: int = 4
    """Number of trajectories of every step that are recorded token by token (docs/run_directory.md); 0:
    none."""

    probe: ProbeConfig = field(default_factory=ProbeConfig)
    """See `ProbeConfig`."""

    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    """See `AlarmsConfig`."""

    advice: AdviceConfig = field(default_factory=AdviceConfig)
    """See `AdviceConfig`."""

    waiting_s: float = 30.0
    """Seconds without progress after which the console displays what the run waits for, and again after 2, 4,
    8, ... times as long; 0: never."""

    report: bool = True
    """Write report.html at the end of the run, also after an interruption or a failure."""

    report_every: int = 0
    """Steps between two reports that are written during the run; 0: only at the end."""

    def __post_init__(self) -> None:
        at_least(0, self, "metrics", "report_every", remedy="0 writes the report only at the end")
        at_least(0, self, "metrics", "rollouts_per_step", remedy="0 writes none")
        at_least(0, self, "metrics", "waiting_s", remedy="0 never names what a run waits for")

        if not 0 <= self.prometheus_port < 65536:
            raise ValueError(
                f"metrics.prometheus_port={self.prometheus_port} is not a valid port. Set 1..65535, or 0."
            )
        if not self.wandb_project:
            raise ValueError("metrics.wandb_project is empty. Name a W&B project, or set metrics.wandb=off.")
