"""The in-process decoding engine: continuous batching, MTP drafts, lossless verification."""

from pathlib import Path
from typing import Any

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine", "make"]


def make(config: RolloutConfig, spec: SpecConfig, model_path: Path, **_: Any) -> EmbeddedEngine:
    """An engine of this process, which writes no logs and has no faults to tell."""
    return EmbeddedEngine(config, spec, model_path)
