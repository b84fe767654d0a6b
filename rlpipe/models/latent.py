"""Multi-head latent attention: its dimensions, and the table of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlpipe.models.base import Layout, Part

_DOWN = ("kv_a_proj_with_mqa", "q_a_proj")


def travels_with(name: str) -> str:
    """Return a key that is the same for all weights that must be in one bucket, because a server fuses them.

    >>> travels_with("model.layers.0.self_attn.kv_a_proj_with_mqa.weight")
    'model.layers.0.self_attn.q_a_proj.weight'
    >>> travels_with("model.norm.weight")
    'model.norm.weight'
    """
    return name.replace(*_DOWN)


@dataclass(slots=True, kw_only=True, frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, Section 2.1) instead of grouped queries.

    Keys and values of all heads are linear in one latent vector per token. Each head's query and key have an
    unrotated part of size `plain` and a rotated part of size `rotary`; all heads share the rotated key.
    kv_rank: size of the latent vector. query_rank: size of the latent vector of the queries; 0 if queries are
    computed from the hidden state. value: size of a head's value. interleaved: whether element 2i is rotated
    with element 2i + 1; else element i is rotated with element i + rotary / 2.
    """

    query_rank: int
    kv_rank: int
    plain: int
    rotary: int
    value: int
    interleaved: bool

    norm_eps = 1e-6  # of latent vectors; released code uses it whatever the model's norm_eps is

    def parts(self) -> Iterator[Part]:
        """Yield the weights of an attention layer; a server fuses the two that read the hidden state."""
        down, megatron, hf = "kv_a_proj_with_mqa.weight", "self_attention.", "self_attn."
        served = ""
        if self.query_rank:
            served = f"{hf}fused_qkv_{down.removeprefix('kv_')}"
            yield Part(
                (f"{megatron}linear_q_down_proj.weight",), (f"{hf}q_a_proj.weight",), Layout.ROWS, served
            )
        yield Part((f"{megatron}linear_kv_down_proj.weight",), (hf + down,), Layout.ROWS, served)
        if self.query_rank:
            yield Part((f"{megatron}q_layernorm.weight",), (f"{hf}q_a_layernorm.weight",))
        yield Part((f"{megatron}kv_layernorm.weight",), (f"{hf}kv_a_layernorm.weight",))
        query = ("linear_q_up_proj", "q_b_proj") if self.query_rank else ("linear_q_proj", "q_proj")
        for megatron_name, hf_name in (query, ("linear_kv_up_proj", "kv_b_proj")):
            yield Part((f"{megatron}{megatron_name}.weight",), (f"{hf}{hf_name}.weight",), Layout.HEADS)
        yield Part((f"{megatron}linear_proj.weight",), (f"{hf}o_proj.weight",), Layout.COLUMNS)

    def shapes(self, hidden: int, heads: int) -> dict[str, tuple[int, ...]]:
        """Return Hugging Face name (after `self_attn.`) -> shape."""
        query = heads * (self.plain + self.rotary)
        shapes: dict[str, tuple[int, ...]] = {"q_proj": (query, hidden)}
        if self.query_rank:
            shapes = {"q_a_proj": (self.query_rank, hidden), "q_a_layernorm": (self.query_rank,)}
            shapes["q_b_proj"] = query, self.query_rank
        return shapes | {
            "kv_a_proj_with_mqa": (self.kv_rank + self.rotary, hidden),
            "kv_a_layernorm": (self.kv_rank,),
            "kv_b_proj": (heads * (self.plain + self.value), self.kv_rank),
            "o_proj": (hidden, heads * self.value),
        }
