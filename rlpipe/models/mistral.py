"""Mistral without sliding-window attention (v0.2 and later): Llama's decoder, no biases."""

from rlpipe.models.base import Family

FAMILY = Family(
    name="mistral",
    output_bias=False,
    # Without sliding_window in config.json, transformers' default of 4096 applies.
    sliding_window=lambda config: config.get("sliding_window", 4096) is not None,
)
