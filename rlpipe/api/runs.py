"""Runs from Python: compose a configuration, change it, run it in this process, and read its results.

Implements `rlpipe.compose`, `rlpipe.run` and `rlpipe.load_run`. A run is checked, started and ended as on
the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlpipe.cli.hydra_errors import explained
from rlpipe.cli.run import check_before, config_of, usage
from rlpipe.config.paths import resolve
from rlpipe.config.run import Config
from rlpipe.loop.checkpoints import CheckpointStore
from rlpipe.metrics.rollouts import read_rollouts
from rlpipe.metrics.runs import load_run as read_run


@dataclass(slots=True, kw_only=True)
class Result:
    """The results of a run, read from its directory; `pandas.DataFrame` accepts each list of rows unchanged.

    path: the run directory. outcome: done, stopped, interrupted, failed, or "no end".
    metrics: a row per step, keyed by metric name (docs/metrics.md). events: a row per event.
    trajectories: the recorded trajectories, token by token (docs/run_directory.md#rolloutsstep_njsonl).
    checkpoints: Hugging Face directory of each checkpoint, keyed by step.
    """

    path: Path
    outcome: str
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]
    trajectories: list[dict[str, Any]]
    checkpoints: dict[int, Path]


def compose(overrides: Sequence[str] = ()) -> Config:
    """Return the configuration that a command line selects; change it as needed and pass it to `run`.

    Args:
        overrides: the arguments after `rlpipe run`, for example ["+recipe=swe_rl", "run.steps=2"].

    Raises:
        ValueError: no recipe, an unknown setting or an invalid value; the message names it and a remedy.
    """
    config, _ = config_of(overrides)
    if not config.recipe:
        raise ValueError(usage("run"))
    return config


def run(config: Config) -> Result:
    """Run a configuration to its end in this process and return its results.

    A run continues from the newest checkpoint in its directory (`config.run.dir`). The first interrupt
    finishes the step, saves a checkpoint and returns; the second ends the process.

    Args:
        config: from `compose`, with any changes; `config.yaml` in the run directory records it.

    Raises:
        ValueError: an invalid setting; the message has the problem, the value and a remedy.
        RunStopped: a rule ended the run. Any other exception means that the run failed.
    """
    try:
        composition = OmegaConf.structured(config)
        resolved = OmegaConf.to_yaml(composition, resolve=True)
        checked: Config = OmegaConf.to_object(composition)  # checks the types and each section
    except OmegaConfBaseException as error:
        raise ValueError(explained(error, [])) from error
    check_before(checked)

    from rlpipe.launch import launch  # after check_before, which sets the environment that Ray reads

    launch(checked, resolved)
    return load_run(resolve(checked.run.dir))


def load_run(path: str | Path) -> Result:
    """Read the results of a run directory; the run need not have finished.

    Raises:
        ValueError: `path` is not a run directory.
    """
    data = read_run(path)
    store = CheckpointStore(data.path / "checkpoints", keep=1)
    return Result(
        path=data.path,
        outcome=data.outcome,
        metrics=data.records,
        events=data.events,
        trajectories=list(read_rollouts(data.path)),
        checkpoints={step: store.path(step) / "hf" for step in store.steps()},
    )
