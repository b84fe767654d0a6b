"""What keeps SGLang's own classes of DeepSeek-V3 and GLM-4.5 from running on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def handler(original: Callable, registry: type, backend: str) -> Callable:
    """AROUND `AttentionBackendRegistry.get_handler`: latent attention of `torch_native` reads the cache.

    SGLang takes `torch_native` for Triton, which attends to a prompt's expanded keys and caches latent
    vectors; `torch_native` attends from its cache alone, and multiplies queries of one by keys of the other.
    """
    if backend != "torch_native":
        return original(registry, backend)
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return lambda *_: AttnForwardMethod.MLA


def rotary(original: Callable, *sizes: Any) -> torch.nn.Module:
    """AROUND `get_rope_cpu`, which makes the scaled rotary embeddings of DeepSeek alone.

    sizes: what `get_rope_wrapper` passes on: of a head and of its rotated part, positions, base, whether
    halves are rotated together and not neighbours, scaling, type, share of the head, device.
    """
    *plain, _device = sizes
    if plain[5] is not None:
        return original(*sizes)
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    return get_rope(*plain)


def shared(_: Callable, draft: torch.nn.Module, embed: torch.Tensor, head: torch.Tensor) -> None:
    """AROUND `set_embed_and_head`, which waits for CUDA at its end: a draft has the target's."""
    for module, weight in ((draft.model.embed_tokens, embed), (draft.lm_head, head)):
        del module.weight
        module.weight = weight
