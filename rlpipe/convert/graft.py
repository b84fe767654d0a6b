"""Gives a dense model an MTP layer: a projection fitted by least squares, then a copy of the last layer.

The model's weights and type do not change. The directory OUT gets the model's files, `mtp.safetensors`, and a
config.json that counts the layer. Engines and trainer load it as a model of the same family. An SGLang server
loads a copy in MiMo's format, written when the server starts (`rollout/sglang/target.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlpipe.convert.closed_form import (
    DEPTHS,
    Drafter,
    Sample,
    acceptance,
    backbone_states,
    fit_input_proj,
    start_layer,
)
from rlpipe.convert.fetch import MANIFEST, staged
from rlpipe.convert.gguf import quiet
from rlpipe.convert.mtp_layer import add_layer
from rlpipe.convert.samples import read_samples, sample_model
from rlpipe.models import read_architecture
from rlpipe.models.base import Architecture
from rlpipe.models.checkpoint import GRAFTED, has_mtp, read_config

_HELD_OUT = 8  # every eighth sequence is held out for measuring


@dataclass(slots=True, kw_only=True, frozen=True)
class Graft:
    """Quality of a grafted layer.

    fitted, held_out: number of sequences in the fit and held out. r2: R^2 of the fit.
    identity: acceptance of each depth on the held-out sequences with a projection that adds hidden state and
    embedding. closed_form: the same with the fitted projection.
    """

    fitted: int
    held_out: int
    r2: float
    identity: list[float]
    closed_form: list[float]

    def table(self) -> str:
        """Return the values as a text table."""
        head = f"{'acceptance (rejection, T = 1)':<32}" + "".join(
            f"depth {depth}  " for depth in range(1, len(self.identity) + 1)
        )
        rows = [
            f"{name:<32}" + "".join(f"{value:>7.3f}  " for value in values)
            for name, values in (
                ("identity projection", self.identity),
                ("least squares", self.closed_form),
            )
        ]
        fit = f"fitted on {self.fitted} sequences, R2 {self.r2:.3f}; measured on {self.held_out} others"
        return "\n".join(line.rstrip() for line in (head, *rows, fit))


def graft(
    model: Path,
    out: Path,
    *,
    rollouts: Path | None = None,
    prompts: Sequence[str] | None = None,
    tokens: int = 8000,
    seed: int = 0,
    report: Callable[[str], None] = print,
) -> Graft:
    """Write a copy of a model with an added MTP layer.

    Args:
        model: checkpoint directory of a dense model.
        out: directory to create.
        rollouts: file of the model's sequences to fit on (`read_samples`); None samples new ones.
        prompts: messages to sample answers to; if None, the model also writes the messages.
        tokens: approximate number of tokens to sample for the fit; ignored with `rollouts`.
        seed: random seed of the sampling.
        report: called with each line of progress.

    Raises:
        ValueError: the model cannot get an MTP layer, `rollouts` is unreadable, or `out` exists.
    """
    config = read_config(model)
    arch = check_graftable(config, str(model))
    if out.exists():
        raise ValueError(f"OUT={str(out)!r} exists: name a new directory.")

    if rollouts is not None:
        samples = read_samples(rollouts, arch.vocab)
    else:
        report(f"sampling about {tokens} tokens from {model.name}")
        samples = sample_model(model, tokens=tokens, seed=seed, prompts=prompts)
    samples = [sample for sample in samples if len(sample.ids) >= DEPTHS + 2]
    if len(samples) < 2:
        raise ValueError(f"a fit needs two sequences of {DEPTHS + 2} tokens or more, and has {len(samples)}.")

    report(f"fitting the projection on {sum(len(sample.ids) for sample in samples)} tokens")
    layer, result = closed_form_layer(model, samples)
    with staged(out) as partial:
        for file in model.iterdir():
            if file.is_file() and file.name != MANIFEST:
                shutil.copy2(file, partial / file.name)
        add_layer(partial, layer)
    return result


def closed_form_layer(model: Path, samples: Sequence[Sample]) -> tuple[dict[str, torch.Tensor], Graft]:
    """Fit an MTP layer for a model; return its tensors, in the model's dtype, and its quality."""
    from transformers import AutoModelForCausalLM

    with quiet():
        backbone = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    dtype, eps = backbone.dtype, read_architecture(read_config(model)).norm_eps
    backbone = backbone.float().eval()
    states = [backbone_states(backbone, sample) for sample in samples]

    held_out = [index for index in range(len(samples)) if index % _HELD_OUT == 1]
    fitted = [index for index in range(len(samples)) if index % _HELD_OUT != 1]
    projection, r2 = fit_input_proj([states[index] for index in fitted], eps)

    eye = torch.eye(len(projection))
    layers = [start_layer(backbone, weight, dtype) for weight in (torch.cat((eye, eye), 1), projection)]
    identity, closed_form = (
        acceptance(
            backbone,
            Drafter(backbone, layer, eps),
            [samples[index] for index in held_out],
            [states[index] for index in held_out],
        )
        for layer in layers
    )
    result = Graft(
        fitted=len(fitted), held_out=len(held_out), r2=r2, identity=identity, closed_form=closed_form
    )
    return layers[1], result


def check_graftable(config: Mapping[str, Any], path: str) -> Architecture:
    """Return the dimensions of a model after checking that it can get an MTP layer.

    Raises:
        ValueError: the model has an MTP layer already, or its family is not one of the dense ones in GRAFTED.
    """
    arch = read_architecture(config)
    if has_mtp(config):
        raise ValueError(f"{path!r} has an MTP layer already: adapt it with `rlpipe run +recipe=mtp_adapt`.")

    if arch.family not in GRAFTED:
        raise ValueError(
            f"{path!r} is of type {arch.family!r}, and an MTP layer can be grafted on dense models of "
            f"{', '.join(GRAFTED)}. Released checkpoints of {arch.family} may have a trained one "
            "(num_nextn_predict_layers in config.json); spec.drafter=eagle3 trains a separate draft, and "
            "spec.drafter=suffix needs none."
        )
    return arch
