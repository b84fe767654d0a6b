"""Llama 2 and 3 without RoPE scaling: no biases unless `attention_bias` is true."""

from rlpipe.models.base import Family

FAMILY = Family(name="llama")
