"""The draft's loss written out: transformers' backbone, the reference layer, one trajectory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from recipes.tiny_model.layer import MtpLayer, unroll
from rlpipe.config.draft import DraftConfig
from rlpipe.drafts.loss import MtpStats, depth_targets, mtp_loss
from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.types import Trajectory
from tests.helpers.deepseek_mtp import DeepseekMtpLayer
from tests.helpers.glm_mtp import GlmMtpLayer
from tests.helpers.hybrid_mtp import HYBRIDS, HybridMtpLayer

LAYERS = {"glm4_moe": GlmMtpLayer, "deepseek_v3": DeepseekMtpLayer}
LAYERS |= dict.fromkeys(HYBRIDS, HybridMtpLayer)


def read_layers(path: Path) -> torch.nn.ModuleList:
    """Reference MTP layers of a checkpoint."""
    weights, config, layers = read_weights(path), read_config(path), torch.nn.ModuleList()
    for index in range(config["num_nextn_predict_layers"]):
        prefix = f"model.mtp_layers.{index}."
        layer = LAYERS.get(config["model_type"], MtpLayer)(AutoConfig.from_pretrained(path))
        layer.load_state_dict({k.removeprefix(prefix): w for k, w in weights.items() if k.startswith(prefix)})
        layers.append(layer)
    return layers


@torch.no_grad()
def chain_laws(path: Path) -> Callable[[Sequence[int], Sequence[int], float], tuple[torch.Tensor, ...]]:
    """p and q [n] of a chain of drafts behind a context, at a temperature, as an engine drafts it.

    The layer sees one growing sequence of (hidden state, next token): the backbone's states of the context,
    then its own. SGLang leaves out the first of these tokens (MiMo's `mimo_mtp.py`), and so does this.
    Temperature 0: p is 1 or 0, and q is 1.
    """
    model, [layer] = AutoModelForCausalLM.from_pretrained(path).eval(), read_layers(path)
    embed = model.get_input_embeddings()

    @torch.no_grad()
    def laws(context: Sequence[int], drafts: Sequence[int], temperature: float) -> tuple[torch.Tensor, ...]:
        ids, count, chosen = torch.tensor([[*context, *drafts]]), len(context), torch.tensor(drafts)[:, None]
        out = model(ids, output_hidden_states=True)
        target = out.logits[0, count - 1 : -1]
        if not temperature:
            return (target.argmax(-1) == chosen[:, 0]).float(), torch.ones(len(drafts))
        states, rows = out.hidden_states[-1][:, : count - 1], []
        for _ in drafts:
            length = states.shape[1]
            following = embed(ids[:, 1 : length + 1])
            following[:, 0] = 0
            mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
            last = layer(states, following, torch.arange(length)[None], mask)[:, -1:]
            rows.append(model.lm_head(last[0, 0]))
            states = torch.cat((states, last), 1)
        both = target, torch.stack(rows)
        return tuple((logits / temperature).softmax(-1).gather(1, chosen)[:, 0] for logits in both)

    return laws


def draft_loss(
    path: Path,
    layers: torch.nn.ModuleList,
    trajectories: Sequence[Trajectory],
    config: DraftConfig,
    temperature: float,
) -> tuple[torch.Tensor, MtpStats]:
    """Loss over all trajectories, differentiable by the layers, and statistics."""
    model = AutoModelForCausalLM.from_pretrained(path)
    total, stats = draft_numerator(model, layers, trajectories, config, temperature)
    return total / stats.weight, stats


def draft_numerator(
    model: PreTrainedModel,
    layers: torch.nn.ModuleList,
    trajectories: Sequence[Trajectory],
    config: DraftConfig,
    temperature: float,
) -> tuple[torch.Tensor, MtpStats]:
    """The same before the division by `stats.weight`, of a model that is already there."""
    parts = [_one(model, layers, t, config, temperature) for t in trajectories]
    total, stats = parts[0]
    for loss, more in parts[1:]:
        total, stats = total + loss, stats + more
    return total, stats


def _one(model, layers, trajectory, config, temperature):
    ids, depths = torch.tensor([trajectory.token_ids.tolist()]), config.depths
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[-1]
        target = model.lm_head(hidden[0])
    embed = model.get_input_embeddings()

    def several(hidden, embeddings, positions):  # the position of the first anchor tells the depth
        layer = layers[min(int(positions[0, 0]), len(layers) - 1)]
        return layer(hidden, embeddings, positions)

    states = unroll(several, lambda x: embed(x).detach(), hidden, ids, depths)
    draft = stack_depths(states, ids.shape[1]) @ model.lm_head.weight.detach().T
    last = len(ids[0]) - 1
    places = (torch.arange(last + 1)[:, None] + torch.arange(1, depths + 1)).clamp(max=last)
    found = depth_targets(ids, torch.tensor([trajectory.loss_mask.tolist()]).bool(), depths)
    return mtp_loss(
        config.objective,
        draft,
        target[places],
        mask=found.mask,
        tokens=found.tokens,
        anchors=config.anchors,
        turn_starts=found.turn_starts,
        temperature=temperature,
        normalizer=1.0,
    )


def stack_depths(states: list[torch.Tensor], length: int) -> torch.Tensor:
    """Hidden states [N, K, H] of a draft, N = B * length, from K tensors [B, T_k, H], T_k <= length."""
    padded = [torch.nn.functional.pad(state, (0, 0, 0, length - state.shape[1])) for state in states]
    return torch.stack(padded, 2).flatten(0, 1)
