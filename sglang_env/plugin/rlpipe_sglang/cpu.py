"""On a CPU: faster starts of processes, and changes to SGLang's classes for DeepSeek-V3 and GLM-4.5."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import torch


def forked(original: Callable, server_args: Any) -> None:
    """Around `_set_envs_and_config`: fork the scheduler and the detokenizer.

    SGLang spawns them, because CUDA does not work after a fork. Spawned processes repeat the imports of this
    process, which take most of a start on a CPU. With a NUMA node they must be spawned, because numactl is
    their executable.
    """
    original(server_args)
    if server_args.numa_node is not None:
        return
    multiprocessing.set_start_method("fork", force=True)
    os.register_at_fork(after_in_child=_load_plugins_again)


def _load_plugins_again() -> None:
    """Make a forked process load its plugins, as it hooks other functions than its parent."""
    from sglang.srt import plugins

    plugins._plugins_loaded = False


def handler(original: Callable, registry: type, backend: str) -> Callable:
    """Around `AttentionBackendRegistry.get_handler`: make latent attention of `torch_native` read the cache.

    SGLang treats `torch_native` like Triton, which attends to a prompt's expanded keys and caches latent
    vectors. But `torch_native` attends only to its cache, so it would multiply expanded queries by latent
    keys.
    """
    if backend != "torch_native":
        return original(registry, backend)
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return lambda *_: AttnForwardMethod.MLA


def rotary(original: Callable, *sizes: Any) -> torch.nn.Module:
    """Around `get_rope_cpu`, which can make only DeepSeek's scaled rotary embeddings: make the others too.

    sizes: the arguments of `get_rope_wrapper`: head size, size of the rotated part, positions, base, whether
    halves instead of neighbours are rotated together, scaling, dtype, share of the head, device.
    """
    *plain, _device = sizes
    if plain[5] is not None:
        return original(*sizes)
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    return get_rope(*plain)


def shared(_: Callable, draft: torch.nn.Module, embed: torch.Tensor, head: torch.Tensor) -> None:
    """Around `set_embed_and_head`: give a draft the target's embedding and head, without waiting for CUDA."""
    for module, weight in ((draft.model.embed_tokens, embed), (draft.lm_head, head)):
        del module.weight
        module.weight = weight
