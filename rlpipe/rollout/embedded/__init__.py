"""The in-process decoding engine: continuous batching, MTP drafts, lossless verification."""

from rlpipe.rollout.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
