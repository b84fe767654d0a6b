"""On a CPU: processes that start sooner, and what DeepSeek-V3 and GLM-4.5 need in SGLang's own classes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch


def forked(original: Callable, server_args: Any) -> None:
    """AROUND `_set_envs_and_config`: fork the scheduler and the detokenizer.

    SGLang spawns them, as CUDA survives no fork. Each then imports again what this process has imported,
    which is most of a start on a CPU. With a NUMA node they have to be spawned: numactl is their executable.
    """
    original(server_args)
    if server_args.numa_node is not None:
        return
    multiprocessing.set_start_method("fork", force=True)
    os.register_at_fork(after_in_child=_load_plugins_again)


def _load_plugins_again() -> None:
    """Have a forked process load its plugins: its functions are others than its parent's."""
    from sglang.srt import plugins

    plugins._plugins_loaded = False


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
