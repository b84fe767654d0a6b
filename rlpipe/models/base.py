"""The base of all families: a decoder's dimensions, its refusals, and one table of its weights.

Owns names and shapes; computes nothing with tensors. The table has, once for each weight, its names in
Hugging Face files, in Megatron and on an SGLang server, and its layout; the trainer's bridge
(`trainer/hf_bridge.py`) and the canary turn that into tensors.
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
    """How a weight is made of its Hugging Face tensors and how it is cut over ranks."""

    WHOLE = auto()  # one tensor that every rank holds
    QKV = auto()  # query, key and value: Megatron by query group, a server one after the other
    GATE_UP = auto()  # gate and up: each rank holds a slice of both
    COLUMNS = auto()  # one tensor, cut along its input
    VOCABULARY = auto()  # one tensor, cut along its rows, which are padded
    SWAPPED = auto()  # Megatron reads cat(embedding, hidden), MiMo cat(hidden, embedding); a server: whole
    ROWS = auto()  # one tensor, cut along its output; a server: whole
    HEADS = auto()  # one tensor, cut along its output by heads, on a server too
    DELTA = auto()  # of a delta net: Megatron by key head, a server one after the other


@dataclass(slots=True, frozen=True)
class Part:
    """One weight of a model or of a layer, under the names of all who hold it.

    megatron: its names in the local and in the TransformerEngine layers. hf: of the tensors that make it.
    served: on an SGLang server; empty where it is the Hugging Face name.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    layout: Layout = Layout.WHOLE
    served: str = ""

    @property
    def served_name(self) -> str:
        """Its name on an SGLang server."""
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
    """Refuse the first problem of a config.json that is present (true).

    Raises:
        ValueError: names the problem; hint: models that can be used.
    """
    for problem, present in problems.items():
        if present:
            raise ValueError(f"The model's config.json asks for {problem}, which is not supported: {hint}")


def whole_number(name: str, value: object) -> int:
    """Return a size of a config.json.

    Raises:
        ValueError: it is not a whole number above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"The model's config.json has {name}={value!r}: it must be a whole number above 0. Copy "
            "config.json again from the checkpoint that the model comes from."
        )
    return value


@dataclass(slots=True, kw_only=True, frozen=True)
class Experts:
    """MoE instead of each layer's MLP; a token's weights are a softmax of its scores.

    count: of experts, each a gated MLP of `intermediate` channels. per_token: how many of them read a token,
    those of the highest scores. normed: whether the weights of those sum to 1, or those of all experts.
    sigmoid: weights are sigmoids of the scores, a bias is added to them only for the choice.
    scaling: what the weights are multiplied by. shared: channels of an MLP that reads every token, 0 without.
    gated: whether that is multiplied by a sigmoid of a score of its own.
    dense: layers at the start that have an MLP instead. groups: of as many experts each, of which a token's
    experts come from those `groups_per_token` whose two best scores have the largest sums.
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
        """Name in files of the MLP that reads every token."""
        return "mlp.shared_expert" if self.gated else "mlp.shared_experts"

    def parts(self) -> Iterator[Part]:
        """Yield the weights of a layer: router, shared MLP, and of each expert its part of a fused weight."""
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

        # A server keeps the experts of a layer in two tensors, w13 and w2.
        for index in range(self.count):
            megatron, hf = f"mlp.experts.local_experts.{index}.", f"mlp.experts.{index}."
            gate_up = (f"{hf}gate_proj.weight", f"{hf}up_proj.weight")
            yield Part((f"{megatron}linear_fc1.weight",), gate_up, Layout.GATE_UP, "mlp.experts.w13_weight")
            down = (f"{hf}down_proj.weight",)
            yield Part((f"{megatron}linear_fc2.weight",), down, Layout.COLUMNS, "mlp.experts.w2_weight")


@dataclass(slots=True, kw_only=True, frozen=True)
class Architecture:
    """Dimensions of a decoder: pre-norm, RMSNorm, RoPE, grouped-query attention, SwiGLU.

    mtp_layers: draft layers, one per depth if several; 0 without a draft. draft: what each has besides a
    decoder layer. rotary_dim: numbers of a head that are rotated, its first ones.
    experts: in each layer but the first `dense` ones, in the place of an MLP of `intermediate` channels;
    None in a dense model. latent: attention by latent vectors, None with grouped queries; with it head_dim is
    that of queries and keys, and each head has its keys. delta: gated delta nets in the place of some layers'
    attention, which then has an output gate, next to each query head in q_proj; norms multiply by 1 + weight.
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
        """Factor of the products of queries and keys, where neither is scaled for its rotation."""
        scaled = self.rope.sharpness if self.latent else self.rope.magnitude
        return scaled**2 / self.head_dim**0.5

    @property
    def cached_heads(self) -> int:
        """Key heads of a token in an engine's cache: with latent attention one, for all heads."""
        return 1 if self.latent else self.kv_heads

    @property
    def cached_dim(self) -> int:
        """Numbers of a cached key; with latent attention it is the value too."""
        return self.latent.kv_rank + self.latent.rotary if self.latent else self.head_dim

    @property
    def inner(self) -> int:
        """Channels of a layer's MLP, or of one of its experts."""
        return self.experts.intermediate if self.experts else self.intermediate

    @property
    def uneven(self) -> bool:
        """Whether layers differ in what weights they have."""
        return self.delta is not None or bool(self.experts and self.experts.dense)

    def weight_shapes(self, *, mtp: bool) -> dict[str, tuple[int, ...]]:
        """Return HF name -> shape of every weight; mtp: the draft's too."""
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

    name: `model_type` of its config.json. qkv_bias: whether query, key and value have biases where
    `attention_bias` is not written. output_bias: whether `attention_bias` means o_proj too.
    qk_norm: an RMSNorm on each query and key head, where `use_qk_norm` is not written. layer, draft: the
    table of one decoder layer, and of what an MTP layer adds to it; `layer_parts` adds the experts.
    rotary: share of a head that is rotated where `partial_rotary_factor` is not written; None where all of it
    must be. sliding_window: whether a config asks for sliding-window attention. experts: reads an MoE of
    experts, and refuses what of it is not supported; latent: the same of latent attention, whose weights
    `layer` leaves out; delta: of gated delta nets. draft_place, draft_block: of SGLang's draft, what stands
    before the names of `draft`, and the decoder layer.
    draft_on_cpu: whether that draft starts without CUDA in a server that lacks rlpipe's plugin.
    float32: endings of the names of weights that an SGLang server keeps so, whatever the others are.
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
            ValueError: something in it would be computed wrongly.
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
        """Refuse a config.json without the sizes that are needed. Raises ValueError."""
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
        """Refuse what would be computed wrongly. Raises ValueError."""
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
