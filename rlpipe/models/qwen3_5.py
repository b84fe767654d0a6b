"""Qwen3.5, dense: like `qwen3_5_moe`, but with one MLP in each layer."""

from dataclasses import replace

from rlpipe.models.qwen3_5_moe import FAMILY as _MIXTURE

FAMILY = replace(_MIXTURE, name="qwen3_5", experts=None)
