"""The forward pass of target and draft over a row-wise KV cache, in plain torch operations.

Owns fused weights, RoPE and the order of operations, independent of requests and sampling. A pass joins
spans: a span is B consecutive cache rows with q new tokens each. Matrix products run over the tokens of all
spans at once and only attention runs span by span, so prompts and decoding rows share a pass.

    x [N, H] -> per layer: norm, fused qkv, RoPE, cache write, attention per span, output, SwiGLU

With latent attention (`latent`) only one key per token is cached; all heads compute scores and values from
it.

Logits equal those of transformers (tests compare them). Two things are arranged differently: q, k, v and
gate, up are fused, and the channels of q and k are stored interleaved so that RoPE is one complex product.
Scores do not change, because q and k are permuted in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from rlpipe.models import Architecture
from rlpipe.rollout.embedded import cpu_kernels
from rlpipe.rollout.embedded.attention import (
    attend,
    attend_products,
    expand_mask,
    pieces_of,
    use_products,
)
from rlpipe.rollout.embedded.graphs import Graphs
from rlpipe.rollout.embedded.huge_pages import HugePages
from rlpipe.rollout.embedded.layer import Layer, make_layer
from rlpipe.rollout.embedded.linear import Linear
from rlpipe.rollout.embedded.mtp import MtpLayer
from rlpipe.rollout.embedded.span import Span, Tables, flat_index, join


class DraftModel(Protocol):
    """A draft model with a separate checkpoint that uses the cache of a model, such as `eagle3.Eagle3Draft`.

    layers: indices of the target layers whose outputs it reads. prefix: prefix of its weights' names in an
    update of the target. shapes: shapes of its weights, by these names. ids: see `Model.draft_ids`.
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
        """Compute the next states, [N, H] or [sum B, H]; for the arguments see `Model.draft`."""

    def fuse(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """Fuse the outputs [N, H] of each layer in `layers` into the input of the first step."""

    def logits(self, model: Model, state: torch.Tensor) -> torch.Tensor:
        """Compute logits [N, D] over the tokens `ids` from states [N, H]."""


class Model:
    """A target and optionally a draft (the MTP layers or a separate model) over one KV cache.

    The cache is [layers of target and draft, 2, rows, kv_heads, slots, head_dim], keys before values. With
    latent attention there is one head, its keys are also the values, and the second dimension is 1. The
    draft's layers are the last ones. mtp: number of MTP layers (one per depth if several), 0 without them.
    depths: number of draft layers, of any kind of draft. draft_vocab: tokens that the MTP layers draft,
    ascending; None for all. graphs: run passes over decoding rows with `Graphs`, which adds a row.
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

        # cuDNN's attention fails with keys that are views of a growing cache (misaligned address).
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.depths, sides = 1 if draft is not None else int(mtp), 1 if arch.latent else 2
        layers, kv_heads, head_dim = arch.layers + self.depths, arch.cached_heads, arch.cached_dim

        # MoE passes cannot be captured, because they need each expert's number of tokens on the host.
        graphs = graphs and arch.experts is None
        kept = rows + graphs
        shape = (layers, sides, kept, kv_heads, slots, head_dim)
        if device.type == "cpu":
            self.cache = HugePages().zeros(*shape, dtype=dtype)
        else:
            self.cache = torch.zeros(shape, device=device, dtype=dtype)
        self.target_cache = self.cache[: arch.layers]

        # Kernels for everything but the products, which choose theirs; None for torch's.
        self._kernels = cpu_kernels.usable(device, dtype) if cpu_kernels.fits(arch) else None

        # Where each key and value head of a row begins in the flat cache of a layer.
        self._flat = self.cache.view(layers, -1, head_dim)
        heads = torch.arange(sides * kv_heads, device=device)
        self._head_offsets = (heads // kv_heads * kept * kv_heads + heads % kv_heads) * slots
        self._row_offsets = torch.arange(kept, device=device).unsqueeze(1) * (kv_heads * slots)

        self._graphs = Graphs(self.cache, self._row_offsets[-1] + self._head_offsets, usable=graphs)

        # In float32, like trainer and servers: exact angles would differ by 2e-3 after 32k tokens.
        angles = torch.arange(slots)[:, None] * torch.tensor(arch.rope.frequencies(arch.rotary_dim))
        self.rotations = torch.polar(torch.full_like(angles, arch.rope.magnitude), angles).to(device)
        self.slot_ids = torch.arange(slots, device=device)
        self._eps = torch.tensor(arch.norm_eps)
        self._scale = arch.softmax_scale if arch.latent else arch.head_dim**-0.5  # its rotations are scaled

        self.load(weights)
        if draft is not None:
            draft.attach(self)

    @property
    def drafts(self) -> bool:
        """Whether the model has a draft with keys in the cache."""
        return self.depths > 0

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace all weights but keep the cache; a separate draft may be omitted and then does not change.

        The caller has checked names and shapes.
        """
        self._graphs.clear()
        get = self.getter(weights)
        self.embedding = get("model.embed_tokens.weight")

        # A tied head is the embedding, even if the checkpoint also stores it separately.
        head = self.embedding if self.arch.tied else get("lm_head.weight")
        self.head = Linear(head)
        if self.arch.tied and self.head.weight is not None:
            self.embedding = self.head.weight  # one copy for both
        if self.draft_model is None:
            ids = self._mtp_ids
            self._draft_head = self.head if ids is None else Linear(head.index_select(0, ids))
        del head  # a prepacked head needs no second copy

        self.final_norm = get("model.norm.weight")

        # Release the old layers before the new ones are made, so that only one set is in memory.
        self.layers, self.mtp_layers = list[Layer](), list[MtpLayer]()
        for index in range(self.arch.layers):
            self.layers.append(self.layer(get, weights, f"model.layers.{index}."))
        whole = [layer.whole for layer in self.layers if layer.whole is not None]
        self._whole = (
            (cpu_kernels.WholeLayer * len(whole))(*whole) if len(whole) == len(self.layers) else None
        )
        if self.draft_model is None:
            self.mtp_layers = [MtpLayer.read(self, weights, index) for index in range(self.depths)]

        # A separate draft is replaced only if the update has its weights.
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

        first: first cache row. positions: [B, q] int64, RoPE position of each token. context: number of slots
        to read, which must include those attended to: one number, or one per row [B]. slots: [B, q], slot of
        each token's key. unseen: [B, q, max(context)] bool, the slots that a token must not attend to.
        Without slots and unseen, a token's slot is its position, and it sees no later slot. decoding: see
        `Span`.
        """
        batch, width = positions.shape
        few = use_products(width, self.device)
        products = few and self._kernels is None
        own = self._kernels is not None and (few or batch * width <= cpu_kernels.MANY_ROWS)

        contexts, context = np.broadcast_to(context, batch), int(np.max(context))
        seen = self.cache[:, :, first : first + batch, :, :context]
        return Span(
            batch=batch,
            width=width,
            first=first,
            positions=positions,
            places=positions if slots is None else slots,
            unseen=unseen,
            pieces=pieces_of(contexts) if products else (),
            seen=seen.flatten(2, 3) if products else seen,
            make=self._tables,
            contexts=torch.from_numpy(np.array(contexts, np.int64)) if own else None,
            decoding=decoding,
        )

    def _tables(self, span: Span) -> Tables:
        """Compute slots, rotations and mask of a span."""
        context, unseen = span.seen.shape[-2], span.unseen
        if unseen is None:
            unseen = self.slot_ids[:context] > span.positions.unsqueeze(-1)

        dtype = self.dtype if span.contexts is None else torch.float32
        mask = torch.zeros(unseen.shape, device=self.device, dtype=dtype).masked_fill_(unseen, float("-inf"))
        if span.pieces:
            mask = expand_mask(mask, self.arch.cached_heads, self.arch.heads // self.arch.cached_heads)

        places = span.places + self._row_offsets[span.first : span.first + span.batch]
        return Tables(
            slots=places.unsqueeze(-1) + self._head_offsets,
            rotation=self.rotations[span.positions],
            mask=mask,
        )

    def forward(self, tokens: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """Run the backbone and write keys: tokens [N] int64, span after span -> final-norm states [N, H]."""
        return self._backbone(tokens, spans, ())[0]

    def forward_to_draft(
        self, tokens: torch.Tensor, spans: Sequence[Span]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run `forward`; also return the input of `draft` [N, H]: the same states, or features."""
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
        """Run `forward`; also return the concatenated outputs of some layers [N, len(layers) * H]."""
        hidden, outputs = self._backbone(tokens, spans, layers)
        return hidden, torch.cat(outputs, -1)

    def _backbone(
        self, tokens: torch.Tensor, spans: Sequence[Span], kept: Sequence[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return final-norm hidden states, and the outputs of the layers `kept`, in that order."""
        x, outputs = self.embedding.index_select(0, tokens), {}
        if self._whole is not None and not kept and (kernels := self.whole_kernels(x, spans)) is not None:
            x = kernels.run_layers(self._whole, x, span=spans[0], rotations=self.rotations)
            return self.norm(x, self.final_norm), []

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
        """Run a draft layer: the state at each position and the token after it -> next state.

        tokens: [N] int64. hidden: [N, H], from `forward_to_draft` or from the depth before. selects: per span
        [B] int64, the one token of each row to compute a state for (keys are written for all tokens). depth:
        index of the layer, if there are several. Returns [N, H] or, with selects, [sum B, H].
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

    def draft_chain(
        self, start: cpu_kernels.ChainStart, span: Span
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Draft a chain in one call, see `cpu_kernels.Kernels.draft_chain`; None if no kernels can do so."""
        if self.draft_model is not None or self.depths != 1:
            return None
        kernels, whole = self.whole_kernels(start.states, [span]), self.mtp_layers[0].whole
        head = self._draft_head.described()
        if kernels is None or whole is None or head is None or head.outputs % cpu_kernels.LANES:
            return None
        return kernels.draft_chain(
            whole,
            head,
            start,
            embedding=self.embedding,
            ids=self.draft_ids,
            span=span,
            index=self.arch.layers,
            rotations=self.rotations,
        )

    def run_draft_layer(
        self,
        layer: Layer,
        x: torch.Tensor,
        spans: Sequence[Span],
        selects: Sequence[torch.Tensor] | None,
        read: torch.Tensor | None = None,
        depth: int = 0,
    ) -> torch.Tensor:
        """Run a draft's layer over x [N, H]; see `draft`. Its cache comes after the target's layers.

        read: input of attention, of any width, to use instead of the normed x.
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
        """Tokens [D] that the draft can propose, ascending; None for all V tokens of the target."""
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
        heads, kernels = arch.heads, self._kernels
        read = self.norm(x, layer.input_norm) if read is None else read
        qkv = self._project(layer, read, rotation, slots, self._flat[index])
        masks = [span.tables.mask for span in spans]

        # The keys of all tokens are in the cache now; continue only with the selected tokens.
        if selects is not None:
            chosen = flat_index(spans, selects)
            x, qkv = x.index_select(0, chosen), qkv.index_select(0, chosen)
            masks = [span.selected_mask(select) for span, select in zip(spans, selects, strict=True)]

        attended, start = [], 0
        for span, mask in zip(spans, masks, strict=True):
            stop = start + (span.batch if selects is not None else span.tokens)
            query, keys, values = qkv[start:stop, :heads], span.keys[index], span.values[index]
            start = stop
            if kernels is not None and span.contexts is not None:
                limits = {"mask": mask, "contexts": span.contexts, "scale": self._scale}
                attended.append(kernels.attend(query, keys, values, **limits))
                continue

            query = query.unflatten(0, (span.batch, -1))
            if span.pieces:
                attended.append(attend_products(query, keys, values, mask, span.pieces, self._scale))
            else:
                attended.append(attend(query, keys, values, mask, self._scale))

        x = x + layer.output(attended[0] if len(attended) == 1 else torch.cat(attended))
        return x.add_(layer.mlp(self.norm(x, layer.post_norm)))

    def whole_kernels(self, x: torch.Tensor, spans: Sequence[Span]) -> cpu_kernels.Kernels | None:
        """Return the kernels if they can run whole layers over the tokens of a pass, x [N, H].

        With few tokens, Python takes as long as the kernels between two calls.
        """
        plain = len(spans) == 1 and len(x) <= cpu_kernels.MANY_ROWS and spans[0].contexts is not None
        return self._kernels if plain else None

    def _project(
        self,
        layer: Layer,
        read: torch.Tensor,
        rotation: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        """Compute queries, then what is cached, and write that to a layer's flat cache.

        read: [N, H]. Returns [N, heads + 2 * kv_heads, head_dim], or [N, heads + 1, d] with latent attention.
        """
        arch, heads, turned = self.arch, self.arch.heads, self.arch.heads + self.arch.kv_heads
        if arch.latent:
            qkv = layer.qkv(read, lambda part: self._rotate(part, rotation))
            cache.index_copy_(0, slots, qkv[:, heads:].reshape(-1, arch.cached_dim))
            return qkv

        qkv = layer.qkv(read).view(len(read), -1, arch.head_dim)

        if layer.q_norm is not None:
            shape, keys = (arch.head_dim,), qkv[:, heads:turned]
            qkv[:, :heads] = F.rms_norm(qkv[:, :heads], shape, layer.q_norm, arch.norm_eps)
            keys.copy_(F.rms_norm(keys, shape, layer.k_norm, arch.norm_eps))

        if self._kernels is not None:
            self._kernels.rotate_and_store(qkv, rotation, slots, cache, heads=heads, turned=turned)
            return qkv
        self._rotate(qkv[:, :turned, : arch.rotary_dim], rotation)
        cache.index_copy_(0, slots, qkv[:, heads:].reshape(-1, arch.head_dim))
        return qkv

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Apply RMSNorm to x [N, H]; on a CPU with one or five kernels instead of F.rms_norm's nine or so."""
        if self._kernels is not None:
            return self._kernels.rms_norm(x, weight, self.arch.norm_eps)
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
        """Return a function that copies a weight, by name, to the device in the model's dtype."""
        return lambda name: (
            weights[name].detach().to(device=self.device, dtype=self.dtype, copy=True).contiguous()
        )

    def layer(
        self, get, weights: Mapping[str, torch.Tensor], prefix: str, *, qk_norm: bool | None = None
    ) -> Layer:
        """Make a layer for `_run`; get: from `getter`. qk_norm: None for the target's setting."""
        return make_layer(self.arch, get, weights, prefix, qk_norm=qk_norm)
