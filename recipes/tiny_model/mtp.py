"""The last stage: the MTP layer learns to draft for the frozen backbone.

The loss is the soft cross entropy of the draft against the backbone's distribution (same gradient as
KL(p || q)), over depths 1..gamma at all anchors. Each anchor has the weight of the token that it predicts.
Tokens of tool outputs have a smaller weight, but not 0: a draft that was never trained on such tokens fails
as soon as a model generates them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2ForCausalLM

from recipes.tiny_model.layer import MtpLayer, unroll


def build_mtp(backbone: Qwen2ForCausalLM) -> MtpLayer:
    """Make an MTP layer that starts as the backbone's last layer, applied to hidden state plus embedding."""
    layer = MtpLayer(backbone.config)
    last = backbone.model.layers[-1].state_dict()
    layer.load_state_dict(last, strict=False)
    size = backbone.config.hidden_size
    layer.final_layernorm.load_state_dict(backbone.model.norm.state_dict())
    with torch.no_grad():
        layer.input_proj.weight.copy_(torch.cat([torch.eye(size), torch.eye(size)], dim=1) * 0.5)
    return layer


@dataclass(slots=True)
class Drafts:
    """Teacher-forced drafts of a batch; each list has one item per depth.

    target_logprobs, draft_logprobs: [N_k, V] at the drafted anchors of depth k, T = 1.
    anchors: [B, T - 1 - k] bool, whether an anchor is drafted.
    """

    target_logprobs: list[Tensor] = field(default_factory=list)
    draft_logprobs: list[Tensor] = field(default_factory=list)
    anchors: list[Tensor] = field(default_factory=list)


def draft(backbone: Qwen2ForCausalLM, layer: MtpLayer, ids: Tensor, written: Tensor, gamma: int) -> Drafts:
    """Draft at every anchor of a batch. ids, written: [B, T]; written marks the model's own tokens.

    While the layer is in training mode the layers (not the logits) run in bfloat16.
    """
    fast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=layer.training)
    with torch.no_grad(), fast:
        hidden = backbone.model(input_ids=ids, use_cache=False).last_hidden_state.float()
    head, drafts = backbone.lm_head.weight.detach(), Drafts()
    table = backbone.model.embed_tokens.weight.detach()
    with fast:
        states = unroll(layer, lambda tokens: F.embedding(tokens, table), hidden, ids, gamma)
    anchors = written[:, 1:]
    for depth, state in enumerate(states, start=1):
        # anchor t of depth k predicts token t + k + 1, which must exist and be written
        anchors = anchors[:, :-1] & written[:, depth + 1 :]
        predicting = state[:, : anchors.shape[1]][anchors].float()
        target = hidden[:, depth : depth + anchors.shape[1]][anchors]
        q = F.linear(predicting, head).log_softmax(-1)
        p = F.linear(target, head).log_softmax(-1)
        drafts.target_logprobs.append(p)
        drafts.draft_logprobs.append(q)
        drafts.anchors.append(anchors)
    return drafts


def mtp_loss(
    backbone: Qwen2ForCausalLM, layer: MtpLayer, ids: Tensor, weights: Tensor, gamma: int
) -> tuple[Tensor, dict[str, float]]:
    """Return the mean over depths of KL(p || q) in nats per drafted position, and each depth's mean overlap.

    weights: [B, T], of each token as a prediction. An anchor is left out if a token of its chain has weight
    0.
    """
    drafts = draft(backbone, layer, ids, weights > 0, gamma)
    losses, figures = [], {}
    for depth, (p, q) in enumerate(zip(drafts.target_logprobs, drafts.draft_logprobs, strict=True), start=1):
        weight = weights[:, depth + 1 :][drafts.anchors[depth - 1]]
        divergence = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
        losses.append((divergence * weight).sum() / weight.sum())
        overlap = torch.minimum(p.detach().exp(), q.detach().exp()).sum(-1)
        figures[f"overlap/depth_{depth}"] = overlap.mean().item()
    return torch.stack(losses).mean(), figures
