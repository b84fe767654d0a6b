"""The MTP layer in torch: the reference module of the MiMo layout, and its unrolling over depths.

This module has the equations, but no loss and no generation. With `h_0` the backbone's final-norm output and
`e_s` the embedding of token s, depth k (1-based) at anchor t computes

    h_k[t] = layer(h_{k-1}[t], e_{t+k}), RoPE position t + k - 1,    draft logits = lm_head(h_k[t])

The logits predict token t + k + 1. State dict names are the suffixes of `model.mtp_layers.0.*`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding


class MtpLayer(nn.Module):
    """`final_layernorm(decoder(input_proj([hidden_layernorm(h), token_layernorm(e)])))`.

    config: of a Qwen2-like backbone (hidden_size, heads, rope, rms_norm_eps, intermediate_size).
    """

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        config = copy.deepcopy(config)
        config._attn_implementation = "sdpa"
        self.token_layernorm = Qwen2RMSNorm(hidden, eps)
        self.hidden_layernorm = Qwen2RMSNorm(hidden, eps)
        self.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        decoder = Qwen2DecoderLayer(config, layer_idx=0)
        self.self_attn, self.mlp = decoder.self_attn, decoder.mlp
        self.input_layernorm = decoder.input_layernorm
        self.post_attention_layernorm = decoder.post_attention_layernorm
        self.final_layernorm = Qwen2RMSNorm(hidden, eps)
        self._rotary = [Qwen2RotaryEmbedding(config)]  # in a list: no parameters, no state dict entry

    def forward(
        self, hidden: Tensor, embeddings: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Compute one depth over a full sequence.

        hidden, embeddings: [B, T, H]. position_ids: [B, T] or [1, T], RoPE positions.
        attention_mask: [B, 1, T, T], added to the scores; None means causal. Returns [B, T, H], normalised.
        """
        x = torch.cat([self.hidden_layernorm(hidden), self.token_layernorm(embeddings)], dim=-1)
        x = self.input_proj(x)
        rope = self._rotary[0].to(x.device)(x, position_ids)
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(x), position_embeddings=rope, attention_mask=attention_mask
        )
        x = x + attended
        return self.final_layernorm(x + self.mlp(self.post_attention_layernorm(x)))


def unroll(
    layer: MtpLayer, embed: Callable[[Tensor], Tensor], hidden: Tensor, tokens: Tensor, gamma: int
) -> list[Tensor]:
    """Compute hidden states of depths 1..gamma at every anchor of a sequence, teacher-forced.

    embed: token ids -> embeddings. hidden: [B, T, H], the backbone's final-norm output. tokens: [B, T].
    Depth k has T - k anchors, so item k - 1 of the result is [B, T - k, H]. Its anchor t has read tokens up
    to t + k and is to be compared with the backbone at position t + k. Attention is causal within a depth, as
    in Megatron; in an engine, depth k attends to depth-1 keys of the prefix instead.

    Raises ValueError when the sequence is too short for gamma depths.
    """
    length = tokens.shape[1]
    if length <= gamma:
        raise ValueError(
            f"unroll needs more than gamma={gamma} tokens, got a sequence of {length}. Drop shorter ones."
        )
    embeddings = embed(tokens)
    states: list[Tensor] = []
    for depth in range(1, gamma + 1):
        anchors = length - depth
        positions = torch.arange(depth - 1, depth - 1 + anchors, device=tokens.device)[None]
        hidden = layer(hidden[:, :anchors], embeddings[:, depth:], positions)
        states.append(hidden)
    return states
