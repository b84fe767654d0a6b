"""Llama 2 and 3 without RoPE scaling: no biases unless `attention_bias` asks for them."""

from rlpipe.models.base import Family

FAMILY = Family(name="llama")
