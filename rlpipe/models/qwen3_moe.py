"""Qwen3-MoE: Qwen3's decoder with an MoE in every layer, and no MTP layer.

The auxiliary loss that balances experts in pretraining (`router_aux_loss_coef`) is not part of RL's
objective, so it is not used. The router computes in float32.
"""

from collections.abc import Mapping
from typing import Any

from rlpipe.models.base import Experts, Family, refuse, whole_number


def read_experts(config: Mapping[str, Any]) -> Experts:
    """Read the MoE settings of a config.json. Raises ValueError for settings that are not supported."""
    count = whole_number("num_experts", config.get("num_experts", config.get("num_local_experts")))
    per_token, intermediate = (
        whole_number(name, config.get(name)) for name in ("num_experts_per_tok", "moe_intermediate_size")
    )
    normed = bool(config.get("norm_topk_prob", False))
    step, dense, drafts = (
        config.get(name) for name in ("decoder_sparse_step", "mlp_only_layers", "num_nextn_predict_layers")
    )
    refused = {
        f"decoder_sparse_step={step}": step not in (None, 1),
        f"mlp_only_layers={dense}": bool(dense),
        f"num_nextn_predict_layers={drafts} with experts": bool(drafts),
        f"num_experts_per_tok={per_token} of num_experts={count}": per_token > count,
        "num_experts_per_tok=1 with norm_topk_prob, whose router learns nothing": per_token == 1 and normed,
    }
    refuse(
        refused,
        "use a Qwen3-MoE whose "
        "layers are all mixtures of experts, as the released ones are, with spec.mode=none, "
        "spec.drafter=eagle3 or spec.drafter=suffix.",
    )
    return Experts(count=count, per_token=per_token, intermediate=intermediate, normed=normed)


FAMILY = Family(name="qwen3_moe", qk_norm=True, experts=read_experts)
