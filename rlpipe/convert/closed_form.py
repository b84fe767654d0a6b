"""The closed-form start of an MTP layer, and the acceptance that a layer would reach, teacher-forced.

The layer is a copy of the last decoder layer, and `input_proj` gives that layer the input it is used to:
with h_t the backbone's final-norm output, e_s the embedding of token s, x_t the input of the last decoder
layer, norm an RMSNorm without weight,

    input_proj = argmin_W  sum_t || W cat(norm(h_t), norm(e_{t+1})) - x_{t+1} ||^2  +  ridge ||W||^2

Acceptance of depth k at anchor t is sum_v min(p, q), the probability that rejection sampling accepts, where p
is the target's distribution of token t + k + 1 and q the draft's. `models.checkpoint` defines a depth.
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

RIDGE = 3e-4  # of the mean diagonal of X^T X, which is the number of rows
_SINK = 50.0  # times the median power: positions that only collect attention, far from all other states
DEPTHS = 3


class Decoder(Protocol):
    """What transformers' dense decoders have in common."""

    layers: nn.ModuleList
    norm: nn.Module
    rotary_emb: nn.Module


def decoder_of(model: PreTrainedModel) -> Decoder:
    """Return the decoder of a model with a language-model head."""
    return cast(Decoder, model.base_model)


@dataclass(slots=True, kw_only=True, frozen=True)
class Sample:
    """A sequence of a model. ids: its tokens. sampled: which of them the model sampled; [T] both."""

    ids: Tensor
    sampled: Tensor


@dataclass(slots=True, kw_only=True)
class States:
    """What the backbone computes for one sequence, [T, H] each.

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
        states: of the sequences to fit.
        eps: of the norms.

    Returns:
        input_proj [H, 2H] in float32, and R^2: the share of the variance of x_{t+1} that it explains.
    """
    pairs = [_pairs(one, eps) for one in states if len(one.hidden) > 1]
    inputs, outputs = (torch.cat(part).double() for part in zip(*pairs, strict=True))

    # An attention sink has a norm hundreds of times that of others, and would dominate the fit.
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
    """Return the MTP layer of a dense model: its last decoder layer after `input_proj`."""
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
    """Unrolls an MTP layer over the depths of whole sequences as an engine does.

    layer: `model.mtp_layers.0.*` -> tensor; its decoder layer is of the class of the model's last one.
    """

    def __init__(self, model: PreTrainedModel, layer: dict[str, Tensor], eps: float) -> None:
        self._rotary, self._eps = decoder_of(model).rotary_emb, eps
        self._weights = {name.removeprefix(MTP_PREFIX): value.float() for name, value in layer.items()}
        self._block = copy.deepcopy(decoder_of(model).layers[-1])
        self._block.load_state_dict({name: self._weights[name] for name in self._block.state_dict()})

    @torch.inference_mode()
    def unroll(self, states: States, depths: int) -> Iterator[Tensor]:
        """Yield the states [T - depths, H] of each depth, at the anchors that have tokens for all depths.

        A depth attends to the keys of depth 1 at anchors up to its own, and to those of the depths between at
        its own anchor: all depths are one sequence of `depth * anchors` rows under such a mask.
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

        # Anchors of the last depth end one token before the sequence, whose state has no next token.
        cut = States(hidden=one.hidden[:-1], embedded=one.embedded[:-1], last_input=one.last_input[:-1])
        for index, state in enumerate(drafter.unroll(cut, depths)):
            drafted = sample.sampled[index + 2 : index + 2 + len(state)]
            target = one.hidden[index + 1 : index + 1 + len(state)][drafted]
            p = F.linear(target, head).softmax(-1)
            q = F.linear(state[drafted], head).softmax(-1)
            sums[index] += float(torch.minimum(p, q).sum(-1).double().sum())
            counts[index] += int(drafted.sum())
    return [total / count if count else 0.0 for total, count in zip(sums, counts, strict=True)]
