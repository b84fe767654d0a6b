"""Checks at launch whether a run fits into memory; if not, searches for settings with which it fits.

Owns the comparison, the search and the refusal; `memory_estimate` computes the sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from rlpipe.config.machine import has_gpus
from rlpipe.config.paths import resolve_model
from rlpipe.config.rollout import EngineKind
from rlpipe.config.run import ClusterMode, Config, RunMode
from rlpipe.config.trainer import Precision, Recompute
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config
from rlpipe.preflight.memory_estimate import (
    GIB,
    RESERVED,
    checkpoint_of_run,
    conversation_bytes,
    estimate,
    gpu_bytes,
    host_bytes,
)
from rlpipe.preflight.object_store import check_store, local_store
from rlpipe.preflight.settings import check_adapters

_LARGER = {"H200": 140, "B200": 179, "B300": 268}  # GiB of a GPU, as nvidia-smi shows
_NODE = 8  # GPUs of a node
_RANK = 16  # suggested rank of LoRA adapters


def excess(config: Config, gpu_memory: int, host: int) -> str:
    """Describe what does not fit; empty when everything does.

    gpu_memory: bytes of one GPU. host: bytes of the machine, 0 if unknown.
    """
    processes = estimate(config, gpu_memory)

    # Processes that share a GPU are added up; otherwise each kind of process has separate GPUs.
    together = config.cluster.share_gpus or config.cluster.mode is ClusterMode.INLINE
    on_gpu = [memory for memory in processes if memory.on_gpu]
    trainers = [memory for memory in on_gpu if memory.process.startswith("trainer")]
    others = [memory for memory in on_gpu if memory not in trainers]
    for group in [on_gpu] if together else [trainers, others]:
        needed = sum(memory.total for memory in group)
        capacity = gpu_memory - RESERVED * (len(group) if together else 1)
        if group and needed > capacity:
            return f"{needed / GIB:.1f} GiB on a GPU that has {capacity / GIB:.1f} for it"

    # A server always takes a fixed share of its GPU, so check that its KV cache holds a conversation.
    for memory in on_gpu:
        if memory.process.startswith("SGLang"):
            arch = read_architecture(read_config(resolve_model(config.rollout_model)))
            if memory.parts["kv"] < (need := conversation_bytes(arch, config, config.rollout.sglang.tp)):
                return (
                    f"{memory.parts['kv'] / GIB:.1f} GiB left to a server's keys and values, of which one "
                    f"conversation takes {need / GIB:.1f}"
                )
    needed = sum(memory.total * memory.count for memory in processes if not memory.on_gpu)
    if host and needed > host:
        return f"{needed / GIB:.1f} GiB on a machine that has {host / GIB:.1f}"
    return ""


def remedy(config: Config, gpu_memory: int, host: int) -> str:
    """Return the first of the possible changes of settings with which everything fits; "" if none does."""
    for changes in _changes(config, gpu_memory, host):
        if not excess(_changed(config, changes), gpu_memory, host):
            return " ".join(f"{name}={value}" for name, value in changes.items())

    return ""


def _changes(config: Config, gpu_memory: int, host: int) -> Iterator[dict[str, Any]]:
    """Yield changes of settings that need less memory, the cheapest first.

    Yields nothing if no engine layout fits even without a trainer.
    """
    trainer, rollout, context = config.trainer, config.rollout, config.rollout.max_context
    arch = read_architecture(read_config(resolve_model(config.model.path)))

    # Trainer layouts have as many ranks as now, or a multiple; their sizes must divide the model's.
    grown = (
        (1,) if config.cluster.share_gpus or config.cluster.mode is ClusterMode.INLINE else (1, 2, 4, 8, 16)
    )
    experts = arch.experts.count if arch.experts else 1
    shared = trainer.expert_ranks(experts)
    tokens = [n for k in range(6) if (n := trainer.micro_batch_tokens >> k) >= context or k == 0]
    # Context parallelism is worth its cost only if the micro-batch cannot become smaller.
    shares = (2, 4, 8) if len(tokens) == 1 else ()
    worlds = [
        (tp, cp, pp, ranks // (tp * cp * pp), ep)
        for pp in (trainer.pp, *(n for n in (2, 4) if n != trainer.pp))
        for ranks in (trainer.world_size * more for more in grown)
        for tp in (trainer.tp, *(n for n in (2, 4, 8) if n != trainer.tp))
        for cp in (trainer.cp, *(n for n in shares if n != trainer.cp))
        for ep in (shared, *(n for n in (1, 2, 4, 8) if n != shared))
        if not (
            ranks % (tp * cp * pp)
            or ranks // (tp * pp) % ep
            or arch.kv_heads % tp
            or arch.inner % tp
            or experts % ep
            or (arch.delta and arch.delta.key_heads % (tp * cp))
            or pp > arch.layers
        )
    ]

    # Engine layouts that do not fit even without a trainer are dropped early, to shorten the search.
    servers: list[dict[str, Any]] = [{}]
    if rollout.engine is EngineKind.SGLANG:
        if config.cluster.share_gpus:
            servers += [{"rollout.sglang.memory_fraction": x} for x in (0.5, 0.3, 0.2)]
        else:
            servers += [{"rollout.sglang.tp": n} for n in (2, 4, 8) if arch.kv_heads % n == 0]
    else:
        servers += [{"rollout.max_running": rollout.max_running >> k} for k in (1, 2, 3, 4)]

    if config.run.half.generates:
        engine = _changed(config, {"run.half": RunMode.ROLLOUT})
        servers = [server for server in servers if not excess(_changed(engine, server), gpu_memory, host)]

    cheap = [
        {"trainer.recompute": how, "trainer.distributed_optimizer": True} for how in ("selective", "full")
    ]
    for precision, (tp, cp, pp, dp, ep), small, server, saving in product(
        (trainer.precision, Precision.BF16), worlds, tokens, servers, ({}, *cheap)
    ):
        wanted = {
            "trainer.precision": precision.value,
            "trainer.tp": tp,
            "trainer.cp": cp,
            "trainer.pp": pp,
            "trainer.dp": dp,
            # Keep 0 (automatic) if it means the same number of ranks.
            "trainer.ep": 0 if not trainer.ep and ep == math.gcd(experts, dp * cp) else ep,
            "trainer.micro_batch_tokens": small,
            **saving,
            **server,
        }
        yield {name: value for name, value in wanted.items() if value != _value(config, name)}


def _value(config: Config, name: str) -> Any:
    """Return the value of the setting with a dotted name."""
    for part in name.split("."):
        config = getattr(config, part)
    return config


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    """Return the configuration with changed settings. changes: dotted name -> value.

    All changes of one section are made at once, because its dataclass checks its settings together.
    """
    parts: dict[str, dict[str, Any]] = {}
    changed: dict[str, Any] = {}

    for name, value in changes.items():
        first, _, rest = name.partition(".")
        part = getattr(config, first)
        if rest:
            parts.setdefault(first, {})[rest] = value
        else:
            changed[first] = type(part)(value) if isinstance(part, Precision | Recompute) else value
    changed |= {name: _changed(getattr(config, name), inner) for name, inner in parts.items()}
    return replace(config, **changed)


def check_memory(config: Config) -> None:
    """Refuse a run that cannot fit, before anything is started. Raises ValueError with settings that fit."""
    if config.cluster.mode is ClusterMode.RAY and not config.cluster.address:
        check_store(config, local_store())

    gpu_memory = gpu_bytes(config)
    if has_gpus() and not config.cluster.address:
        check_checkpoint(config, host_bytes())
    host = 0 if gpu_memory or config.cluster.address else host_bytes()
    if not (wrong := excess(config, gpu_memory, host)):
        return

    shown = "; ".join(str(memory) for memory in estimate(config, gpu_memory))
    raise ValueError(f"the run would take {wrong} ({shown}). {advice(config, gpu_memory, host)}")


def check_checkpoint(config: Config, host: int) -> None:
    """Refuse a run on one machine, before anything is started, if its memory cannot hold a checkpoint.

    host: bytes of the machine's memory. Raises ValueError.
    """
    saved = checkpoint_of_run(config, gpu_bytes(config))
    if saved and saved.total > host:
        raise ValueError(
            f"a checkpoint would take more memory than this machine has ({saved}; {host / GIB:.1f} GiB). "
            f"Take one with more, several (cluster.address), or adapters (trainer.lora.rank={_RANK})."
        )


def advice(config: Config, gpu_memory: int, host: int) -> str:
    """Return a sentence with settings that fit, or, if none fit, with other hardware or training methods."""
    if change := remedy(config, gpu_memory, host):
        return f"Set {change}."

    several = _gpus_of_a_server(config, gpu_memory)
    one_node = (
        f"One server needs {several} such GPUs, and they must be on one node, of {_NODE}. " if several else ""
    )
    ways = [*_ways(config, gpu_memory, host), "a smaller model"]
    return f"No layout fits. {one_node}Take {', or '.join(ways)}."


def _ways(config: Config, gpu_memory: int, host: int) -> Iterator[str]:
    """Yield changes of hardware or training, with the settings, that make a run fit when no layout does."""

    def settings(changes: dict[str, Any], size: int) -> str:
        """Return `changes` and further settings that make the run fit; empty if none do."""
        changed = _changed(config, changes)
        more = remedy(changed, size, host) if excess(changed, size, host) else " "
        shown = (f"{name}={str(value).lower()}" for name, value in changes.items())
        return more and " ".join([*shown, more]).strip()

    # If trainer and engines share GPUs, try separate GPUs.
    separate: dict[str, Any] = {}
    if gpu_memory and (config.cluster.share_gpus or config.cluster.mode is ClusterMode.INLINE):
        separate = {"cluster.mode": ClusterMode.RAY, "cluster.share_gpus": False}
        separate |= {"rollout.sglang.memory_fraction": 0}
        separate = {name: value for name, value in separate.items() if value != _value(config, name)}
        if changes_that_fit := settings(separate, gpu_memory):
            yield f"a GPU for each trainer rank and each server ({changes_that_fit})"

    # Find the smallest of the larger GPUs that is large enough.
    sizes = {name: size for name, size in _LARGER.items() if 0 < gpu_memory < size * GIB}
    larger = (
        (name, settings({"cluster.gpu_gb": size, **changes}, size * GIB))
        for name, size in sizes.items()
        for changes in ([{}, separate] if separate else [{}])
    )
    if fitting := next(
        ((name, changes_that_fit) for name, changes_that_fit in larger if changes_that_fit), None
    ):
        yield f"{fitting[0]}s ({fitting[1]})"

    if _may_adapt(config) and (changes_that_fit := settings({"trainer.lora.rank": _RANK}, gpu_memory)):
        yield f"LoRA adapters instead of all weights ({changes_that_fit})"

    if host and not gpu_memory:
        needed = sum(memory.total * memory.count for memory in estimate(config))
        yield f"a machine with {needed / GIB:.0f} GiB"


def _may_adapt(config: Config) -> bool:
    """Return whether the run trains all weights and could train LoRA adapters instead."""
    if config.trainer.lora.active or not config.run.half.trains:
        return False

    try:
        adapted = _changed(config, {"trainer.lora.rank": _RANK})
        check_adapters(adapted, read_config(resolve_model(config.model.path)))
    except ValueError:
        return False
    return True


def _gpus_of_a_server(config: Config, gpu_memory: int) -> int:
    """Return how many GPUs of `gpu_memory` bytes one server needs, if that exceeds a node; else 0."""
    if not (gpu_memory and config.run.half.generates and config.rollout.engine is EngineKind.SGLANG):
        return 0

    engine = _changed(config, {"run.half": RunMode.ROLLOUT, "cluster.share_gpus": False})
    sizes = [n for n in (1, 2, 4, 8, 16, 32, 64) if n >= config.rollout.sglang.tp]
    fits = (n for n in sizes if not excess(_changed(engine, {"rollout.sglang.tp": n}), gpu_memory, 0))
    needed = next(fits, 0)
    return needed if needed > _NODE else 0
