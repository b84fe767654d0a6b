"""The forward pass of target and draft over a row-wise KV cache: plain torch ops, no modules.

Owns fused weights, RoPE and the order of operations, independent of requests and sampling. A pass
joins spans: a span is B consecutive cache rows with q new tokens each. All products run over the
tokens of all spans at once, only attention goes span by span, so prompts share a pass with decoding rows.

    x [N, H] -> per layer: norm, fused qkv, RoPE, cache write, attention per span, output, SwiGLU

With latent attention (`latent`) one key per token is cached, from which all heads compute scores and values.

Equal to transformers' logits (the tests compare), with two rearrangements: q, k, v and gate, up are
fused, and the q, k channels are stored interleaved so that RoPE is one complex product. Scores do
not change, because q and k are permuted alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from rlpipe.models import Architecture
from rlpipe.rollout.embedded.attention import (
    attend,
    attend_products,
    expand_mask,
    pieces_of,
    use_products,
)
from rlpipe.rollout.embedded.graphs import Graphs
from rlpipe.rollout.embedded.layer import Layer, make_layer
from rlpipe.rollout.embedded.linear import Linear
from rlpipe.rollout.embedded.mtp import MtpLayer
from rlpipe.rollout.embedded.span import Span, flat_index, join


class DraftModel(Protocol):
    """A draft model outside the checkpoint, over the cache of a model; `eagle3.Eagle3Draft` is one.

    layers: indices of the target layers that it reads outputs of. prefix: of the names of its weights in an
    update of the target. shapes: of its weights, by those names. ids: as `Model.draft_ids`.
    """

    layers: Sequence[int]
    ids: torch.Tensor | None
    prefix: str
    shapes: Mapping[str, tuple[int, ...]]

    def attach(self, model: Model) -> None:
        """Copy the weights to the model's device and layout."""

    def load(self, model: Model, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights, by the names of the draft's checkpoint."""

    def step(
        self,
        model: Model,
        tokens: torch.Tensor,
        state: torch.Tensor,
        spans: Sequence[Span],
        selects: Sequence[torch.Tensor] | None,
    ) -> torch.Tensor:
        """Compute the next states, [N, H] or [sum B, H]; arguments of `Model.draft`."""

    def fuse(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """Fuse the outputs [N, H] of each layer in `layers` into the input of the first step."""

    def logits(self, model: Model, state: torch.Tensor) -> torch.Tensor:
        """Compute logits [N, D] over the tokens `ids` from states [N, H]."""


class Model:
    """Target and (optionally) one draft, the MTP layers or a separate model, over one KV cache.

    The cache is [layers (+ those of the draft), 2, rows, kv_heads, slots, head_dim], keys before values; with
    latent attention there is one head with its keys as values, and 1 instead of 2.
    The draft's layers are the last ones. mtp: number of MTP layers, one per depth if several; 0 without them.
    depths: the same for any draft. draft_vocab: ascending tokens that the MTP layers draft; None for all.
    graphs: run passes over decoding rows by `Graphs`, which adds a row.
    """

    def __init__(
        self,
        arch: Architecture,
        weights: Mapping[str, torch.Tensor],
        *,
        mtp: int,
        rows: int,
        slots: int,
        device: torch.device,
        dtype: torch.dtype,
        draft: DraftModel | None = None,
        draft_vocab: Sequence[int] | None = None,
        graphs: bool = False,
    ) -> None:
        self.arch, self.draft_model, self.device, self.dtype = arch, draft, device, dtype
        self.rows, self.slots = rows, slots
        self._mtp_ids = None if draft_vocab is None else torch.tensor(draft_vocab, device=device)

        # cuDNN's attention fails on keys that are views of a growing cache (misaligned address).
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.depths, sides = 1 if draft is not None else int(mtp), 1 if arch.latent else 2
        layers, kv_heads, head_dim = arch.layers + self.depths, arch.cached_heads, arch.cached_dim

        # Only the host has the number of tokens that an expert gets, so MoE passes cannot be captured.
        graphs = graphs and arch.experts is None
        kept = rows + graphs
        self.cache = torch.zeros(layers, sides, kept, kv_heads, slots, head_dim, device=device, dtype=dtype)
        self.target_cache = self.cache[: arch.layers]

        # Where each key and value head of a row begins in the flat cache of a layer.
        self._flat = self.cache.view(layers, -1, head_dim).unbind(0)
        heads = torch.arange(sides * kv_heads, device=device)
        self._head_offsets = (heads // kv_heads * kept * kv_heads + heads % kv_heads) * slots
        self._row_offsets = torch.arange(kept, device=device).unsqueeze(1) * (kv_heads * slots)

        self._graphs = Graphs(self.cache, self._row_offsets[-1] + self._head_offsets, usable=graphs)

        # In float32, as trainer and servers: exact angles would differ by 2e-3 after 32k tokens.
        angles = torch.arange(slots)[:, None] * torch.tensor(arch.rope.frequencies(arch.rotary_dim))
        self._rotations = torch.polar(torch.full_like(angles, arch.rope.magnitude), angles).to(device)
        self.slot_ids = torch.arange(slots, device=device)
        self._eps = torch.tensor(arch.norm_eps)
        self._scale = arch.softmax_scale if arch.latent else arch.head_dim**-0.5  # rotations are scaled

        self.load(weights)
        if draft is not None:
            draft.attach(self)

    @property
    def drafts(self) -> bool:
        """True when the model has a draft, which caches separate keys."""
        return self.depths > 0

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights; keep the cache, and a separate draft model without weights among them.

        The caller has checked names and shapes.
        """
        self._graphs.clear()
        get = self.getter(weights)
        self.embedding = get("model.embed_tokens.weight")

        # A tied head is the embedding, whether or not the checkpoint repeats it.
        head = self.embedding if self.arch.tied else get("lm_head.weight")
        self.head = Linear(head)
        if self.draft_model is None:
            ids = self._mtp_ids
            self._draft_head = self.head if ids is None else Linear(head.index_select(0, ids))
        del head  # a packed head needs no second copy

        self.final_norm = get("model.norm.weight")

        # Release the old layers before the new ones are made, so that only one set is in memory.
        self.layers, self.mtp_layers = list[Layer](), list[MtpLayer]()
        for index in range(self.arch.layers):
            self.layers.append(self.layer(get, weights, f"model.layers.{index}."))
        if self.draft_model is None:
            self.mtp_layers = [MtpLayer.read(self, weights, index) for index in range(self.depths)]

        # A separate draft is replaced only if the update has weights of it.
        if self.draft_model is not None:
            prefix = self.draft_model.prefix
            draft = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
            if draft:
                self.draft_model.load(self, draft)

    def span(
        self,
        first: int,
        positions: torch.Tensor,
        context: int | np.ndarray,
        *,
        slots: torch.Tensor | None = None,
        unseen: torch.Tensor | None = None,
        decoding: bool = False,
    ) -> Span:
        """Make the span of rows first, first + 1, ...

        first: first cache row. positions: [B, q] int64, RoPE position of each token. context: number of
        slots read, at least those attended to; of all rows, or of each [B]. slots: [B, q], slot of each
        token's key; unseen: [B, q, max(context)] bool, the slots that a token must not attend to. Without
        them a token's slot is its position, and it sees no later one. decoding: see `Span`.
        """
        batch, width = positions.shape
        arch, products = self.arch, use_products(width, self.device)

        contexts, context = np.broadcast_to(context, batch), int(np.max(context))
        slots = positions if slots is None else slots
        if unseen is None:
            unseen = self.slot_ids[:context] > positions.unsqueeze(-1)

        mask = torch.zeros(unseen.shape, device=self.device, dtype=self.dtype)
        mask.masked_fill_(unseen, float("-inf"))
        seen = self.cache[:, :, first : first + batch, :, :context]
        if products:
            mask = expand_mask(mask, arch.cached_heads, arch.heads // arch.cached_heads)
            seen = seen.flatten(2, 3)

        places = slots + self._row_offsets[first : first + batch]
        return Span(
            batch=batch,
            width=width,
            pieces=pieces_of(contexts) if products else (),
            slots=places.unsqueeze(-1) + self._head_offsets,
            rotation=self._rotations[positions],
            mask=mask,
            keys=seen[:, 0].unbind(0),
            values=seen[:, -1].unbind(0),
            decoding=decoding,
        )

    def forward(self, tokens: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """Run the backbone: tokens [N] int64, span after span -> final-norm states [N, H]; writes keys."""
        return self._backbone(tokens, spans, ())[0]

    def forward_to_draft(
        self, tokens: torch.Tensor, spans: Sequence[Span]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run `forward`; return also the input of `draft` at these tokens [N, H]: the same, or features."""
        return self._graphs.run("target", self._forward_to_draft, tokens, spans)

    def _forward_to_draft(
        self, tokens: torch.Tensor, spans: Sequence[Span]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.draft_model is None:
            hidden = self.forward(tokens, spans)
            return hidden, hidden
        hidden, features = self._backbone(tokens, spans, self.draft_model.layers)
        return hidden, self.draft_model.fuse(features)

    def features(
        self, tokens: torch.Tensor, spans: Sequence[Span], layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run `forward`; return also the outputs of some layers concatenated [N, len(layers) * H]."""
        hidden, outputs = self._backbone(tokens, spans, layers)
        return hidden, torch.cat(outputs, -1)

    def _backbone(
        self, tokens: torch.Tensor, spans: Sequence[Span], kept: Sequence[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return final-norm hidden states, and the outputs of the chosen layers in their order."""
        x, outputs = self.embedding.index_select(0, tokens), {}
        shared = join(spans)
        for index, layer in enumerate(self.layers):
            x = self._run(layer, index, x, spans, shared)
            if index in kept:
                outputs[index] = x  # the next layer makes a new tensor

        return self.norm(x, self.final_norm), [outputs[index] for index in kept]

    def draft(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        spans: Sequence[Span],
        selects: Sequence[torch.Tensor] | None = None,
        depth: int = 0,
    ) -> torch.Tensor:
        """Run a draft layer: the token after each position and the state at it -> next state.

        tokens: [N] int64. hidden: [N, H], from `forward_to_draft` or of the depth before. selects: per span
        [B] int64, the one token of each row to continue from (keys of all tokens are written anyway).
        depth: index of the layer if several. Returns [N, H], or [sum B, H].
        """
        run = partial(self._draft, depth)
        return self._graphs.run(f"draft {depth}", run, tokens, spans, hidden, selects)

    def _draft(
        self,
        depth: int,
        tokens: torch.Tensor,
        spans: Sequence[Span],
        hidden: torch.Tensor,
        selects: Sequence[torch.Tensor] | None,
    ) -> torch.Tensor:
        if self.draft_model is not None:
            return self.draft_model.step(self, tokens, hidden, spans, selects)
        return self.mtp_layers[depth].step(self, depth, tokens, hidden, spans, selects)

    def run_draft_layer(
        self,
        layer: Layer,
        x: torch.Tensor,
        spans: Sequence[Span],
        selects: Sequence[torch.Tensor] | None,
        read: torch.Tensor | None = None,
        depth: int = 0,
    ) -> torch.Tensor:
        """Run a draft's layer over x [N, H]; its keys are stored after the target's layers; see `draft`.

        read: the input of attention instead of the normed x, of any width.
        """
        return self._run(layer, self.arch.layers + depth, x, spans, join(spans), selects, read)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the target's logits [N, V] from states [N, H]."""
        return self.head(hidden)

    def draft_logits(self, state: torch.Tensor) -> torch.Tensor:
        """Compute the draft's logits [N, D] over `draft_ids` from states [N, H] that `draft` returned."""
        return self._draft_head(state) if self.draft_model is None else self.draft_model.logits(self, state)

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """Tokens [D] that the draft can propose, ascending; None for all V of the target."""
        return self._mtp_ids if self.draft_model is None else self.draft_model.ids

    def _run(
        self,
        layer: Layer,
        index: int,
        x: torch.Tensor,
        spans: Sequence[Span],
        shared: tuple[torch.Tensor, torch.Tensor],
        selects: Sequence[torch.Tensor] | None = None,
        read: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one layer over all spans, and return its output."""
        arch, (slots, rotation) = self.arch, shared
        heads = arch.heads
        read = self.norm(x, layer.input_norm) if read is None else read

        if arch.latent:
            qkv = layer.qkv(read, lambda part: self._rotate(part, rotation))
        else:
            qkv = self._grouped(layer, read, rotation)

        self._flat[index].index_copy_(0, slots, qkv[:, heads:].reshape(-1, arch.cached_dim))
        masks = [span.mask for span in spans]

        # Keys of all tokens are in the cache now; only the selected tokens are carried on.
        if selects is not None:
            chosen = flat_index(spans, selects)
            x, qkv = x.index_select(0, chosen), qkv.index_select(0, chosen)
            masks = [span.selected_mask(select) for span, select in zip(spans, selects, strict=True)]

        attended, start = [], 0
        for span, mask in zip(spans, masks, strict=True):
            stop = start + (span.batch if selects is not None else span.tokens)
            query = qkv[start:stop, :heads].unflatten(0, (span.batch, -1))
            keys, values = span.keys[index], span.values[index]
            if span.pieces:
                attended.append(attend_products(query, keys, values, mask, span.pieces, self._scale))
            else:
                attended.append(attend(query, keys, values, mask, self._scale))
            start = stop

        x = x + layer.output(attended[0] if len(attended) == 1 else torch.cat(attended))
        return x.add_(layer.mlp(self.norm(x, layer.post_norm)))

    def _grouped(self, layer: Layer, read: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Compute queries, then keys, then values: [N, H] -> [N, heads + 2 * kv_heads, head_dim]."""
        arch, heads, turned = self.arch, self.arch.heads, self.arch.heads + self.arch.kv_heads
        qkv = layer.qkv(read).view(len(read), -1, arch.head_dim)

        if layer.q_norm is not None:
            shape, keys = (arch.head_dim,), qkv[:, heads:turned]
            qkv[:, :heads] = F.rms_norm(qkv[:, :heads], shape, layer.q_norm, arch.norm_eps)
            keys.copy_(F.rms_norm(keys, shape, layer.k_norm, arch.norm_eps))
        self._rotate(qkv[:, :turned, : arch.rotary_dim], rotation)
        return qkv

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Apply RMSNorm to x [N, H], with five kernels on a CPU where F.rms_norm runs about nine."""
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return F.rms_norm(x, (self.arch.hidden,), weight, self.arch.norm_eps)
        squares = torch.linalg.vecdot(x, x).unsqueeze(-1)
        return (x * torch.add(self._eps, squares, alpha=1 / self.arch.hidden).rsqrt_()).mul_(weight)

    @staticmethod
    def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> None:
        """Apply RoPE in place: x [N, heads, R] with interleaved pairs, rotation [N, 1, R/2] complex64."""
        if x.dtype == torch.float32:
            torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(rotation)
        else:
            pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
            x.copy_(torch.view_as_real(pairs * rotation).flatten(-2))

    def getter(self, weights: Mapping[str, torch.Tensor]):
        """Return a function from a name to a copy of its weight, on the device, in the model's dtype."""
        return lambda name: (
            weights[name].detach().to(device=self.device, dtype=self.dtype, copy=True).contiguous()
        )

    def layer(
        self, get, weights: Mapping[str, torch.Tensor], prefix: str, *, qk_norm: bool | None = None
    ) -> Layer:
        """Make a layer in the form of `_run`; get: from `getter`. qk_norm: None for the target's."""
        return make_layer(self.arch, get, weights, prefix, qk_norm=qk_norm)
