"""Qwen3.5 with experts (35B-A3B and larger): like Qwen3-Next with separate input projections.

Only the text model is supported, `model.language_model` in files. The vision tower is not read, but exports
copy it (see `stored`).
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
