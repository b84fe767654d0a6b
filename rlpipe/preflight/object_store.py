"""Checks that Ray's object store can hold the recorded experts of rollout.replay_routes.

Owns this sum only: everything else in a trajectory is tens of bytes for each token. Finished groups stay in
the store of the driver's node until they are trained on, as views that cannot be moved. Those of a step are
stored there a second time, together, and copied to each node with a trainer rank. At full length:

    a token   layers with experts * experts per token * 1 byte (2 from 256 experts on)
    a step    prompts_per_step * group_size * max_context tokens
    waiting   1 + max_staleness steps, and what is oversampled
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from rlpipe.config.paths import resolve_model
from rlpipe.config.run import ClusterMode, Config, Task
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config
from rlpipe.preflight.memory_estimate import GIB, Memory, host_bytes, route_bytes

# Ray's defaults for a node (ray/_private/utils.py: resolve_object_store_memory).
_SHARE, _MOST, _DISK = 0.3, 200 * 10**9, 10**10
_SHARED_MEMORY = Path("/dev/shm")


def store_memory(config: Config) -> Memory | None:
    """Estimate the records in the store of the driver's node at the peak; None without records or Ray."""
    recorded = config.rollout.replay_routes and config.task is Task.RL
    if not recorded or config.cluster.mode is not ClusterMode.RAY:
        return None

    arch, pipeline = read_architecture(read_config(resolve_model(config.rollout_model))), config.pipeline
    group = pipeline.group_size * config.rollout.max_context * route_bytes(arch)
    waiting = group * pipeline.groups_ahead * (1 + pipeline.max_staleness)
    step = group * pipeline.prompts_per_step * config.run.half.trains
    return Memory(process="Ray object store, driver's node", parts={"a step": step, "waiting": waiting})


def local_store() -> int:
    """Return the bytes of the object store of a Ray that is started on this machine."""
    shared = os.statvfs(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None
    room = int(0.95 * shared.f_bavail * shared.f_bsize) if shared else 0

    # Ray takes a share of the free memory: at most /dev/shm, or 10 GB where that is smaller, and never more
    # than 200 GB.
    return min(int(_SHARE * (host_bytes() - psutil.virtual_memory().used)), max(_DISK, room), _MOST)


def check_store(config: Config, driver: int, others: int | None = None) -> None:
    """Refuse records that an object store cannot hold. Raises ValueError with settings that fit.

    driver: bytes of the store of the driver's node. others: of the smallest store of another node (None:
    there is no other).
    """
    if (memory := store_memory(config)) is None:
        return

    # The driver's node stores what waits too, the others only a copy of the step.
    step = memory.parts["a step"]
    short = memory.total > driver, others is not None and step > others
    if not any(short):
        return

    # Suggest sizes scaled down by the share that fits.
    needed, room, where = (memory.total, driver, "the driver's") if short[0] else (step, others, "a")
    pipeline, longest = config.pipeline, config.rollout.max_context
    prompts, context = (int(size * room / needed) for size in (pipeline.prompts_per_step, longest))
    fewer = f"pipeline.prompts_per_step={prompts}, " if prompts else ""
    larger = (
        f"start Ray with a larger store (ray start --object-store-memory={needed})"
        if config.cluster.address
        else "take a machine with more memory, /dev/shm included (docker run --shm-size)"
    )
    raise ValueError(
        f"rollout.replay_routes=true: the experts of {pipeline.prompts_per_step} * {pipeline.group_size} "
        f"trajectories of rollout.max_context={longest} tokens, and of those that wait, take "
        f"{needed / GIB:.1f} GiB of Ray's object store on {where} node, which has {room / GIB:.1f}. Set "
        f"{fewer}rollout.max_context={context} or rollout.replay_routes=false, or {larger}."
    )
