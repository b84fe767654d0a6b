"""The in-process decoding engine: continuous batching, draft models, lossless verification."""

from rlpipe.rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
