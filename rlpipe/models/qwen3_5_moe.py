"""Qwen3.5 with experts (35B-A3B and larger): Qwen3-Next with input projections apart; its text part alone.

Its files keep the text under `model.language_model`, beside a vision tower that is not read and that exports
carry over (see `stored`).
"""

from rlpipe.models.base import Family
from rlpipe.models.delta_net import DRAFT, LAYER_APART, read_delta_net, read_experts

FAMILY = Family(
    name="qwen3_5_moe",
    qk_norm=True,
    output_bias=False,
    layer=LAYER_APART,
    draft=DRAFT,
    experts=read_experts,
    rotary=0.25,
    delta=lambda config: read_delta_net(config, apart=True),
    draft_place="",
    draft_block="layers.0",
    draft_on_cpu=False,
    float32=("linear_attn.A_log",),
)
