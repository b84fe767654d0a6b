"""Which engine a rollout worker has: the only place in the graph that picks one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlpipe.config.paths import resolve
from rlpipe.config.rollout import EngineKind
from rlpipe.config.run import Config
from rlpipe.rollout.engine import Engine


def check_engine(config: Config) -> None:
    """What can be known to be wrong with the engine on this machine, before anything is started.

    Nothing is checked for a Ray cluster that runs elsewhere. Raises ValueError.
    """
    if config.rollout.engine is EngineKind.SGLANG and not config.cluster.address:
        from rlpipe.rollout.sglang import check_launch

        check_launch(config.rollout, config.spec, resolve(config.model.path))


def make_engine(config: Config, on_event: Callable[..., None]) -> Engine:
    """The engine of `config.rollout`, running. on_event: told of its faults (kind, fields).

    Raises ValueError for settings, models or environments it cannot work with.
    """
    path: Path = resolve(config.model.path)
    if config.rollout.engine is EngineKind.SGLANG:
        from rlpipe.rollout.sglang import SglangEngine

        logs = resolve(config.run.dir) / "logs"
        return SglangEngine(config.rollout, config.spec, path, log_dir=logs, on_event=on_event)
    from rlpipe.rollout.embedded import EmbeddedEngine

    return EmbeddedEngine(config.rollout, config.spec, path)
