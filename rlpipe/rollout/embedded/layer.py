"""The weights of one decoder layer, fused and ordered for the matrix products in `model`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from rlpipe.models import Architecture
from rlpipe.models.base import ROUTER_BIAS
from rlpipe.rollout.embedded import cpu_kernels
from rlpipe.rollout.embedded.cpu_kernels import WholeLayer
from rlpipe.rollout.embedded.latent import LatentOutput, LatentProjection
from rlpipe.rollout.embedded.linear import Linear
from rlpipe.rollout.embedded.mlp import GatedMlp, Mixture


@dataclass(slots=True)
class Layer:
    """Weights of one decoder layer, ready to multiply."""

    input_norm: torch.Tensor
    qkv: Linear | LatentProjection
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear | LatentOutput
    post_norm: torch.Tensor
    mlp: GatedMlp | Mixture
    whole: WholeLayer | None = None  # for `cpu_kernels.Kernels.run_layers`


def whole_layer(layer: Layer, arch: Architecture) -> WholeLayer | None:
    """Return what runs a layer in one call, valid while the layer lives; None if that is not possible."""
    mlp = layer.mlp
    if not cpu_kernels.fits(arch) or not isinstance(mlp, GatedMlp):
        return None
    products = layer.qkv, layer.output, mlp.gate_up, mlp.down
    linear = [product.described() for product in products if isinstance(product, Linear)]
    described = [product for product in linear if product is not None]
    if len(described) < len(products):
        return None

    norms = layer.input_norm, layer.q_norm, layer.k_norm, layer.post_norm
    addresses = [None if norm is None else norm.data_ptr() for norm in norms]
    sizes = arch.heads, arch.kv_heads, arch.head_dim, arch.rotary_dim
    return WholeLayer(*described, *addresses, *sizes, arch.norm_eps, arch.head_dim**-0.5)


def make_layer(
    arch: Architecture,
    get: Callable[[str], torch.Tensor],
    weights: Mapping[str, torch.Tensor],
    prefix: str,
    *,
    qk_norm: bool | None = None,
) -> Layer:
    """Make a layer from weights by their Hugging Face names.

    get: returns a weight on the device, by its name in `weights`. qk_norm: whether queries and keys are
    normed, None for the model's setting.
    """
    # RoPE here rotates pairs of neighbouring channels; the checkpoint pairs channels half a head apart.
    half = arch.rotary_dim // 2
    rotated = torch.stack((torch.arange(half), torch.arange(half) + half), 1).flatten()
    order = torch.cat((rotated, torch.arange(2 * half, arch.head_dim)))

    qk_norm = arch.qk_norm if qk_norm is None else qk_norm

    def interleaved(tensor: torch.Tensor) -> torch.Tensor:
        heads = tensor.view(-1, arch.head_dim, *tensor.shape[1:])
        return heads[:, order.to(tensor.device)].reshape(tensor.shape)

    def fused(names: tuple[str, ...], rotated: int = 0) -> Linear:
        parts = [f"{prefix}{name}" for name in names]
        stacked = []
        for kind in ("weight", "bias"):
            if f"{parts[0]}.{kind}" not in weights:
                stacked.append(None)
                continue

            # Only queries and keys are rotated; values keep the order of the checkpoint.
            tensors = [get(f"{part}.{kind}") for part in parts]
            stacked.append(torch.cat([*map(interleaved, tensors[:rotated]), *tensors[rotated:]]))

        return Linear(stacked[0], stacked[1])

    qk_norms = [
        interleaved(get(f"{prefix}self_attn.{n}.weight")) if qk_norm else None for n in ("q_norm", "k_norm")
    ]

    def mlp(name: str) -> GatedMlp:
        return GatedMlp(fused((f"{name}.gate_proj", f"{name}.up_proj")), fused((f"{name}.down_proj",)))

    def mixture() -> Mixture:
        router = get(f"{prefix}mlp.gate.weight")
        members = [mlp(f"mlp.experts.{index}") for index in range(arch.experts.count)]
        shared = mlp("mlp.shared_experts") if arch.experts.shared else None
        bias = weights[prefix + ROUTER_BIAS.hf[0]].to(router.device) if arch.experts.sigmoid else None
        return Mixture(arch.experts, router, members, shared, bias)

    # Latent attention normalizes compressed vectors instead of queries and keys.
    if arch.latent:
        within = get, f"{prefix}self_attn."
        attention = LatentProjection(arch, *within), None, None, LatentOutput(arch, *within)
    else:
        names = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
        attention = fused(names, rotated=2), *qk_norms, fused(("self_attn.o_proj",))

    layer = Layer(
        get(f"{prefix}input_layernorm.weight"),
        *attention,
        get(f"{prefix}post_attention_layernorm.weight"),
        mixture() if f"{prefix}mlp.gate.weight" in weights else mlp("mlp"),
    )
    layer.whole = whole_layer(layer, arch)
    return layer
