"""The trainer's model and transformers' in float64 from end to end, for comparisons beyond rounding.

Both compute parts in float32 whatever comes: norms, routers, rotary angles, the delta rule. Here the same
code runs with those parts in float64.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F

from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config
from rlpipe.trainer.experts import Router
from rlpipe.trainer.fused import RmsNorm
from rlpipe.trainer.model import PolicyModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def in_float64(model: PolicyModel) -> PolicyModel:
    """The model in float64, its norms and routers too; rotary angles stay float32."""
    model.double()
    for module in model.modules():
        if isinstance(module, RmsNorm):
            _norm_in_float64(module)
        if isinstance(module, Router):
            _score_in_float64(module)
    return model


def rotated_in_float64(model: PolicyModel, path: Path) -> PolicyModel:
    """`in_float64` with angles in float64 as well, of a model of this checkpoint that was not run before."""
    arch, rotary = read_architecture(read_config(path)), model.rotary_pos_emb
    rotary.inv_freq = torch.tensor(arch.rope.frequencies(arch.rotary_dim), dtype=torch.float64)
    return in_float64(model)


def transformers_in_float64(path: Path, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """transformers' model of a checkpoint whose code, from here on, means float64 where it says float32."""
    from transformers import AutoModelForCausalLM  # seconds, which ranks of trainers need not take

    family = AutoModelForCausalLM.from_pretrained(path).__class__.__module__
    for name in (family, "transformers.modeling_rope_utils"):
        monkeypatch.setattr(sys.modules[name], "torch", _WideTorch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    # grouped products of experts know no float64
    return AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager").double()


class _WideTorch:
    """What a module sees as torch: its float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _norm_in_float64(norm: RmsNorm) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, norm.normalized_shape, norm.weight + norm._centred, norm.eps)

    norm.forward = forward


def _score_in_float64(router: Router) -> None:
    """Megatron's scores of experts are float32 whatever comes; which are chosen stays as it is."""

    def routing(logits: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        _, chosen = Router.routing(router, logits, **options)
        return router._weights(logits.flatten(0, -2), chosen), chosen

    router.gating = lambda x: F.linear(x, router.weight)
    router.routing = routing
