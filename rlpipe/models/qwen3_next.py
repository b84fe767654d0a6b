"""Qwen3-Next: gated delta nets and gated attention, experts with a gated shared expert, and one MTP layer.

The MTP layer has attention and experts. Files name it `mtp` (see `stored`), and config.json does not mention
it.
"""

from rlpipe.models.base import Family
from rlpipe.models.delta_net import DRAFT, LAYER_FUSED, read_delta_net, read_experts

FAMILY = Family(
    name="qwen3_next",
    qk_norm=True,
    output_bias=False,
    layer=LAYER_FUSED,
    draft=DRAFT,
    experts=read_experts,
    rotary=0.25,
    delta=lambda config: read_delta_net(config, separate=False),
    draft_place="",
    draft_block="layers.0",
    draft_on_cpu=False,
    float32=("linear_attn.A_log",),
)
