"""The forward pass of target and draft over a row-wise KV cache: plain torch ops, no modules.

Owns fused weights, RoPE and attention; knows nothing of requests or sampling. A pass covers B
consecutive cache rows with q tokens each; `Span` carries what all its layers share.

    x [B*q, H] -> per layer: norm, fused qkv, RoPE, cache write, attention over [B, :L], SwiGLU

Equal to transformers' logits (the tests compare), with two re-arrangements: q, k, v and gate, up are
fused, and the q, k channels are stored interleaved so that RoPE is one complex product. Scores do
not change, because q and k are permuted alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from rlpipe.hf_layout import MTP_PREFIX
from rlpipe.rollout.embedded.architecture import Architecture
from rlpipe.rollout.embedded.attention import attend, attend_products, expand_mask, use_products
from rlpipe.rollout.embedded.linear import Linear


@dataclass(slots=True, kw_only=True)
class Span:
    """A pass over rows first..first+batch-1, `width` tokens each; what all its layers share.

    slots: [B, q, 2 * kv_heads] where in a layer's flat cache each key and value head of a token goes.
    rotation: [B, q, D/2] complex64. keys, values: per layer, views of the slots that are seen.
    mask: 0 or -inf, [B, q, L], or as `attention.expand_mask` makes it when `products`.
    """

    first: int
    batch: int
    width: int
    products: bool
    slots: torch.Tensor
    rotation: torch.Tensor
    mask: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    def column(self, index: int) -> Span:
        """The pass over token `index` of each row alone."""
        column = slice(index, index + 1)
        return replace(
            self,
            width=1,
            slots=self.slots[:, column],
            rotation=self.rotation[:, column],
            mask=self.mask[:, column],
        )

    def selected_mask(self, select: torch.Tensor) -> torch.Tensor:
        """The mask of one token per row; select: [B] int64."""
        if self.products:
            select = select.repeat_interleave(len(self.mask) // self.batch)
        return self.mask[torch.arange(len(self.mask), device=select.device), select].unsqueeze(1)


@dataclass(slots=True)
class Layer:
    """Weights of one decoder layer, ready to multiply."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Model:
    """Target and (optionally) MTP draft over one KV cache.

    The cache is [layers (+ 1 for the draft), 2, rows, kv_heads, slots, head_dim], keys before values.
    The draft's live in the last layer.
    """

    def __init__(
        self,
        arch: Architecture,
        weights: Mapping[str, torch.Tensor],
        *,
        mtp: bool,
        rows: int,
        slots: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.arch, self.mtp, self.device, self.dtype = arch, mtp, device, dtype
        self.rows, self.slots = rows, slots
        layers, kv_heads, head_dim = arch.layers + mtp, arch.kv_heads, arch.head_dim
        self.cache = torch.zeros(layers, 2, rows, kv_heads, slots, head_dim, device=device, dtype=dtype)
        self._flat = self.cache.view(layers, -1, head_dim).unbind(0)
        heads = torch.arange(2 * kv_heads, device=device)
        self._head_offsets = (heads // kv_heads * rows * kv_heads + heads % kv_heads) * slots
        self._row_offsets = torch.arange(rows, device=device).unsqueeze(1) * (kv_heads * slots)
        frequencies = arch.rope_theta ** (
            -torch.arange(0, arch.head_dim, 2, dtype=torch.float64) / arch.head_dim
        )
        angles = torch.arange(slots, dtype=torch.float64)[:, None] * frequencies
        self._rotations = torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(device)
        self._slot_ids = torch.arange(slots, device=device)
        self._eps = torch.tensor(arch.norm_eps)
        half = arch.head_dim // 2
        self._interleave = torch.stack((torch.arange(half), torch.arange(half) + half), 1).flatten()
        self.load(weights)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights; the cache stays. Names and shapes must have been checked."""
        get = self._getter(weights)
        self.embedding = get("model.embed_tokens.weight")
        self.head = Linear(get("lm_head.weight") if "lm_head.weight" in weights else self.embedding)
        self.final_norm = get("model.norm.weight")
        self.layers = [self._layer(get, weights, f"model.layers.{i}.") for i in range(self.arch.layers)]
        if self.mtp:
            self.mtp_layer = self._layer(get, weights, MTP_PREFIX)
            self.mtp_input = Linear(get(f"{MTP_PREFIX}input_proj.weight"))
            self.mtp_token_norm = get(f"{MTP_PREFIX}token_layernorm.weight")
            self.mtp_hidden_norm = get(f"{MTP_PREFIX}hidden_layernorm.weight")
            self.mtp_final_norm = get(f"{MTP_PREFIX}final_layernorm.weight")

    def span(self, first: int, positions: torch.Tensor, context: int) -> Span:
        """What the layers of a pass share.

        first: first cache row. positions: [B, q] int64, slot and RoPE position of each token.
        context: slots seen, more than any position that matters.
        """
        batch, width = positions.shape
        arch, products = self.arch, use_products(width, self.device)
        unseen = self._slot_ids[:context] > positions.unsqueeze(-1)
        mask = torch.zeros(unseen.shape, device=self.device, dtype=self.dtype)
        mask.masked_fill_(unseen, float("-inf"))
        seen = self.cache[:, :, first : first + batch, :, :context]
        if products:
            mask = expand_mask(mask, arch.kv_heads, arch.heads // arch.kv_heads)
            seen = seen.flatten(2, 3)
        slots = positions + self._row_offsets[first : first + batch]
        return Span(
            first=first,
            batch=batch,
            width=width,
            products=products,
            slots=slots.unsqueeze(-1) + self._head_offsets,
            rotation=self._rotations[positions],
            mask=mask,
            keys=seen[:, 0].unbind(0),
            values=seen[:, 1].unbind(0),
        )

    def forward(self, tokens: torch.Tensor, span: Span) -> torch.Tensor:
        """Backbone: [B, q] int64 -> final-norm hidden states [B*q, H]; writes keys and values."""
        x = self.embedding.index_select(0, tokens.reshape(-1))
        for index, layer in enumerate(self.layers):
            x = self._run(layer, index, x, span)
        return self._norm(x, self.final_norm)

    def draft(
        self, tokens: torch.Tensor, hidden: torch.Tensor, span: Span, select: torch.Tensor | None = None
    ) -> torch.Tensor:
        """MTP layer: the token after each position and the hidden state at it -> next hidden state.

        tokens: [B, q] int64. hidden: [B*q, H]. select: [B] int64, the one token of each row to carry
        on from (all keys are written all the same). Returns [B*q, H], or [B, H] with select.
        """
        embedded = self._norm(self.embedding.index_select(0, tokens.reshape(-1)), self.mtp_token_norm)
        x = self.mtp_input(torch.cat((self._norm(hidden, self.mtp_hidden_norm), embedded), -1))
        return self._norm(self._run(self.mtp_layer, self.arch.layers, x, span, select), self.mtp_final_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [N, V], for target and draft alike."""
        return self.head(hidden)

    def _run(
        self, layer: Layer, index: int, x: torch.Tensor, span: Span, select: torch.Tensor | None = None
    ) -> torch.Tensor:
        arch, mask = self.arch, span.mask
        heads, kv_heads, head_dim = arch.heads, arch.kv_heads, arch.head_dim
        qkv = layer.qkv(self._norm(x, layer.input_norm)).view(-1, heads + 2 * kv_heads, head_dim)
        if layer.q_norm is not None:
            qkv[:, :heads] = F.rms_norm(qkv[:, :heads], (head_dim,), layer.q_norm, arch.norm_eps)
            keys = qkv[:, heads : heads + kv_heads]
            keys.copy_(F.rms_norm(keys, (head_dim,), layer.k_norm, arch.norm_eps))
        self._rotate(qkv[:, : heads + kv_heads], span.rotation.view(-1, 1, head_dim // 2))
        written = qkv[:, heads:].reshape(-1, head_dim)
        self._flat[index].index_copy_(0, span.slots.reshape(-1), written)
        if select is not None:
            flat = select + torch.arange(span.batch, device=self.device) * span.width
            x, qkv, mask = x.index_select(0, flat), qkv.index_select(0, flat), span.selected_mask(select)
        query = qkv[:, :heads].unflatten(0, (span.batch, -1))
        run = attend_products if span.products else attend
        x = x + layer.output(run(query, span.keys[index], span.values[index], mask))
        gate, up = layer.gate_up(self._norm(x, layer.post_norm)).chunk(2, -1)
        return x.add_(layer.down(F.silu(gate).mul_(up)))

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm; F.rms_norm runs about nine kernels on a CPU, this five."""
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return F.rms_norm(x, (self.arch.hidden,), weight, self.arch.norm_eps)
        squares = torch.linalg.vecdot(x, x).unsqueeze(-1)
        return (x * torch.add(self._eps, squares, alpha=1 / self.arch.hidden).rsqrt_()).mul_(weight)

    @staticmethod
    def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> None:
        """RoPE in place: x [N, heads, D] with interleaved pairs, rotation [N, 1, D/2] complex64."""
        if x.dtype == torch.float32:
            torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(rotation)
        else:
            pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
            x.copy_(torch.view_as_real(pairs * rotation).flatten(-2))

    def _getter(self, weights: Mapping[str, torch.Tensor]):
        return lambda name: (
            weights[name].detach().to(device=self.device, dtype=self.dtype, copy=True).contiguous()
        )

    def _layer(self, get, weights: Mapping[str, torch.Tensor], prefix: str) -> Layer:
        arch = self.arch

        def interleaved(tensor: torch.Tensor) -> torch.Tensor:
            heads = tensor.view(-1, arch.head_dim, *tensor.shape[1:])
            return heads[:, self._interleave.to(tensor.device)].reshape(tensor.shape)

        def fused(names: tuple[str, ...], rotated: int = 0) -> Linear:
            parts = [f"{prefix}{name}" for name in names]
            stacked = []
            for kind in ("weight", "bias"):
                if f"{parts[0]}.{kind}" not in weights:
                    stacked.append(None)
                    continue
                tensors = [get(f"{part}.{kind}") for part in parts]
                stacked.append(torch.cat([*map(interleaved, tensors[:rotated]), *tensors[rotated:]]))
            return Linear(stacked[0], stacked[1])

        qk_norms = [
            interleaved(get(f"{prefix}self_attn.{n}.weight")) if arch.qk_norm else None
            for n in ("q_norm", "k_norm")
        ]
        return Layer(
            get(f"{prefix}input_layernorm.weight"),
            fused(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), rotated=2),
            *qk_norms,
            fused(("self_attn.o_proj",)),
            get(f"{prefix}post_attention_layernorm.weight"),
            fused(("mlp.gate_proj", "mlp.up_proj")),
            fused(("mlp.down_proj",)),
        )
