"""The EAGLE-3 draft in torch: the module that is trained, its unrolling over steps, and its checkpoint.

Owns the equations and the files; owns no loss, no target and no generation (the engine implements the same
equations in `rlpipe.rollout.embedded.eagle3`). With features f_t (outputs of some layers of the target at t,
concatenated), e_s the target's embedding of token s, and step k (1-based) of the drafts from anchor t:

    g_1[t] = fc(f_t),  g_k[t] = h_{k-1}[t]                  input of a step: the target, then its own state
    h_k[t] = layer(g_k[t], e_{t+k}),  RoPE position t + k - 1
    logits = lm_head(norm(h_k[t]))                          predict token t + k + 1

    layer(g, e):  y = g + attention([token norm(e), hidden norm(g)]);  h = y + mlp(norm(y))

Training-time test (EAGLE-3 §3.2): deeper steps are trained on the draft's own states. They attend as in
drafting: to step 1 of the anchors up to t, and to steps 2 .. k of anchor t. No loss compares h with features
of the target. A draft that is trained with only one step does not use the test.

Deviation: a token outside a reduced vocabulary has probability exp(-60) in training (`drafts.vocabulary`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlpipe.config.draft_vocab import choose_draft_vocab
from rlpipe.config.eagle3 import PREFIX, Eagle3Shape, read_shape
from rlpipe.config.run import Config
from rlpipe.drafts.vocabulary import spread
from rlpipe.models.rope import Rope
from rlpipe.types import Trajectory


class Eagle3(nn.Module):
    """A draft. Its state dict has the same names as its checkpoint.

    shape: dimensions. ids: [draft_vocab] int64, the target ids of its vocabulary, ascending; None if it has
    all tokens.
    """

    prefix = PREFIX

    def __init__(self, shape: Eagle3Shape, ids: Tensor | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.layers) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        if shape.reduced:
            ids = torch.arange(shape.draft_vocab) if ids is None else ids
            known = torch.zeros(shape.vocab, dtype=torch.bool)
            known[ids] = True
            self.d2t = nn.Buffer(ids - torch.arange(shape.draft_vocab))
            self.t2d = nn.Buffer(known)

    @property
    def ids(self) -> Tensor | None:
        """Target ids of the draft's vocabulary, [draft_vocab]; None if it has all tokens."""
        return draft_ids(self.d2t) if self.shape.reduced else None

    def initialize(self, target: Mapping[str, Tensor], seed: int) -> None:
        """Copy norm and head from `target` (weights by HF name); initialize the other weights with noise."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    noise = torch.randn(module.weight.shape, generator=generator)
                    module.weight.copy_(noise * module.in_features**-0.5)

            self.norm.weight.copy_(target["model.norm.weight"])
            head = target["lm_head.weight"]
            self.lm_head.weight.copy_(head if self.ids is None else head[self.ids.to(head.device)])

    def unroll(
        self, features: Tensor, embeddings: Tensor, past: list[tuple[Tensor, Tensor]] | None = None
    ) -> list[Tensor]:
        """Compute states h_1 .. h_K [B, T, H] of all anchors, teacher-forced.

        features: [B, T, layers * H] at anchors 0 .. T - 1, padded on the right. embeddings: [K, B, T, H], of
        tokens t + 1 .. t + K. Anchors whose tokens include padding must be masked out. past: an empty list;
        the keys and values of each step are appended to it.

        Steps 2 .. K read the draft's own states and the tokens of the text, as in EAGLE-3's published code.
        The notes (eagle_mtp_notes) use the tokens that the draft itself predicts; `draft.objective=own_kl`
        does that.
        """
        state, states = self.fc(features), []
        past = [] if past is None else past
        positions = torch.arange(features.shape[1], device=features.device)
        for step, embedded in enumerate(embeddings):
            state = self.midlayer(state, embedded, positions + step, past=past)
            states.append(state)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """Compute logits over the full vocabulary: [..., H] -> [..., V]."""
        known, ids = self.lm_head(self.norm(states)), self.ids
        return known if ids is None else spread(known, ids, self.shape.vocab)

    def save(self, path: str | Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write config.json and model.safetensors, in float32, as SGLang and vLLM read them.

        weights: a state dict; None for the draft's current one.
        """
        write_draft(path, self.shape, self.state_dict() if weights is None else weights)

    @classmethod
    def load(cls, path: str | Path, target: Mapping[str, Any], setting: str = "spec.draft_path") -> Eagle3:
        """Load a draft that `save` has written; see `read_draft`."""
        shape, weights = read_draft(path, target, setting)
        draft = cls(shape)
        draft.load_state_dict(weights)
        return draft


class _Layer(nn.Module):
    """One decoder layer whose attention reads token and state, concatenated."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self._shape = shape
        hidden, eps = shape.hidden, shape.norm_eps
        self.self_attn, self.mlp = nn.Module(), nn.Module()
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            projection = nn.Linear(2 * hidden, heads * shape.head_dim, bias=False)
            setattr(self.self_attn, f"{name}_proj", projection)
        self.self_attn.o_proj = nn.Linear(shape.heads * shape.head_dim, hidden, bias=False)
        self.mlp.gate_proj = nn.Linear(hidden, shape.intermediate, bias=False)
        self.mlp.up_proj = nn.Linear(hidden, shape.intermediate, bias=False)
        self.mlp.down_proj = nn.Linear(shape.intermediate, hidden, bias=False)
        self.input_layernorm = nn.RMSNorm(hidden, eps)  # norm of the token's embedding
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)

    def forward(
        self,
        state: Tensor,
        embedded: Tensor,
        positions: Tensor,
        *,
        past: list[tuple[Tensor, Tensor]],
        unseen: Tensor | None = None,
    ) -> Tensor:
        """Compute the next state; append its keys and values to `past`.

        state, embedded: [B, T, H]. positions: int64, broadcast to [B, heads, T]. unseen: see
        `unrolled_attention`.
        """
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(state)), -1)
        attention = self.self_attn
        query, key, value = (
            project(both).unflatten(-1, (-1, self._shape.head_dim)).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = (_rotate(x, positions, self._shape.rope) for x in (query, key))
        group = self._shape.heads // self._shape.kv_heads
        past.append((key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)))

        attended = unrolled_attention(query, past, unseen).transpose(1, 2).flatten(2)
        state = state + attention.o_proj(attended)

        read = self.post_attention_layernorm(state)
        return state + self.mlp.down_proj(F.silu(self.mlp.gate_proj(read)) * self.mlp.up_proj(read))


class Windows:
    """G windows of draft tokens from each given anchor. A window reads its own tokens, as in an engine.

    Windows continue from a finished first step. Step k of a window attends to step 1 of the anchors 0 .. t of
    its row and to its own steps 2 .. k, as in `Eagle3.unroll`. The gradient flows into both.
    """

    def __init__(self, draft: Eagle3, first: tuple[Tensor, Tensor], *, rows: Tensor, anchors: Tensor) -> None:
        """Start after step 1.

        first: keys and values [B, heads, T, d] of step 1 (`past` of `unroll`). rows, anchors: [W].
        """
        self._layer, self._anchors = draft.midlayer, anchors[:, None, None]
        self._past = [(first[0].index_select(0, rows), first[1].index_select(0, rows))]
        self._unseen = torch.arange(first[0].shape[2], device=anchors.device) > self._anchors[..., None]

    def step(self, state: Tensor, embedded: Tensor) -> Tensor:
        """Compute the states [W, G, H] of the next step; the first call is step 2.

        state: states of the step before. embedded: embeddings of the tokens drafted from them; both
        [W, G, H].
        """
        positions = self._anchors + len(self._past)
        return self._layer(state, embedded, positions, past=self._past, unseen=self._unseen)


def unrolled_attention(
    query: Tensor, past: list[tuple[Tensor, Tensor]], unseen: Tensor | None = None
) -> Tensor:
    """Attend as a step of an anchor does while drafting.

    query: [B, heads, T, d], for the last step in past. past: keys and values [B, heads, T, d] of steps 1 ..
    k. Anchor t sees step 1 of anchors 0 .. t, and steps 2 .. k of anchor t. Returns [B, heads, T, d]. The
    scores of step 1, [B, heads, T, T], are stored in full.
    unseen: bool, broadcasts to [B, heads, T, S]: which of the S keys of step 1 an anchor must not see. It is
    needed if these S keys are not those of anchors 0 .. T - 1.
    """
    (keys, values), later = past[0], past[1:]
    query = query * query.shape[-1] ** -0.5
    length = keys.shape[2]
    if unseen is None:
        unseen = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)

    # Compute scores of step 1 as one product over all anchors, scores of later steps anchor by anchor.
    scores = [(query @ keys.transpose(2, 3)).masked_fill(unseen, float("-inf"))]
    scores += [(query * key).sum(-1, keepdim=True) for key, _ in later]
    weights = torch.cat(scores, -1).float().softmax(-1).to(query.dtype)

    attended = weights[..., :length] @ values
    for column, (_, value) in enumerate(later, length):
        attended = attended + weights[..., column : column + 1] * value
    return attended


def _rotate(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """Apply RoPE to [B, heads, T, d] at positions that broadcast to [B, heads, T]; halves as in Llama."""
    frequencies = torch.tensor(rope.frequencies(x.shape[-1]), dtype=torch.float64, device=x.device)
    angles = positions[..., None] * frequencies
    angles = torch.cat((angles, angles), -1)
    cos, sin = ((rope.magnitude * turned).to(x.dtype) for turned in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def draft_ids(d2t: Tensor) -> Tensor:
    """Return the target ids of a reduced vocabulary, from the differences that a checkpoint stores.

    >>> draft_ids(torch.tensor([3, 3, 7])).tolist()
    [3, 4, 9]
    """
    return d2t + torch.arange(len(d2t), device=d2t.device)


def write_draft(path: str | Path, shape: Eagle3Shape, weights: Mapping[str, Tensor]) -> None:
    """Write the directory of a draft; weights: the draft's state dict."""
    from safetensors.torch import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(shape.hf_config(), indent=1) + "\n")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def read_draft(
    path: str | Path, target: Mapping[str, Any], setting: str = "spec.draft_path"
) -> tuple[Eagle3Shape, dict[str, Tensor]]:
    """Read a draft's shape and weights from a directory, to the CPU; target: `config.json` of its target.

    An embedding in the draft's files is ignored, as in SGLang: the target's embedding is used. Raises
    ValueError where `read_shape` does, for missing, unknown or misshapen tensors, and for an impossible
    vocabulary.
    """
    from safetensors.torch import load_file

    shape = read_shape(path, target, setting)
    weights: dict[str, Tensor] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        weights |= load_file(file)
    weights.pop("embed_tokens.weight", None)

    expected = shape.weight_shapes()
    if not shape.reduced:  # some exports store the identity map
        for name in ("d2t", "t2d"):
            weights.pop(name, None)
    wrong = sorted(expected.keys() ^ weights.keys())
    wrong += [name for name in expected.keys() & weights.keys() if weights[name].shape != expected[name]]
    if wrong:
        raise ValueError(
            f"{setting}={str(path)!r}: these tensors are missing, unknown or of another shape than in its "
            f"config.json: {', '.join(wrong[:6])}. Export the draft again."
        )
    if shape.reduced:
        ids = draft_ids(weights["d2t"].long())
        if ids.min() < 0 or ids.max() >= shape.vocab or len(ids.unique()) < len(ids):
            raise ValueError(
                f"{setting}={str(path)!r}: d2t maps the draft's {len(ids)} tokens outside the target's "
                f"{shape.vocab}, or two of them to one. Export the draft again."
            )
    return shape, weights


def new_draft(
    config: Config,
    target: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    *,
    trajectories: Sequence[Trajectory],
) -> Eagle3:
    """Make an untrained draft from `config.eagle3` and the target's `config.json` and weights, by HF name."""
    shape = Eagle3Shape.for_target(target, config.eagle3.layers, config.eagle3.draft_vocab)
    ids = None
    if shape.reduced:
        counts = token_counts(trajectories, shape.vocab)
        ids = torch.tensor(choose_draft_vocab(counts, shape.draft_vocab))
    draft = Eagle3(shape, ids)
    draft.initialize(weights, config.run.seed)
    return draft


def token_counts(trajectories: Iterable[Trajectory], vocab: int) -> np.ndarray:
    """Count how often each token was sampled, [vocab]."""
    counts = np.zeros(vocab, np.int64)
    for trajectory in trajectories:
        counts += np.bincount(trajectory.token_ids[trajectory.loss_mask], minlength=vocab)
    return counts
