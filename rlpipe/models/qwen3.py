"""Qwen3, dense: an RMSNorm on each query and key head, no biases unless `attention_bias` is true."""

from rlpipe.models.base import Family

FAMILY = Family(name="qwen3", qk_norm=True)
