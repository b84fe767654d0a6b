"""Chooses the sinks of a run (`make_sinks`), and holds the only code that uses Weights & Biases.

Owns the choice and `WandbSink`; every other sink has a separate file: jsonl, console, trace, tensorboard,
prometheus. A sink does its slow work (imports, logins, the network) in `open`, on a separate thread, so no
sink delays the start of a run.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rlpipe.config.home import provide_home
from rlpipe.config.metrics import WandbMode
from rlpipe.config.run import Config, Task
from rlpipe.metrics.bus import STEP, Sink
from rlpipe.metrics.console import ConsoleSink, Header
from rlpipe.metrics.console_log import NAME as CONSOLE_LOG
from rlpipe.metrics.console_log import ConsoleLog
from rlpipe.metrics.grafana import NAME as GRAFANA
from rlpipe.metrics.jsonl import MetricsFile, read_jsonl
from rlpipe.metrics.prometheus import PrometheusSink
from rlpipe.metrics.tensorboard import TensorBoardSink
from rlpipe.metrics.trace import NAME as TRACE
from rlpipe.metrics.trace import TraceFile

logger = logging.getLogger(__name__)

_INIT_S = 15.0  # timeout until W&B's server accepts a run


def make_sinks(config: Config, run_dir: Path) -> list[Sink]:
    """Return `MetricsFile` and the sinks that the settings name. The bus itself writes events.jsonl."""
    sinks: list[Sink] = [MetricsFile(run_dir / "metrics.jsonl")]
    header = run_header(config, run_dir)
    sinks.append(ConsoleLog(header, run_dir / CONSOLE_LOG))
    if config.metrics.console:
        sinks.append(ConsoleSink(header))
    if config.metrics.trace:
        sinks.append(TraceFile(run_dir / TRACE))
    if config.metrics.tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard"))
    if config.metrics.prometheus_port:
        host, port = config.metrics.prometheus_host, config.metrics.prometheus_port
        quiet_s = 60 * config.metrics.alarms.stall_minutes
        dashboard = run_dir / GRAFANA
        sinks.append(PrometheusSink(host, port, dashboard=dashboard, run=run_dir.name, quiet_s=quiet_s))
    if config.metrics.wandb is not WandbMode.OFF:
        sinks.append(
            WandbSink(
                run_dir=run_dir,
                mode=config.metrics.wandb,
                project=config.metrics.wandb_project,
                group=config.recipe,
                config=asdict(config),
            )
        )
    return sinks


def run_header(config: Config, run_dir: Path) -> Header:
    """Return what the console displays about a run."""
    spec, drafter = config.spec, config.spec.drafter.kind.title
    draft = f"{drafter}, {spec.mode}, gamma {spec.gamma}" if spec.depth else "no speculation"
    details = [("model", config.model.path), ("rollout", draft), _work(config), ("run", str(run_dir))]

    # Records are read from the last to the first, so that the first reward of each set remains.
    baseline: dict[str, float] = {}
    for record in reversed(read_jsonl(run_dir / "metrics.jsonl")[0]):
        rewards = {n: r for n, r in record.items() if n.startswith("val/") and n.endswith("/reward")}
        baseline |= {name: reward for name, reward in rewards.items() if reward is not None}

    return Header(
        title=config.recipe or run_dir.name,
        details=details,
        total_steps=config.run.steps,
        trains_draft=config.task is Task.MTP_ADAPT,
        baseline=baseline,
    )


def _work(config: Config) -> tuple[str, str]:
    """Return a label and a text that describe the work of one step, for the console's header."""
    if config.task is Task.MTP_ADAPT:
        anchors = "" if config.draft.windows else f", {config.draft.anchors} anchors"
        objective = f"{config.draft.objective}{anchors}"
        return "draft", f"trained by {objective}; {config.adapt.batch} trajectories a step"
    lag, sizes = config.pipeline.max_staleness, config.pipeline
    loop = f"asynchronous, staleness ≤ {lag}" if lag else "synchronous"
    attempts = f"{sizes.prompts_per_step} × {sizes.group_size} attempts a step"
    return "loop", f"{loop}; {attempts}; {config.cluster.mode}"


@dataclass(slots=True, kw_only=True)
class WandbSink:
    """A sink that logs to Weights & Biases; its files are in the run directory.

    run_dir: holds wandb/ and the id under which a resumed run continues. mode: AUTO means online if there is
    an API key, else offline. config: settings that W&B displays with the run.
    """

    run_dir: Path
    mode: WandbMode
    project: str
    group: str
    config: dict[str, Any]
    _run: Any = field(default=None, init=False)
    name: ClassVar[str] = "wandb"

    def open(self) -> None:
        """Start the run.

        Raises ValueError when mode is ONLINE and there is no API key.
        """
        has_key = logged_in()
        if self.mode is WandbMode.ONLINE and not has_key:
            raise ValueError(
                "metrics.wandb=online needs a login: run `wandb login`, or set metrics.wandb=offline and "
                "upload later with `wandb sync`."
            )
        provide_home()
        # W&B advertises Weave when an agent has imported a client such as openai.
        if importlib.util.find_spec("weave") is None:
            os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")
        import wandb

        # Without a key, W&B would wait for a login; offline files can be uploaded later.
        online = has_key and self.mode is not WandbMode.OFFLINE

        (self.run_dir / "wandb").mkdir(parents=True, exist_ok=True)
        try:
            self._init(online=online)
        # W&B raises its own errors and those of its HTTP library, some with messages of many lines.
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            # Otherwise W&B's service would print a traceback when the run ends.
            wandb.teardown()
            if not online or self.mode is WandbMode.ONLINE:
                raise ValueError(f"W&B did not start ({type(error).__name__}: {first})") from None
            logger.warning(
                "W&B did not accept the run (%s: %s): recording offline. Check WANDB_API_KEY and network, "
                "and upload later with `wandb sync %s`.",
                type(error).__name__,
                first,
                self.run_dir / "wandb" / "offline-run-*",
            )
            self._init(online=False)

    def _init(self, *, online: bool) -> None:
        """Open the W&B run."""
        import wandb

        self._run = wandb.init(
            project=self.project,
            group=self.group or None,
            name=self.run_dir.name,
            id=self._stable_id(),
            resume="allow" if online else None,
            dir=self.run_dir,
            config=self.config,
            mode="online" if online else "offline",
            settings=wandb.Settings(silent=True, console="off", disable_git=True, init_timeout=_INIT_S),
        )
        self._run.define_metric("*", step_metric=STEP)

    def record(self, record: dict[str, Any]) -> None:
        """Log one step; W&B has no null, so non-finite values are left out."""
        import wandb

        self._run.log(
            {
                name: wandb.Histogram(np_histogram=(value["counts"], value["edges"]))
                if isinstance(value, dict)
                else value
                for name, value in record.items()
                if value is not None and name != "time"
            }
        )

    def close(self) -> None:
        """Flush, then end the run and the service process that W&B started for it."""
        if self._run is not None:
            import wandb

            self._run.finish()
            wandb.teardown()

    def _stable_id(self) -> str:
        file = self.run_dir / "wandb" / "run_id"
        if not file.exists():
            # A resumed run continues under the id of its first start.
            file.write_text(uuid.uuid4().hex[:12])
        return file.read_text().strip()


def default_entity() -> str:
    """Return the user or team that W&B uses by default; needs a login, because it queries the server."""
    import wandb

    return wandb.Api().default_entity or ""


def logged_in() -> bool:
    """Return whether W&B would find an API key, without importing wandb or using the network."""
    if os.environ.get("WANDB_API_KEY"):
        return True

    import netrc

    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        return file.is_file() and netrc.netrc(str(file)).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError) as error:
        logger.warning("%s cannot be read, W&B counts as not logged in: %s", file, error)
        return False
