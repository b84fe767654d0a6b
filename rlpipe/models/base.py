"""The base of all families: a decoder's dimensions, checks of its config.json, and a table of its weights.

Owns names and shapes; computes nothing with tensors. For each weight, the table has a row with its layout and
its names in Hugging Face files, in Megatron and on an SGLang server. The trainer's bridge
(`trainer/hf_bridge.py`) and the canary use the table to convert tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from rlpipe.models.checkpoint import mtp_prefix
from rlpipe.models.rope import Rope, read_rope

if TYPE_CHECKING:
    from rlpipe.models.delta_net import DeltaNet
    from rlpipe.models.latent import LatentAttention


class Layout(Enum):
    """How a weight is composed of Hugging Face tensors, and how it is cut over ranks."""

    WHOLE = auto()  # one tensor, in full on every rank
    QKV = auto()  # query, key and value: ordered by query group in Megatron, concatenated on a server
    GATE_UP = auto()  # gate and up: each rank holds a slice of both
    COLUMNS = auto()  # one tensor, cut along its input
    VOCABULARY = auto()  # one tensor, cut along its rows, which are padded
    SWAPPED = auto()  # Megatron reads cat(embedding, hidden), MiMo cat(hidden, embedding); uncut on a server
    ROWS = auto()  # one tensor, cut along its output; uncut on a server
    HEADS = auto()  # one tensor, cut along its output by heads, on a server too
    DELTA = auto()  # weight of a delta net: ordered by key head in Megatron, concatenated on a server


@dataclass(slots=True, frozen=True)
class Part:
    """One weight of a model or of a layer, with its layout and all its names.

    megatron: its names in the local and in the TransformerEngine layers. hf: names of the Hugging Face
    tensors that form it. served: its name on an SGLang server; empty if it equals the Hugging Face name.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    layout: Layout = Layout.WHOLE
    served: str = ""

    @property
    def served_name(self) -> str:
        """Name of the weight on an SGLang server."""
        return self.served or self.hf[0]


def _qkv(kind: str) -> Part:
    names = tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv")
    return Part((f"self_attention.linear_qkv.{kind}",), names, Layout.QKV, f"self_attn.qkv_proj.{kind}")


EMBEDDING = Part(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), Layout.VOCABULARY)
HEAD = Part(("output_layer.weight",), ("lm_head.weight",), Layout.VOCABULARY)
FINAL_NORM = Part(("decoder.final_layernorm.weight",), ("model.norm.weight",))
DENSE_LAYER = (
    Part(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("input_layernorm.weight",),
    ),
    Part(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("post_attention_layernorm.weight",),
    ),
    _qkv("weight"),
    _qkv("bias"),
    Part(("self_attention.q_layernorm.weight",), ("self_attn.q_norm.weight",)),
    Part(("self_attention.k_layernorm.weight",), ("self_attn.k_norm.weight",)),
    Part(("self_attention.linear_proj.weight",), ("self_attn.o_proj.weight",), Layout.COLUMNS),
    Part(
        ("mlp.linear_fc1.weight",),
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        Layout.GATE_UP,
        "mlp.gate_up_proj.weight",
    ),
    Part(("mlp.linear_fc2.weight",), ("mlp.down_proj.weight",), Layout.COLUMNS),
)
ROUTER = Part(("mlp.router.weight",), ("mlp.gate.weight",))
ROUTER_BIAS = Part(("mlp.router.expert_bias",), ("mlp.gate.e_score_correction_bias",))
MIMO_DRAFT = (  # tensors of an MTP layer outside its decoder layer, in this order
    Part(("enorm.weight",), ("token_layernorm.weight",)),
    Part(("hnorm.weight",), ("hidden_layernorm.weight",)),
    Part(("eh_proj.weight",), ("input_proj.weight",), Layout.SWAPPED),
    Part(("final_layernorm.weight",), ("final_layernorm.weight",)),
)


def refuse(problems: Mapping[str, Any], hint: str) -> None:
    """Refuse a config.json with one of these problems (problem -> whether the config has it).

    Raises:
        ValueError: names the first problem that is present, and `hint`, the models that can be used.
    """
    for problem, present in problems.items():
        if present:
            raise ValueError(f"The model's config.json asks for {problem}, which is not supported: {hint}")


def whole_number(name: str, value: object) -> int:
    """Return `value` if it is valid for a size in config.json. name: name of the size.

    Raises:
        ValueError: `value` is not a whole number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"The model's config.json has {name}={value!r}: it must be a whole number above 0. Copy "
            "config.json again from the checkpoint that the model comes from."
        )
    return value


@dataclass(slots=True, kw_only=True, frozen=True)
class Experts:
    """An MoE instead of each layer's MLP. The routing weights of a token are a softmax of its scores.

    count: number of experts. Each is a gated MLP of `intermediate` channels.
    per_token: number of experts that read a token: those with the highest scores.
    normed: whether the routing weights of these chosen experts sum to 1; else those of all experts do.
    sigmoid: routing weights are sigmoids of the scores instead; a bias is added only to choose experts.
    scaling: factor of the routing weights.
    shared: channels of a shared MLP that reads every token; 0 without one.
    gated: whether the shared MLP's output is multiplied by the sigmoid of a separate score.
    dense: number of layers at the start that have an MLP instead of an MoE.
    groups: number of groups of equally many experts. A group's score is the sum of its two best scores, and a
        token's experts come from the `groups_per_token` groups with the highest scores.
    """

    count: int
    per_token: int
    intermediate: int
    normed: bool
    sigmoid: bool = False
    scaling: float = 1.0
    shared: int = 0
    gated: bool = False
    dense: int = 0
    groups: int = 1
    groups_per_token: int = 1

    @property
    def shared_name(self) -> str:
        """Name of the shared MLP in files."""
        return "mlp.shared_expert" if self.gated else "mlp.shared_experts"

    def parts(self) -> Iterator[Part]:
        """Yield the weights of an MoE layer: router, shared MLP, each expert's part of the fused weights."""
        yield ROUTER
        if self.sigmoid:
            yield ROUTER_BIAS

        if self.shared:
            megatron, hf = "mlp.shared_experts.", f"{self.shared_name}."
            if self.gated:
                yield Part((f"{megatron}gate_weight",), (f"{self.shared_name}_gate.weight",))
            gate_up = (f"{hf}gate_proj.weight", f"{hf}up_proj.weight")
            yield Part((f"{megatron}linear_fc1.weight",), gate_up, Layout.GATE_UP, f"{hf}gate_up_proj.weight")
            yield Part((f"{megatron}linear_fc2.weight",), (f"{hf}down_proj.weight",), Layout.COLUMNS)

        # A server stores the experts of a layer in two tensors, w13 and w2.
        for index in range(self.count):
            megatron, hf = f"mlp.experts.local_experts.{index}.", f"mlp.experts.{index}."
            gate_up = (f"{hf}gate_proj.weight", f"{hf}up_proj.weight")
            yield Part((f"{megatron}linear_fc1.weight",), gate_up, Layout.GATE_UP, "mlp.experts.w13_weight")
            down = (f"{hf}down_proj.weight",)
            yield Part((f"{megatron}linear_fc2.weight",), down, Layout.COLUMNS, "mlp.experts.w2_weight")


@dataclass(slots=True, kw_only=True, frozen=True)
class Architecture:
    """Dimensions of a decoder: pre-norm, RMSNorm, RoPE, grouped-query attention, SwiGLU.

    mtp_layers: number of draft layers, one per depth if there are several; 0 without a draft.
    draft: weights of a draft layer besides its decoder layer.
    rotary_dim: number of elements of a head that are rotated; these are its first elements.
    experts: the MoE that replaces the MLP of `intermediate` channels, except in the first `experts.dense`
        layers; None in a dense model.
    latent: latent attention; None with grouped queries. With it, head_dim is the size of a query or key, and
        each head has separate keys.
    delta: gated delta nets that replace the attention of some layers. The attention of the other layers then
        has an output gate, stored next to each query head in q_proj, and norms multiply by 1 + weight.
    """

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope: Rope
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    mtp_layers: int
    rotary_dim: int
    draft: tuple[Part, ...] = MIMO_DRAFT
    experts: Experts | None = None
    latent: LatentAttention | None = None
    delta: DeltaNet | None = None

    @property
    def softmax_scale(self) -> float:
        """Factor of the products of queries and keys; it includes the factors of the rotary scaling."""
        scaled = self.rope.sharpness if self.latent else self.rope.magnitude
        return scaled**2 / self.head_dim**0.5

    @property
    def cached_heads(self) -> int:
        """Key heads of a token in an engine's cache; with latent attention, all heads share one."""
        return 1 if self.latent else self.kv_heads

    @property
    def cached_dim(self) -> int:
        """Elements of a cached key; with latent attention the value is part of it."""
        return self.latent.kv_rank + self.latent.rotary if self.latent else self.head_dim

    @property
    def inner(self) -> int:
        """Channels of a layer's MLP, or of one expert if there are experts."""
        return self.experts.intermediate if self.experts else self.intermediate

    @property
    def uneven(self) -> bool:
        """Whether layers have different sets of weights."""
        return self.delta is not None or bool(self.experts and self.experts.dense)

    def weight_shapes(self, *, mtp: bool) -> dict[str, tuple[int, ...]]:
        """Return HF name -> shape of every weight. mtp: whether to include the draft's weights."""
        shapes = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocab, self.hidden),
        }

        for index in range(self.layers):
            moe = self.experts is not None and index >= self.experts.dense
            linear = self.delta is not None and self.delta.linear[index]
            shapes.update(self._layer_shapes(f"model.layers.{index}.", moe=moe, linear=linear))

        for prefix in map(mtp_prefix, range(self.mtp_layers if mtp else 0)):
            shapes.update(self._layer_shapes(prefix, moe=self.experts is not None))
            for part in self.draft:
                rows = (self.hidden,) if part.layout is Layout.WHOLE else (self.hidden, 2 * self.hidden)
                shapes[f"{prefix}{part.hf[0]}"] = rows
        return shapes

    def _layer_shapes(
        self, prefix: str, *, moe: bool, linear: bool = False
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of a decoder layer's weights."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        gated = 2 if self.delta else 1
        attention = (
            ("self_attn.q_proj", gated * q, self.hidden, self.qkv_bias),
            ("self_attn.k_proj", kv, self.hidden, self.qkv_bias),
            ("self_attn.v_proj", kv, self.hidden, self.qkv_bias),
            ("self_attn.o_proj", self.hidden, q, self.output_bias),
        )
        if self.latent:
            attention = ()
            for name, shape in self.latent.shapes(self.hidden, self.heads).items():
                yield f"{prefix}self_attn.{name}.weight", shape
        if linear and self.delta is not None:
            attention = ()
            for name, shape in self.delta.shapes(self.hidden):
                yield prefix + name, shape

        linears = (*attention, *self._mlp_shapes(moe=moe))
        for name, rows, columns, bias in linears:
            yield f"{prefix}{name}.weight", (rows, columns)
            if bias:
                yield f"{prefix}{name}.bias", (rows,)

        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", (self.hidden,)
        if self.qk_norm and not linear:
            for name in ("q_norm", "k_norm"):
                yield f"{prefix}self_attn.{name}.weight", (self.head_dim,)
        if moe and self.experts is not None and self.experts.sigmoid:
            yield prefix + ROUTER_BIAS.hf[0], (self.experts.count,)

    def _mlp_shapes(self, *, moe: bool) -> Iterator[tuple[str, int, int, bool]]:
        """Yield (name, rows, columns, has a bias) of the projections of a layer's MLP or experts."""
        mlps = {"mlp": self.intermediate}
        if moe and self.experts is not None:
            mlps = {f"mlp.experts.{i}": self.experts.intermediate for i in range(self.experts.count)}
            mlps |= {self.experts.shared_name: self.experts.shared} if self.experts.shared else {}
            yield "mlp.gate", self.experts.count, self.hidden, False
            if self.experts.gated:
                yield f"{self.experts.shared_name}_gate", 1, self.hidden, False

        for name, inner in mlps.items():
            yield f"{name}.gate_proj", inner, self.hidden, self.mlp_bias
            yield f"{name}.up_proj", inner, self.hidden, self.mlp_bias
            yield f"{name}.down_proj", self.hidden, inner, self.mlp_bias


@dataclass(slots=True, kw_only=True, frozen=True)
class Family:
    """One model family; the defaults are Llama's.

    name: `model_type` of its config.json.
    qkv_bias: whether query, key and value have biases if config.json has no `attention_bias`.
    output_bias: whether `attention_bias` also applies to o_proj.
    qk_norm: whether each query and key head has an RMSNorm if config.json has no `use_qk_norm`.
    layer: table of one decoder layer, without experts and latent attention; `layer_parts` adds them.
    draft: table of the weights that an MTP layer has besides a decoder layer.
    sliding_window: returns whether a config.json requests sliding-window attention.
    experts, latent, delta: read the settings of the MoE, latent attention and gated delta nets from a
        config.json, and raise ValueError for settings that are not supported; None if the family has none.
    rotary: share of a head that is rotated if config.json has no `partial_rotary_factor`; None if the family
        always rotates full heads.
    draft_place: prefix of the names of the weights in `draft` in SGLang's draft model.
    draft_block: name of the decoder layer in that model.
    draft_on_cpu: whether SGLang's draft model starts without CUDA in a server without rlpipe's plugin.
    float32: endings of the names of weights that an SGLang server always stores in float32.
    """

    name: str
    qkv_bias: bool = False
    output_bias: bool = True
    qk_norm: bool = False
    layer: tuple[Part, ...] = DENSE_LAYER
    draft: tuple[Part, ...] = MIMO_DRAFT
    sliding_window: Callable[[Mapping[str, Any]], bool] = lambda config: bool(
        config.get("use_sliding_window")
    )
    experts: Callable[[Mapping[str, Any]], Experts] | None = None
    latent: Callable[[Mapping[str, Any]], LatentAttention] | None = None
    rotary: float | None = None
    delta: Callable[[Mapping[str, Any]], DeltaNet] | None = None
    draft_place: str = "model."
    draft_block: str = "mtp_block"
    draft_on_cpu: bool = True
    float32: tuple[str, ...] = ()

    def layer_parts(self, config: Mapping[str, Any]) -> tuple[Part, ...]:
        """Return the table of one decoder layer of a model."""
        parts = list(self.layer)
        if self.latent is not None:
            parts += self.latent(config).parts()
        if self.experts is not None:
            parts += self.experts(config).parts()
        return tuple(parts)

    def parse(self, config: Mapping[str, Any]) -> Architecture:
        """Read the dimensions of a config.json.

        Raises:
            ValueError: it has a setting that is not supported.
        """
        self._refuse_incomplete(config)
        self._refuse_unsupported(config)
        rope = read_rope(config)
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        attention_bias = bool(config.get("attention_bias", self.qkv_bias))
        head_dim = int(config.get("head_dim") or hidden // heads)
        rotary_dim, latent = int(head_dim * self._rotary_factor(config)), None
        if self.latent:
            latent = self.latent(config)
            head_dim, rotary_dim = latent.plain + latent.rotary, latent.rotary
        return Architecture(
            family=self.name,
            vocab=int(config["vocab_size"]),
            hidden=hidden,
            intermediate=int(config.get("intermediate_size") or config["moe_intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=heads if latent else int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            max_position=rope.reach(int(config.get("max_position_embeddings", 32768))),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=rope,
            qkv_bias=attention_bias,
            output_bias=attention_bias and self.output_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=bool(config.get("use_qk_norm", self.qk_norm)),
            tied=bool(config.get("tie_word_embeddings", False)),
            mtp_layers=int(config.get("num_nextn_predict_layers") or 0),
            draft=self.draft,
            experts=self.experts(config) if self.experts else None,
            latent=latent,
            delta=self.delta(config) if self.delta else None,
        )

    def _rotary_factor(self, config: Mapping[str, Any]) -> float:
        written = config.get("partial_rotary_factor")
        written = written or (config.get("rope_parameters") or {}).get("partial_rotary_factor")
        return float(written or self.rotary or 1.0)

    def _refuse_incomplete(self, config: Mapping[str, Any]) -> None:
        """Refuse a config.json that lacks a required size. Raises ValueError."""
        needed = (
            "num_attention_heads",
            "hidden_size",
            "vocab_size",
            "moe_intermediate_size" if self.experts and self.delta else "intermediate_size",
            "num_hidden_layers",
        )
        optional = ("num_key_value_heads", "head_dim", "max_position_embeddings", "num_nextn_predict_layers")
        for name in (*needed, *(name for name in optional if config.get(name))):
            whole_number(name, config.get(name))

    def _refuse_unsupported(self, config: Mapping[str, Any]) -> None:
        """Refuse settings that are not supported. Raises ValueError."""
        factor = self._rotary_factor(config)
        scaled = bool(read_rope(config).scaling)
        stored = config.get("quantization_config")
        if stored:
            kind = stored.get("quant_method") if isinstance(stored, Mapping) else stored
            raise ValueError(
                f"The model's config.json has a quantization_config ({kind!r}): its weights are quantised, "
                "and training reads plain ones. Convert them to bfloat16 first (DeepSeek's repositories have "
                "inference/fp8_cast_bf16.py for it), and take quantization_config out of config.json."
            )
        refused = {
            f"partial_rotary_factor={factor}": factor != 1.0 and self.rotary is None,
            f"rope scaling of {factor} of a head": scaled and factor != 1.0,
            "sliding-window attention": self.sliding_window(config),
            f"hidden_act={config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        }
        refuse(refused, "use a checkpoint without it.")
