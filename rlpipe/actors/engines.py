"""The table of rollout engines, and the engine that a rollout worker starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlpipe.config.paths import resolve, resolve_model
from rlpipe.config.rollout import EngineKind, RolloutConfig
from rlpipe.config.run import ClusterMode, Config, with_weight_transfer
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.models.checkpoint import has_mtp, read_config
from rlpipe.rollout.engine import Engine


@dataclass(slots=True, kw_only=True)
class EngineEntry:
    """One row of `ENGINES`.

    make: starts the engine on a checkpoint; log_dir and on_event are for engines with logs and failures.
    check: raises ValueError for wrong settings or machines, before anything is started.
    """

    make: Callable[..., Engine]
    check: Callable[[RolloutConfig, SpecConfig, Path], object] | None = None


def _make_embedded(config: RolloutConfig, spec: SpecConfig, model_path: Path, **_: object) -> Engine:
    from rlpipe.rollout.embedded import EmbeddedEngine

    return EmbeddedEngine(config, spec, model_path)


def _make_sglang(config: RolloutConfig, spec: SpecConfig, model_path: Path, **options: Any) -> Engine:
    from rlpipe.rollout.sglang import SglangEngine

    return SglangEngine(config, spec, model_path, **options)


def _check_sglang(config: RolloutConfig, spec: SpecConfig, model_path: Path) -> None:
    from rlpipe.rollout.sglang import check_launch

    check_launch(config, spec, model_path)


# Import torch and the engines on first use, as `rlpipe check` does not need them.
ENGINES: dict[EngineKind, EngineEntry] = {
    EngineKind.EMBEDDED: EngineEntry(make=_make_embedded),
    EngineKind.SGLANG: EngineEntry(make=_make_sglang, check=_check_sglang),
}


def check_engine(config: Config) -> None:
    """Refuse settings or machines with which the engine would not start. Raises ValueError.

    A remote Ray cluster is not checked.
    """
    check = ENGINES[config.rollout.engine].check
    if check is None or config.cluster.address:
        return

    # Resolve weight_transfer=auto first, because the result may not work on this machine.
    if config.cluster.mode is ClusterMode.RAY:
        import torch

        config, _ = with_weight_transfer(config, hosts=1, gpus=torch.cuda.is_available())
    check(config.rollout, config.spec, resolve_model(config.rollout_model))


def make_engine(config: Config, on_event: Callable[..., None], model: str = "") -> Engine:
    """Start the engine of `config.rollout`.

    on_event: called for each failure of the engine (kind, fields). model: path of another model to serve
    instead of the generating one; such a model runs without a draft if it has no MTP layer.
    Raises ValueError for unsupported settings, models or environments.
    """
    path: Path = resolve_model(model or config.rollout_model)
    spec = config.spec
    if model and spec.needs_mtp and not has_mtp(read_config(path)):
        spec = replace(spec, mode=SpecMode.NONE)

    make = ENGINES[config.rollout.engine].make
    return make(config.rollout, spec, path, log_dir=resolve(config.run.dir) / "logs", on_event=on_event)
