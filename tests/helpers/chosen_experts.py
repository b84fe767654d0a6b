"""The experts that transformers' own router chooses for each token of a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def chosen_experts(path: Path, ids: Sequence[int], per_token: int = 2) -> np.ndarray:
    """[tokens, layers with experts, experts per token], in ascending order."""
    model, chosen = AutoModelForCausalLM.from_pretrained(path), []

    def note(router: torch.nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, tuple):  # Qwen3-MoE's gives logits, weights and numbers
            found = output[-1]
        else:
            found = (output.sigmoid() + router.e_score_correction_bias).topk(per_token).indices
        chosen.append(found.sort(-1).values)

    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(note)
    with torch.no_grad():
        model(torch.tensor([list(ids)]))
    return torch.stack(chosen, 1).numpy()
