"""Decoders that mix gated delta nets with gated attention: dimensions, weights, and refusals.

Owns names and shapes of such layers (Qwen3-Next, Qwen3.5); `trainer/delta_net.py` computes them. A layer has
either a delta net or attention with an output gate. Its norms multiply by 1 + weight.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlpipe.models.base import DENSE_LAYER, Experts, Layout, Part, refuse, whole_number

_MEGATRON, _HF = "self_attention.", "linear_attn."
COMMON = (
    Part((f"{_MEGATRON}conv_weight",), (f"{_HF}conv1d.weight",), Layout.DELTA),
    Part((f"{_MEGATRON}A_log",), (f"{_HF}A_log",), Layout.DELTA),
    Part((f"{_MEGATRON}dt_bias",), (f"{_HF}dt_bias",), Layout.DELTA),
    Part((f"{_MEGATRON}norm_weight",), (f"{_HF}norm.weight",)),
    Part((f"{_MEGATRON}out_proj.weight",), (f"{_HF}out_proj.weight",), Layout.COLUMNS),
)
FUSED = (  # Qwen3-Next: files order the rows by key head, as Megatron does
    Part((f"{_MEGATRON}in_proj_qkvz.weight",), (f"{_HF}in_proj_qkvz.weight",), Layout.DELTA),
    Part((f"{_MEGATRON}in_proj_ba.weight",), (f"{_HF}in_proj_ba.weight",), Layout.DELTA),
    *COMMON,
)
SEPARATE = (  # Qwen3.5
    Part(
        (f"{_MEGATRON}in_proj_qkvz.weight",),
        tuple(f"{_HF}in_proj_{x}.weight" for x in ("qkv", "z")),
        Layout.DELTA,
        f"{_HF}in_proj_qkvz.weight",
    ),
    Part(
        (f"{_MEGATRON}in_proj_ba.weight",),
        tuple(f"{_HF}in_proj_{x}.weight" for x in ("b", "a")),
        Layout.DELTA,
        f"{_HF}in_proj_ba.weight",
    ),
    *COMMON,
)
DRAFT = (
    Part(("enorm.weight",), ("pre_fc_norm_embedding.weight",)),
    Part(("hnorm.weight",), ("pre_fc_norm_hidden.weight",)),
    Part(("eh_proj.weight",), ("fc.weight",), Layout.ROWS),
    Part(("final_layernorm.weight",), ("norm.weight",), served="model.norm.weight"),
)


def check_kernel(path: str) -> None:
    """Refuse to train delta nets on a GPU without their kernel. path: the model's. Raises ValueError.

    Without it, torch runs the update rule as a float32 loop over chunks: hundreds of thousands of launches
    per micro-batch.
    """
    if importlib.util.find_spec("fla") is None:
        raise ValueError(
            f"model.path={path!r} has gated delta nets, and their kernel for GPUs is not installed: "
            "pip install flash-linear-attention -c constraints_gpu.txt, or train on a CPU."
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class DeltaNet:
    """Gated delta nets instead of the attention of some layers.

    Each key head serves value_heads / key_heads value heads. kernel: tokens that the convolution reads.
    linear: for each layer, whether it has a delta net. separate: whether each input projection is a separate
    tensor in files.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    linear: tuple[bool, ...]
    separate: bool = False

    @property
    def keys(self) -> int:
        """Width of all keys together; all queries together have the same width."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Width of all values together, and of the output gate."""
        return self.value_heads * self.value_dim

    @property
    def state(self) -> int:
        """Elements stored per conversation and layer: the state, and inputs of the convolution."""
        return self.values * self.key_dim + self._convolved * (self.kernel - 1)

    @property
    def _convolved(self) -> int:
        return 2 * self.keys + self.values

    def shapes(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the HF name (after `layers.N.`) and shape of each weight of a delta net."""
        rows = {"in_proj_qkvz": self._convolved + self.values, "in_proj_ba": 2 * self.value_heads}
        if self.separate:
            rows = {"in_proj_qkv": self._convolved, "in_proj_z": self.values}
            rows |= {"in_proj_b": self.value_heads, "in_proj_a": self.value_heads}

        for name, size in rows.items():
            yield f"{_HF}{name}.weight", (size, hidden)
        yield f"{_HF}conv1d.weight", (self._convolved, 1, self.kernel)
        for name in ("A_log", "dt_bias"):
            yield f"{_HF}{name}", (self.value_heads,)
        yield f"{_HF}norm.weight", (self.value_dim,)
        yield f"{_HF}out_proj.weight", (hidden, self.values)

    def blocks(self, name: str) -> tuple[int, ...]:
        """Return the sizes of the row blocks of a weight, by HF name; each block is ordered by key head."""
        sizes = {
            "conv1d.weight": (self.keys, self.keys, self.values),
            "in_proj_qkv.weight": (self.keys, self.keys, self.values),
            "in_proj_z.weight": (self.values,),
            "in_proj_qkvz.weight": (self._convolved + self.values,),
            "in_proj_ba.weight": (2 * self.value_heads,),
        }
        return sizes.get(name.removeprefix(_HF), (self.value_heads,))


def read_delta_net(config: Mapping[str, Any], *, separate: bool) -> DeltaNet:
    """Read the delta nets of a config.json. Raises ValueError for settings that are not supported."""
    key_heads, value_heads, key_dim, value_dim, kernel = (
        whole_number(f"linear_{name}", config.get(f"linear_{name}"))
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    )
    layers, every = int(config["num_hidden_layers"]), config.get("full_attention_interval") or 4
    kinds = config.get("layer_types") or [
        "full_attention" if (index + 1) % every == 0 else "linear_attention" for index in range(layers)
    ]
    unknown = sorted({*kinds} - {"full_attention", "linear_attention"})
    drafts, gate = int(config.get("num_nextn_predict_layers") or 0), config.get("output_gate_type")
    refused = {
        f"linear_num_value_heads={value_heads} with linear_num_key_heads={key_heads}": value_heads
        % key_heads,
        f"{len(kinds)} layer_types with num_hidden_layers={layers}": len(kinds) != layers,
        f"layer_types={unknown}": unknown,
        "attention_bias=true": config.get("attention_bias"),
        "attn_output_gate=false": not config.get("attn_output_gate", True),
        f"output_gate_type={gate!r}": gate not in (None, "silu", "swish"),
        f"{drafts} MTP layers": drafts > 1,
        "mtp_use_dedicated_embeddings=true": config.get("mtp_use_dedicated_embeddings"),
    }
    refuse(
        refused,
        "use a Qwen3-Next or Qwen3.5 as released.",
    )
    return DeltaNet(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        kernel=kernel,
        linear=tuple(kind == "linear_attention" for kind in kinds),
        separate=separate,
    )


def read_experts(config: Mapping[str, Any]) -> Experts:
    """Read the MoE settings of a config.json with a gated shared expert. Raises ValueError for other MoEs."""
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    count, per_token, intermediate, shared = (whole_number(name, config.get(name)) for name in names)
    step, dense = config.get("decoder_sparse_step"), config.get("mlp_only_layers")
    normed = bool(config.get("norm_topk_prob", True))
    refused = {
        f"decoder_sparse_step={step}": step not in (None, 1),
        f"mlp_only_layers={dense}": bool(dense),
        f"num_experts_per_tok={per_token} of num_experts={count}": per_token > count,
        "num_experts_per_tok=1 with norm_topk_prob, whose router learns nothing": per_token == 1 and normed,
    }
    refuse(
        refused,
        "use a Qwen3-Next or Qwen3.5 as released, whose layers are all mixtures of experts.",
    )
    return Experts(
        count=count,
        per_token=per_token,
        intermediate=intermediate,
        normed=normed,
        shared=shared,
        gated=True,
    )


# On a server these layers have no module `self_attn`; the attention weights belong to the layer itself.
_DENSE = tuple(replace(part, served=part.served_name.replace("self_attn.", "")) for part in DENSE_LAYER)
LAYER_FUSED, LAYER_SEPARATE = (*_DENSE, *FUSED), (*_DENSE, *SEPARATE)
