"""Checks that Ray's object store can hold published weights, and recorded experts (rollout.replay_routes).

Counts only these two: everything else in a trajectory is tens of bytes per token. If the trainer does not
send weights to the servers itself, a version is in the object store of the trainer's node, and in the store
of every node with a rollout worker. Finished groups stay in the store of the driver's node until they are
trained on; Ray cannot move them, because the driver has views of them. The groups of a step are stored there
a second time, as one object, which is copied to each node with a trainer rank. If all trajectories have full
length:

    a version        the trained weights of target and draft, in the trainer's dtype
    a token          layers with experts * experts per token * 1 byte (2 bytes for 256 or more experts)
    a step           prompts_per_step * group_size * max_context tokens
    waiting groups   1 + max_staleness steps, and oversampled groups
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import psutil

from rlpipe.config.paths import resolve_model
from rlpipe.config.rollout import EngineKind
from rlpipe.config.run import ClusterMode, Config, RunMode, Task
from rlpipe.config.sglang import WeightTransfer
from rlpipe.config.trainer import Precision
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config
from rlpipe.preflight.memory_estimate import GIB, Memory, host_bytes, parameters, route_bytes

# Ray's defaults for a node (ray/_private/utils.py: resolve_object_store_memory).
_SHARE, _MOST, _DISK = 0.3, 200 * 10**9, 10**10
_SHARED_MEMORY = Path("/dev/shm")


def store_memory(config: Config) -> Memory | None:
    """Estimate the peak size of the driver node's store; None if it holds neither weights nor routes."""
    if config.cluster.mode is not ClusterMode.RAY or config.task is not Task.RL:
        return None

    parts = _records(config) if config.rollout.replay_routes else {}
    if _passes_weights(config):
        policy = read_architecture(read_config(resolve_model(config.model.path)))
        size = 2 if config.trainer.precision is Precision.BF16 else 4
        parts["weights"] = size * sum(parameters(policy))
    return Memory(process="Ray object store, driver's node", parts=parts) if parts else None


def _passes_weights(config: Config) -> bool:
    """Return whether weights pass through the store; False if the trainer sends them to servers itself."""
    if config.run.half is not RunMode.BOTH or config.broadcasts_weights:
        return False
    transfer = config.rollout.sglang.weight_transfer
    if config.rollout.engine is EngineKind.SGLANG and transfer is WeightTransfer.AUTO:
        # In this case `run.with_weight_transfer` will choose `shared` on any machine.
        return config.cluster.share_gpus and config.trainer.world_size > 1 and config.cotrains_draft
    return True


def _records(config: Config) -> dict[str, int]:
    """Return the bytes of recorded experts, for the step in training and for waiting groups."""
    arch, pipeline = read_architecture(read_config(resolve_model(config.rollout_model))), config.pipeline
    group = pipeline.group_size * config.rollout.max_context * route_bytes(arch)
    waiting = group * pipeline.groups_ahead * (1 + pipeline.max_staleness)
    return {"a step": group * pipeline.prompts_per_step * config.run.half.trains, "waiting": waiting}


def local_store() -> int:
    """Return the bytes of the object store that Ray would have if started on this machine."""
    shared = os.statvfs(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None
    capacity = int(0.95 * shared.f_bavail * shared.f_bsize) if shared else 0

    # Ray takes a share of the free memory, but at most the larger of /dev/shm and 10 GB, and at most 200 GB.
    return min(int(_SHARE * (host_bytes() - psutil.virtual_memory().used)), max(_DISK, capacity), _MOST)


def check_store(config: Config, driver: int, others: int | None = None) -> None:
    """Refuse a run whose data an object store cannot hold. Raises ValueError with settings that fit.

    driver: bytes of the driver node's store. others: bytes of the smallest store of the other nodes, or None
    if there is no other node.
    """
    if (memory := store_memory(config)) is None:
        return

    # Only the driver's node stores waiting groups; the others store copies of the step and of the weights.
    copied = memory.total - memory.parts.get("waiting", 0)
    needed, capacity, where = memory.total, driver, "the driver's"
    if needed <= driver:
        if others is None or copied <= others:
            return
        needed, capacity, where = copied, others, "a"

    larger = (
        f"start Ray with a larger store (ray start --object-store-memory={needed})"
        if config.cluster.address
        else "take a machine with more memory, /dev/shm included (docker run --shm-size)"
    )
    weights = memory.parts.get("weights", 0)
    if weights > capacity:
        raise ValueError(_too_large_weights(config, weights, capacity, where) + f", or {larger}.")

    # Suggest sizes scaled down by the share that fits.
    share = (capacity - weights) / (needed - weights)
    pipeline, longest = config.pipeline, config.rollout.max_context
    prompts, context = (int(size * share) for size in (pipeline.prompts_per_step, longest))
    fewer = f"pipeline.prompts_per_step={prompts}, " if prompts else ""
    raise ValueError(
        f"rollout.replay_routes=true: the experts of {pipeline.prompts_per_step} * {pipeline.group_size} "
        f"trajectories of rollout.max_context={longest} tokens, and of those that wait, take "
        f"{needed / GIB:.1f} GiB of Ray's object store on {where} node, which has {capacity / GIB:.1f}. Set "
        f"{fewer}rollout.max_context={context} or rollout.replay_routes=false, or {larger}."
    )


def _too_large_weights(config: Config, weights: int, capacity: int, where: str) -> str:
    """Return the start of an error message: the size of a version, and a transfer that avoids the store."""
    message = (
        f"one version of the weights takes {weights / GIB:.1f} GiB of Ray's object store on {where} node, "
        f"which has {capacity / GIB:.1f}"
    )
    separate = replace(config.cluster, share_gpus=False)
    sglang = replace(config.rollout.sglang, weight_transfer=WeightTransfer.COLLECTIVE)
    sent = replace(config, cluster=separate, rollout=replace(config.rollout, sglang=sglang))
    if not sent.broadcasts_weights:
        return f"{message}. Take a smaller model"

    # On shared GPUs each trainer rank can send to its server, unless only the first rank has the draft.
    by_ranks = config.cluster.share_gpus and not config.cotrains_draft
    remedy = "rollout.sglang.weight_transfer=auto" if by_ranks else "cluster.share_gpus=false"
    return (
        f"{message}: with rollout.sglang.weight_transfer={config.rollout.sglang.weight_transfer} it passes "
        f"through the store. Set {remedy}, where the trainer sends it to the servers itself"
    )
