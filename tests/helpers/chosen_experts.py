"""The experts that transformers' own router chooses for each token of a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def chosen_experts(path: Path, ids: Sequence[int]) -> np.ndarray:
    """[tokens, layers with experts, experts per token], in ascending order."""
    model, chosen = AutoModelForCausalLM.from_pretrained(path), []

    def note(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        _hidden, experts, _weights = given
        chosen.append(experts.sort(-1).values)

    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.register_forward_pre_hook(note)
    with torch.no_grad():
        model(torch.tensor([list(ids)]))
    return torch.stack(chosen, 1).numpy()
