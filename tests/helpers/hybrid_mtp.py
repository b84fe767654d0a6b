"""The MTP layer of Qwen3-Next and Qwen3.5 written out, by the names it is read under: the reference.

The equations are those of SGLang's servers (models/qwen3_next_mtp.py, qwen3_5_mtp.py): fc reads the normed
embedding, then the normed hidden state; one decoder layer with gated attention, and experts where the model
has them; a norm, whose output the next depth and the head read. Norms multiply by 1 + weight.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe")


class HybridMtpLayer(nn.Module):
    """`norm(decoder(fc([pre_fc_norm_embedding(e), pre_fc_norm_hidden(h)])))`; arguments as of `MtpLayer`."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        config = copy.deepcopy(getattr(config, "text_config", config))
        hidden, eps = config.hidden_size, config.rms_norm_eps
        config._attn_implementation = "sdpa"
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "input_layernorm"):
            self.add_module(name, qwen.Qwen3NextRMSNorm(hidden, eps))
        self.post_attention_layernorm = qwen.Qwen3NextRMSNorm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.self_attn = qwen.Qwen3NextAttention(config, 0)
        mixed = getattr(config, "num_experts", 0)
        self.mlp = _Mixture(config) if mixed else _mlp(config, config.intermediate_size)
        self._rotary = [qwen.Qwen3NextRotaryEmbedding(config)]  # in a list: no state dict entry

    def forward(self, hidden, embeddings, position_ids, attention_mask=None):
        x = torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], dim=-1)
        x = self.fc(x)
        rope = self._rotary[0](x, position_ids)
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(x), position_embeddings=rope, attention_mask=attention_mask
        )
        x = x + attended
        return self.norm(x + self.mlp(self.post_attention_layernorm(x)))


def _mlp(config: PretrainedConfig, inner: int) -> nn.Module:
    return qwen.Qwen3NextMLP(config, intermediate_size=inner)


class _Mixture(nn.Module):
    """Every expert reads every token; those not chosen weigh 0. The shared one weighs a sigmoid."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, self.chosen = config.hidden_size, config.num_experts_per_tok
        self.gate = nn.Linear(hidden, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            _mlp(config, config.moe_intermediate_size) for _ in range(config.num_experts)
        )
        self.shared_expert = _mlp(config, config.shared_expert_intermediate_size)
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        highest, chosen = scores.topk(self.chosen)
        weights = torch.zeros_like(scores).scatter(-1, chosen, highest / highest.sum(-1, keepdim=True))
        mixed = sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return mixed + self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
