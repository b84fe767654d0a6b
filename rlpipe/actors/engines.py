"""Which engine a rollout worker has: the one that `make` of `rlpipe.rollout.NAME` starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from rlpipe.config.paths import resolve
from rlpipe.config.rollout import EngineKind
from rlpipe.config.run import Config
from rlpipe.config.spec import SpecMode
from rlpipe.models.checkpoint import has_mtp, read_config
from rlpipe.rollout.engine import Engine


def check_engine(config: Config) -> None:
    """What can be known to be wrong with the engine on this machine, before anything is started.

    Nothing is checked for a Ray cluster that runs elsewhere. Raises ValueError.
    """
    if config.rollout.engine is EngineKind.SGLANG and not config.cluster.address:
        from rlpipe.rollout.sglang import check_launch

        check_launch(config.rollout, config.spec, resolve(config.rollout_model))


def make_engine(config: Config, on_event: Callable[..., None], model: str = "") -> Engine:
    """The engine of `config.rollout`, running. on_event: told of its faults (kind, fields).

    model: path of what it serves, if not the model that generates; without a draft where it has no MTP layer.
    Raises ValueError for settings, models or environments it cannot work with.
    """
    path: Path = resolve(model or config.rollout_model)
    spec = config.spec
    if model and spec.needs_mtp and not has_mtp(read_config(path)):
        spec = replace(spec, mode=SpecMode.NONE)
    made_by = import_module(f"rlpipe.rollout.{config.rollout.engine.value}")
    return made_by.make(
        config.rollout, spec, path, log_dir=resolve(config.run.dir) / "logs", on_event=on_event
    )
