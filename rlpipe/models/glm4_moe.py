"""GLM-4.5, 4.6 and 4.7: dense layers, then an MoE with sigmoid scores, and one MTP layer.

Half of each head is rotated. Queries and keys have biases, and in the larger model also norms. Each expert
has a bias, which is added to the scores only to choose experts. It balanced the experts in pretraining, and
RL does not train it. The MTP layer is a decoder layer with experts, named `model.layers.N` in files, where N
is the number of layers (see `checkpoint`).
"""

from collections.abc import Mapping
from typing import Any

from rlpipe.models.base import Experts, Family, Layout, Part, refuse, whole_number

DRAFT = (
    Part(("enorm.weight",), ("enorm.weight",)),
    Part(("hnorm.weight",), ("hnorm.weight",)),
    Part(("eh_proj.weight",), ("eh_proj.weight",), Layout.ROWS),
    Part(("final_layernorm.weight",), ("shared_head.norm.weight",)),
)


_GROUPS = {
    False: "one group of experts",
    True: "one group of experts or twice as many experts for a token as groups",
}


def read_experts(
    config: Mapping[str, Any], released: str = "a GLM-4.5, 4.6 or 4.7", *, grouped: bool = False
) -> Experts:
    """Read the MoE settings of a config.json. Raises ValueError for settings that are not supported.

    released: models that can be used, for the message. grouped: whether groups of experts are supported.
    """
    count = whole_number("n_routed_experts", config.get("n_routed_experts", config.get("num_local_experts")))
    per_token, intermediate = (
        whole_number(name, config.get(name)) for name in ("num_experts_per_tok", "moe_intermediate_size")
    )
    shared = whole_number("n_shared_experts", config.get("n_shared_experts", 1))
    layers, dense = (
        int(config.get(name, default))
        for name, default in (("num_hidden_layers", 0), ("first_k_dense_replace", 1))
    )
    groups, drafts = int(config.get("n_group") or 1), int(config.get("num_nextn_predict_layers") or 0)
    taken = int(config.get("topk_group") or 1) if groups > 1 else 1
    refused = {
        f"n_group={groups}": groups > 1 and not grouped,
        f"n_group={groups} of n_routed_experts={count}": count % groups != 0,
        f"topk_group={taken} of n_group={groups} with num_experts_per_tok={per_token}": groups > 1
        and not (taken <= groups and per_token <= taken * (count // groups) and per_token // taken == 2),
        "norm_topk_prob=false": not config.get("norm_topk_prob", True),
        f"num_experts_per_tok={per_token} of n_routed_experts={count}": not 1 < per_token <= count,
        f"num_nextn_predict_layers={drafts}": drafts > 1,
        f"first_k_dense_replace={dense} of num_hidden_layers={layers}": not 0 <= dense < layers,
    }
    refuse(
        refused,
        f"use {released} as "
        f"released, with {_GROUPS[grouped]}, weights that sum to 1 and at most one MTP layer.",
    )
    return Experts(
        count=count,
        per_token=per_token,
        intermediate=intermediate,
        normed=True,
        sigmoid=True,
        scaling=float(config.get("routed_scaling_factor", 1.0)),
        shared=shared * intermediate,
        dense=dense,
        groups=groups,
        groups_per_token=taken,
    )


FAMILY = Family(
    name="glm4_moe",
    output_bias=False,
    draft=DRAFT,
    experts=read_experts,
    rotary=0.5,
    draft_block="decoder",
    draft_on_cpu=False,  # set_embed_and_head of SGLang 0.5.23 waits for CUDA
    float32=("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
)
