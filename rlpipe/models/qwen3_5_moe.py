"""Qwen3.5 with experts (35B-A3B and larger): Qwen3-Next with separate input projections; only its text part.

Its files keep the text under `model.language_model`, with a vision tower that is not read and that exports
carry over (see `stored`).
"""

from dataclasses import replace

from rlpipe.models.delta_net import LAYER_SEPARATE, read_delta_net
from rlpipe.models.qwen3_next import FAMILY as _NEXT

FAMILY = replace(
    _NEXT,
    name="qwen3_5_moe",
    layer=LAYER_SEPARATE,
    delta=lambda config: read_delta_net(config, separate=True),
)
