"""EAGLE-3 draft models: settings, shapes, and the `config.json` that SGLang and vLLM read.

Derives shapes from settings and `config.json`, and refuses a draft that does not fit its target. The model is
in `rlpipe.drafts.eagle3_model`. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlpipe.config.limits import at_least
from rlpipe.models.rope import Rope, read_rope

ARCHITECTURE = "LlamaForCausalLMEagle3"
PREFIX = "eagle3."  # prefix of the names of a draft's weights if they are sent together with its target's

# Options of other EAGLE-3 exports that change the equations.
REFUSED = ("bias", "attention_bias", "mlp_bias", "fc_norm", "use_aux_norm", "norm_before_fc", "norm_output")
REFUSED += ("norm_before_residual", "tie_word_embeddings")


@dataclass(slots=True, kw_only=True)
class Eagle3Config:
    """The draft model that `adapt.drafter=eagle3` builds and trains."""

    layers: list[int] = field(default_factory=list)
    """Layers of the target (counted from 0) with outputs that are fused; empty: a low, a middle and a high
    layer (see `default_layers`). A single entry means no fusion; the top layer has the highest number,
    the number of layers minus 1."""

    draft_vocab: int = 0
    """Number of tokens that the draft can propose: the most frequent tokens of its training data; 0: all."""

    start: str = ""
    """Directory of a draft to train further, which determines layers and draft_vocab; empty: a new draft."""

    def __post_init__(self) -> None:
        at_least(0, self, "eagle3", "draft_vocab", remedy="0 takes all tokens")
        if self.start and (self.layers or self.draft_vocab):
            raise ValueError(
                f"eagle3.start={self.start!r} settles layers and vocabulary, and eagle3.layers="
                f"{self.layers}, eagle3.draft_vocab={self.draft_vocab} would change them: leave those out."
            )


@dataclass(slots=True, kw_only=True, frozen=True)
class Eagle3Shape:
    """Dimensions of a draft model: one Llama layer of its target's size."""

    layers: tuple[int, ...]
    """Layers of the target; the draft reads their outputs."""

    hidden: int
    """Width of the hidden states."""

    intermediate: int
    """Width of the MLP."""

    heads: int
    """Number of attention heads."""

    kv_heads: int
    """Number of key and value heads."""

    head_dim: int
    """Width of one attention head."""

    vocab: int
    """Vocabulary size of the target."""

    draft_vocab: int
    """Vocabulary size of the draft's head."""

    norm_eps: float
    """Epsilon of the norms."""

    rope: Rope
    """Rotary position embedding."""

    max_position: int
    """Longest context in tokens."""

    @property
    def reduced(self) -> bool:
        """Whether the head covers only a subset of the vocabulary."""
        return self.draft_vocab < self.vocab

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of every tensor of the checkpoint."""
        hidden, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "fc.weight": (hidden, len(self.layers) * hidden),
            "midlayer.self_attn.q_proj.weight": (q, 2 * hidden),
            "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
            "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
            "midlayer.self_attn.o_proj.weight": (hidden, q),
            "midlayer.mlp.gate_proj.weight": (self.intermediate, hidden),
            "midlayer.mlp.up_proj.weight": (self.intermediate, hidden),
            "midlayer.mlp.down_proj.weight": (hidden, self.intermediate),
            "norm.weight": (hidden,),
            "lm_head.weight": (self.draft_vocab, hidden),
        }

        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            shapes[f"midlayer.{name}.weight"] = (hidden,)

        # d2t has offsets from draft ids to target ids; t2d masks the target ids that the draft has.
        if self.reduced:
            shapes |= {"d2t": (self.draft_vocab,), "t2d": (self.vocab,)}

        return shapes

    def hf_config(self) -> dict[str, Any]:
        """Return the contents of `config.json`.

        A layer is identified by its number for SGLang (in eagle_config), and by its number plus 1 for vLLM
        (at the top level).
        """
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope.theta,
            "rope_parameters": self.rope.parameters,
            "max_position_embeddings": self.max_position,
            "vocab_size": self.vocab,
            "draft_vocab_size": self.draft_vocab,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.layers),
            },
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in self.layers],
            "dtype": "float32",
        }

    @classmethod
    def for_target(
        cls, target: Mapping[str, Any], layers: Sequence[int] = (), draft_vocab: int = 0
    ) -> Eagle3Shape:
        """Return the shape of a draft for a target. target: contents of the target's `config.json`.

        Raises ValueError for layers that the target does not have, or a vocabulary larger than the target's.
        """
        depth, vocab = int(target["num_hidden_layers"]), int(target["vocab_size"])
        layers = tuple(layers) or default_layers(depth)
        _check_layers(layers, depth, "eagle3.layers")
        if draft_vocab > vocab:
            raise ValueError(
                f"eagle3.draft_vocab={draft_vocab} exceeds the model's vocabulary of {vocab}: set it to 0."
            )

        heads = int(target["num_attention_heads"])
        return cls(
            layers=layers,
            hidden=int(target["hidden_size"]),
            intermediate=int(target["intermediate_size"]),
            heads=heads,
            kv_heads=int(target.get("num_key_value_heads") or heads),
            head_dim=int(target.get("head_dim") or int(target["hidden_size"]) // heads),
            vocab=vocab,
            draft_vocab=draft_vocab or vocab,
            norm_eps=float(target.get("rms_norm_eps", 1e-6)),
            rope=read_rope(target),
            max_position=int(target["max_position_embeddings"]),
        )


def default_layers(depth: int) -> tuple[int, ...]:
    """Return the layers with outputs that are fused by default. depth: number of layers of the target.

    With twelve or more layers, these are the layers that EAGLE-3 and both servers use. With fewer layers,
    they are the first, the middle and the second to last layer (the highest one that SGLang captures).

    >>> default_layers(32), default_layers(8), default_layers(2)
    ((1, 15, 28), (0, 3, 6), (0,))
    """
    if depth >= 12:
        return (1, depth // 2 - 1, depth - 4)
    return tuple(sorted({0, (depth - 1) // 2, max(0, depth - 2)}))


def read_shape(path: str | Path, target: Mapping[str, Any], setting: str = "spec.draft_path") -> Eagle3Shape:
    """Read the shape of the draft in a directory. target: `config.json` of the draft's target model.

    Raises ValueError for a path without a draft, a draft for a model of another size, or a draft with
    equations that are not implemented.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"{setting}={str(path)!r} holds no EAGLE-3 draft: {file} does not exist. Name the directory "
            "of one, as `+recipe=mtp_adapt adapt.drafter=eagle3` leaves it in RUN/draft."
        )

    config = json.loads(file.read_text())
    named = f"{setting}={str(path)!r}"
    if ARCHITECTURE not in config.get("architectures", []):
        raise ValueError(
            f"{named} has architectures={config.get('architectures')}, not {ARCHITECTURE}: it is not an "
            "EAGLE-3 draft. Name the directory of one."
        )

    # Refuse options that change the equations.
    other = {name: config[name] for name in REFUSED if config.get(name)}
    if int(config.get("num_hidden_layers", 1)) != 1:
        other["num_hidden_layers"] = config["num_hidden_layers"]
    if other:
        raise ValueError(f"{named} sets {other}, which is not computed here. Use a draft without it.")

    eagle = config.get("eagle_config") or {}
    layers = eagle.get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        # SGLang's default is the inputs of layers 2, n / 2 and n - 3, the outputs of the layers before these.
        depth = int(target["num_hidden_layers"])
        layers = (1, depth // 2 - 1, depth - 4)
    _check_layers(layers, int(target["num_hidden_layers"]), f"{named}: eagle_aux_hidden_state_layer_ids")

    # Everything that the draft shares with its target must have the same size.
    stored = Eagle3Shape.for_target(config | {"num_hidden_layers": target["num_hidden_layers"]}, layers)
    wanted = Eagle3Shape.for_target(target, layers)
    names = ("hidden", "heads", "kv_heads", "head_dim", "vocab", "norm_eps", "rope")
    unlike = [
        f"{name}={getattr(stored, name)}, the target {getattr(wanted, name)}"
        for name in names
        if getattr(stored, name) != getattr(wanted, name)
    ]
    if unlike:
        raise ValueError(
            f"{named} drafts for another model: it has {'; '.join(unlike)}. Use a draft trained for this one."
        )

    draft_vocab = int(config.get("draft_vocab_size") or stored.vocab)
    if not 1 <= draft_vocab <= stored.vocab:
        raise ValueError(f"{named} has draft_vocab_size={draft_vocab} of a vocabulary of {stored.vocab}.")

    return replace(stored, draft_vocab=draft_vocab)


def _check_layers(layers: Sequence[int], depth: int, setting: str) -> None:
    """Refuse layers that the target does not have, or that occur twice. Raises ValueError."""
    if not layers or min(layers) < 0 or max(layers) >= depth or len(set(layers)) < len(layers):
        raise ValueError(
            f"{setting}={list(layers)} must name layers of the target, each once, between 0 and {depth - 1}."
        )
