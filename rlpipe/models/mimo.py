"""MiMo-7B: Qwen2's decoder, and MTP layers under `model.mtp_layers.` (see `checkpoint`)."""

from rlpipe.models.base import Family

FAMILY = Family(name="mimo", qkv_bias=True, output_bias=False)
