"""DeepSeek-V3's MTP layer written out, under the names of its files: the reference for trainer and engine.

The equations are those of the released model's server code and of its report (arXiv:2412.19437, 2.2):
eh_proj reads the normed embedding, then the normed hidden state; one decoder layer with latent attention and
experts; a norm, whose output the next depth and the head read.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek


class DeepseekMtpLayer(nn.Module):
    """`shared_head.norm(decoder(eh_proj([enorm(e), hnorm(h)])))`; arguments as of `MtpLayer`."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        config = copy.deepcopy(config)
        config._attn_implementation = "sdpa"
        names = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm")
        for name in names:
            setattr(self, name, deepseek.DeepseekV3RMSNorm(hidden, eps))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.self_attn, self.mlp = deepseek.DeepseekV3Attention(config, 0), _Mixture(config)
        self.shared_head = nn.ModuleDict({"norm": deepseek.DeepseekV3RMSNorm(hidden, eps)})
        self._rotary = [deepseek.DeepseekV3RotaryEmbedding(config)]  # in a list: no state dict entry

    def forward(self, hidden, embeddings, position_ids, attention_mask=None):
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1))
        rope = self._rotary[0](x, position_ids)
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(x), position_embeddings=rope, attention_mask=attention_mask
        )
        x = x + attended
        return self.shared_head["norm"](x + self.mlp(self.post_attention_layernorm(x)))


class _Mixture(nn.Module):
    """Every expert reads every token; those not chosen, first by groups, weigh 0."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.chosen, self.scaling = config.num_experts_per_tok, config.routed_scaling_factor
        self.groups, self.chosen_groups = config.n_group, config.topk_group
        self.gate = deepseek.DeepseekV3TopkRouter(config)
        inner = config.moe_intermediate_size
        self.experts = nn.ModuleList(
            deepseek.DeepseekV3MLP(config, inner) for _ in range(config.n_routed_experts)
        )
        self.shared_experts = deepseek.DeepseekV3MLP(config, inner * config.n_shared_experts)

    def forward(self, x):
        scores = nn.functional.linear(x, self.gate.weight).sigmoid()
        biased = (scores + self.gate.e_score_correction_bias).unflatten(-1, (self.groups, -1))
        best = biased.topk(2).values.sum(-1).topk(self.chosen_groups).indices
        barred = torch.ones(biased.shape[:-1], dtype=torch.bool).scatter(-1, best, False)
        chosen = biased.masked_fill(barred[..., None], -torch.inf).flatten(-2).topk(self.chosen).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        weights = self.scaling * weights / weights.sum(-1, keepdim=True)
        mixed = sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return mixed + self.shared_experts(x)
