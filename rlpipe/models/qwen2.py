"""Qwen2 and Qwen2.5: biases on query, key and value, which config.json does not mention."""

from rlpipe.models.base import Family

FAMILY = Family(name="qwen2", qkv_bias=True, output_bias=False)
