"""Runs SGLang's own loading code over names: in SGLang's environment, by `test_sglang_names`.

Reads from standard input a list of {"model", "config", "sent", "target", "draft"}: shapes by name of what is
sent and of what a server is thought to keep. Prints a line each: how many numbers each was loaded with.
"""

from __future__ import annotations

import importlib
import json
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

CLASSES = {  # module of SGLang and class, of target and draft
    "qwen3_next": (
        ("qwen3_next", "Qwen3NextForCausalLM"),
        ("qwen3_next_mtp", "Qwen3NextForCausalLMMTP"),
    ),
    "qwen3_5": (
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5_mtp", "Qwen3_5ForCausalLMMTP"),
    ),
    "qwen3_5_moe": (
        ("qwen3_5", "Qwen3_5MoeForConditionalGeneration"),
        ("qwen3_5_mtp", "Qwen3_5ForCausalLMMTP"),
    ),
}


def load(module: str, name: str, config: dict, sent: dict, kept: dict) -> dict[str, int]:
    """Numbers that each kept parameter is loaded with when the sent tensors arrive."""
    loaded = dict.fromkeys(kept, 0)
    parameters = {}
    for parameter, shape in kept.items():
        found = torch.nn.Parameter(torch.empty(shape, device="meta"))

        def count(_: object, tensor: torch.Tensor, *__: object, to: str = parameter, **___: object) -> bool:
            loaded[to] += tensor.numel()
            return True

        found.weight_loader = count
        parameters[parameter] = found
    described = SimpleNamespace(**config, encoder_only=False, language_only=False)
    fake = MagicMock(
        config=described,
        named_parameters=lambda *_, **__: parameters.items(),
        named_buffers=lambda *_, **__: [],
        enable_shared_expert_fusion=False,
        num_fused_shared_experts=0,
        start_layer=0,
        end_layer=config["num_hidden_layers"],
    )
    kind = getattr(importlib.import_module(f"sglang.srt.models.{module}"), name)
    tensors = [(tensor, torch.empty(shape, device="meta")) for tensor, shape in sent.items()]
    if name == "Qwen3NextForCausalLMMTP":
        kind = kind.__mro__[1]
        kind.load_weights(fake, tensors, is_mtp=True)
    else:
        kind.load_weights(fake, tensors)
    return loaded


def main() -> None:
    """Target and draft of each model."""
    for given in json.load(sys.stdin):
        roles = zip(("target", "draft"), CLASSES[given["model"]], strict=True)
        found = {role: load(*kind, given["config"], given["sent"], given[role]) for role, kind in roles}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
