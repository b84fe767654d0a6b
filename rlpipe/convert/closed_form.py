"""Closed-form initial weights of an MTP layer, and the teacher-forced acceptance that a layer would reach.

The layer is a copy of the last decoder layer. `input_proj` approximates the input that this decoder layer
had in the model. Let h_t be the backbone's final-norm output, e_s the embedding of token s, x_t the input of
the last decoder layer, and norm an RMSNorm without weight; then

    input_proj = argmin_W  sum_t || W cat(norm(h_t), norm(e_{t+1})) - x_{t+1} ||^2  +  ridge ||W||^2

The acceptance of depth k at anchor t is sum_v min(p, q), the probability that rejection sampling accepts the
draft. Here p is the target's and q the draft's distribution of token t + k + 1. `models.checkpoint` defines
a depth.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlpipe.models.checkpoint import MTP_PREFIX

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RIDGE = 3e-4  # as a fraction of the mean diagonal of X^T X, which equals the number of rows
_SINK = 50.0  # positions with more than this multiple of the median power are attention sinks, left out
DEPTHS = 3


class Decoder(Protocol):
    """The attributes that all dense decoders of transformers have."""

    layers: nn.ModuleList
    norm: nn.Module
    rotary_emb: nn.Module


def decoder_of(model: PreTrainedModel) -> Decoder:
    """Return the decoder of a model with a language-model head."""
    return cast(Decoder, model.base_model)


@dataclass(slots=True, kw_only=True, frozen=True)
class Sample:
    """A sequence of T tokens. ids: token ids [T]. sampled: mask [T] of the tokens that the model sampled."""

    ids: Tensor
    sampled: Tensor


@dataclass(slots=True, kw_only=True)
class States:
    """Activations of the backbone for one sequence, each [T, H].

    hidden: final-norm output. embedded: token embeddings. last_input: input of the last decoder layer.
    """

    hidden: Tensor
    embedded: Tensor
    last_input: Tensor


@torch.inference_mode()
def backbone_states(model: PreTrainedModel, sample: Sample) -> States:
    """Run the backbone over a sequence."""
    output = model.base_model(sample.ids[None], output_hidden_states=True, use_cache=False)
    layers = output.hidden_states  # the embeddings, then the output of each layer
    return States(
        hidden=output.last_hidden_state[0],
        embedded=model.get_input_embeddings()(sample.ids),
        last_input=layers[-2][0],
    )


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Divide each row by its root mean square."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def fit_input_proj(states: Sequence[States], eps: float) -> tuple[Tensor, float]:
    """Solve for `input_proj`, in float64.

    Args:
        states: activations of the sequences to fit on.
        eps: epsilon of the norms.

    Returns:
        input_proj [H, 2H] in float32, and R^2: the share of the variance of x_{t+1} that it explains.
    """
    pairs = [_pairs(one, eps) for one in states if len(one.hidden) > 1]
    inputs, outputs = (torch.cat(part).double() for part in zip(*pairs, strict=True))

    # An attention sink has a norm hundreds of times larger than other tokens, and would dominate the fit.
    power = outputs.pow(2).mean(1)
    ordinary = power < _SINK * power.median()
    inputs, outputs = inputs[ordinary], outputs[ordinary]

    gram = inputs.T @ inputs
    gram.diagonal().add_(RIDGE * len(inputs))
    weight = torch.linalg.solve(gram, inputs.T @ outputs)
    unexplained = (inputs @ weight - outputs).pow(2).sum()
    total = (outputs - outputs.mean(0)).pow(2).sum()
    return weight.T.float().contiguous(), float(1 - unexplained / total)


def _pairs(states: States, eps: float) -> tuple[Tensor, Tensor]:
    hidden, embedded = rms_norm(states.hidden[:-1], eps), rms_norm(states.embedded[1:], eps)
    return torch.cat((hidden, embedded), 1), states.last_input[1:]


def start_layer(model: PreTrainedModel, input_proj: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the MTP layer of a dense model: `input_proj` followed by a copy of its last decoder layer."""
    decoder = decoder_of(model)
    one = torch.ones(input_proj.shape[0])
    layer = {
        "input_proj.weight": input_proj,
        "token_layernorm.weight": one,
        "hidden_layernorm.weight": one.clone(),
        "final_layernorm.weight": decoder.norm.state_dict()["weight"],
        **decoder.layers[-1].state_dict(),
    }
    return {MTP_PREFIX + name: value.detach().clone().to(dtype) for name, value in layer.items()}


class Drafter:
    """Unrolls an MTP layer over several depths, as an engine does, but at all anchors of a sequence at once.

    layer: `model.mtp_layers.0.*` -> tensor; its decoder layer must have the class of the model's last one.
    """

    def __init__(self, model: PreTrainedModel, layer: dict[str, Tensor], eps: float) -> None:
        self._rotary, self._eps = decoder_of(model).rotary_emb, eps
        self._weights = {name.removeprefix(MTP_PREFIX): value.float() for name, value in layer.items()}
        self._block = copy.deepcopy(decoder_of(model).layers[-1])
        self._block.load_state_dict({name: self._weights[name] for name in self._block.state_dict()})

    @torch.inference_mode()
    def unroll(self, states: States, depths: int) -> Iterator[Tensor]:
        """Yield the states [T - depths, H] of each depth, at the anchors that have tokens for all depths.

        The row of depth d at anchor t attends to depth 1 at all anchors up to t, and to depths 2 to d at
        anchor t. One forward pass computes all depths as a sequence of `depth * anchors` rows with this mask.
        """
        weights, anchors = self._weights, len(states.hidden) - depths
        causal = torch.ones(anchors, anchors, dtype=torch.bool).tril()
        diagonal = torch.eye(anchors, dtype=torch.bool)
        state, inputs = states.hidden[:anchors], []
        for depth in range(1, depths + 1):
            hidden = rms_norm(state, self._eps, weights["hidden_layernorm.weight"])
            embedded = states.embedded[depth : depth + anchors]
            embedded = rms_norm(embedded, self._eps, weights["token_layernorm.weight"])
            inputs.append(F.linear(torch.cat((hidden, embedded), 1), weights["input_proj.weight"]))

            blank = torch.zeros_like(diagonal)
            rows = [
                torch.cat([causal] + [diagonal if j <= i else blank for j in range(1, depth)], 1)
                for i in range(depth)
            ]
            mask = torch.cat(rows)[None, None]
            positions = torch.cat([torch.arange(anchors) + i for i in range(depth)])[None]
            x = torch.cat(inputs)[None]
            rotary = self._rotary(x, positions)
            output = self._block(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
            output = output[0] if isinstance(output, tuple) else output
            state = rms_norm(output[0, -anchors:], self._eps, weights["final_layernorm.weight"])
            yield state


@torch.inference_mode()
def acceptance(
    model: PreTrainedModel,
    drafter: Drafter,
    samples: Sequence[Sample],
    states: Sequence[States],
    *,
    depths: int = DEPTHS,
) -> list[float]:
    """Return the mean acceptance of each depth over the tokens that the model sampled, at temperature 1."""
    head = cast(nn.Module, model.get_output_embeddings()).state_dict()["weight"]
    sums, counts = [0.0] * depths, [0] * depths
    for sample, one in zip(samples, states, strict=True):
        if len(sample.ids) < depths + 2:
            continue

        # Drop the last token: its state has no next token to compare with.
        cut = States(hidden=one.hidden[:-1], embedded=one.embedded[:-1], last_input=one.last_input[:-1])
        for index, state in enumerate(drafter.unroll(cut, depths)):
            drafted = sample.sampled[index + 2 : index + 2 + len(state)]
            target = one.hidden[index + 1 : index + 1 + len(state)][drafted]
            p = F.linear(target, head).softmax(-1)
            q = F.linear(state[drafted], head).softmax(-1)
            sums[index] += float(torch.minimum(p, q).sum(-1).double().sum())
            counts[index] += int(drafted.sum())
    return [total / count if count else 0.0 for total, count in zip(sums, counts, strict=True)]
