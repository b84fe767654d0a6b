"""Weights by collective broadcast: this process is rank 0, the ranks of one server are the others.

    once per server:  our store and group  <--/init_weights_update_group-->  its ranks join
    for each piece:   its bytes, broadcast --/update_weights_from_distributed-->  received, loaded

Neither base64 nor a copy per rank, as in request bodies. Backend gloo, from host memory, on a CPU and on a
GPU: the process that holds the weights has no GPU apart from its server's, and NCCL refuses two ranks on one.
Owns the group. Sessions, versions and checks are `sync.py`'s.
"""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rlpipe.rollout.sglang.client import ServerUnreachable, SglangClient

Piece = list[tuple[str, torch.Tensor]]


class Broadcast:
    """A group with the `ranks` of the server behind `client`. timeout: seconds for joining and each piece."""

    def __init__(self, client: SglangClient, host: str, ranks: int, timeout: float) -> None:
        self.client = client
        self._size, self._timeout = 1 + ranks, timeout
        self._name = f"rlpipe-{uuid.uuid4().hex[:8]}"
        self._store = dist.TCPStore(
            host, 0, self._size, is_master=True, timeout=self._patience, wait_for_workers=False
        )
        self._host = host
        self._group: dist.ProcessGroup | None = None

    async def join(self) -> None:
        """Build the group, both sides at once. Raises ServerError."""
        body = {
            "master_address": self._host,
            "master_port": self._store.port,
            "rank_offset": 1,
            "world_size": self._size,
            "group_name": self._name,
            "backend": "gloo",
        }
        await self._both("/init_weights_update_group", body, self._join)

    async def send(self, piece: Piece, body: dict[str, Any]) -> None:
        """Broadcast tensors of one piece to every rank. body: further fields. Raises ServerError."""
        piece = sorted(piece, key=lambda pair: -pair[1].itemsize)  # SGLang wants each aligned to its type
        flat = torch.cat(
            [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for _, tensor in piece]
        )
        described = {
            "names": [name for name, _ in piece],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in piece],
            "shapes": [list(tensor.shape) for _, tensor in piece],
            "group_name": self._name,
            "load_format": "flattened_bucket",
        }
        await self._both("/update_weights_from_distributed", body | described, self._broadcast, flat)

    def close(self) -> None:
        """Leave the group; the server, if it lives, leaves with its process."""
        if self._group in c10d._world.pg_map:  # a trainer in this process ends all groups when it stops
            dist.destroy_process_group(self._group)
        self._group = None

    @property
    def _patience(self) -> timedelta:
        return timedelta(seconds=self._timeout)

    async def _both(self, path: str, body: dict[str, Any], work: Any, *args: Any) -> None:
        """Ask the server and do our part meanwhile; the first failure is raised."""
        await asyncio.gather(
            self.client.post(path, body, self._timeout), asyncio.to_thread(self._reached, path, work, *args)
        )

    def _reached(self, path: str, work: Any, *args: Any) -> None:
        try:
            work(*args)
        except (RuntimeError, dist.DistError) as error:
            raise ServerUnreachable(f"{path}: the group with the server broke off: {error}") from error

    def _join(self) -> None:
        """As SGLang's `init_custom_process_group`: a group beside the default one, which may not exist."""
        self._group, _ = c10d._new_process_group_helper(
            self._size,
            0,
            [],
            dist.Backend("gloo"),
            dist.PrefixStore(self._name, self._store),
            group_name=self._name,
            timeout=self._patience,
        )
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(self._size)}

    def _broadcast(self, flat: torch.Tensor) -> None:
        dist.broadcast(flat, src=0, group=self._group)
