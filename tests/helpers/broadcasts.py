"""Both ends of a broadcast without a trainer or a server: what a test sends, and who receives it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlpipe.config.rollout import RolloutConfig
from rlpipe.trainer.hf_bridge import name_table
from rlpipe.weights.offer import BroadcastResult, Offer
from rlpipe.weights.payload import unpack_weights
from rlpipe.weights.protocols import ServerError, ServerUnreachable
from rlpipe.weights.sender import WeightSender

CPU = torch.device("cpu")


@dataclass(slots=True, kw_only=True)
class Weights:
    """Stands for a trainer rank that holds `weights`; a tied head is left out, as by a trainer."""

    hf_config: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]
    device: torch.device = CPU

    def weight_buckets(
        self, megabytes: int, dtype: torch.dtype, *, everywhere: bool = False
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """As a trainer's: what one of its parameters makes stays together."""
        bucket: list[tuple[str, torch.Tensor]] = []
        held = 0
        for entry in name_table(self.hf_config, 1, tied=False).values():
            made = [(n, self.weights[n].to(dtype)) for n in entry.hf if n in self.weights]
            size = sum(tensor.nbytes for _, tensor in made)
            if bucket and held + size > megabytes * 2**20:
                yield bucket
                bucket, held = [], 0
            known = dict(bucket)  # several parameters may be named for one tensor
            bucket += [pair for pair in made if pair[0] not in known]
            held += size
        yield bucket

    def bucket_plan(self, megabytes: int, dtype: torch.dtype) -> list[list[tuple[str, torch.Tensor]]]:
        found = Weights.weight_buckets(self, megabytes, dtype)  # of all ranks
        return [[(name, tensor.to("meta")) for name, tensor in bucket] for bucket in found]


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The sender of a run, on a thread of its own."""

    sender: WeightSender
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    plan: Any = None

    @classmethod
    def of(
        cls,
        config: RolloutConfig,
        hf_config: Mapping[str, Any],
        device: torch.device = CPU,
        on_gpu: bool = False,
        **draft: Any,
    ) -> Trainer:
        trainer = Weights(hf_config=hf_config, weights={}, device=device)
        return cls(sender=WeightSender(config, trainer, on_gpu=on_gpu, **draft))

    def offer(
        self, weights: Mapping[str, torch.Tensor], version: int, members: list[str], *, again: bool = False
    ) -> Offer:
        """Start to broadcast `weights`. again: to the group of the offer before."""
        self.sender._trainer.weights = weights
        self.thread.submit(self.sender.copy, version).result()
        if not again:
            self.plan = self.sender.open("127.0.0.1", len(members))
        group, buckets = self.plan
        sending = self.thread.submit(self.sender.send, version)

        async def sent() -> BroadcastResult:
            return await asyncio.wrap_future(sending)

        async def kept() -> Mapping[str, torch.Tensor]:
            await sent()
            return unpack_weights(self.sender.newest())

        ranks = self.sender._config.sglang.tp
        return Offer(
            version=version,
            group=group,
            members=members,
            ranks=ranks,
            buckets=buckets,
            result=sent,
            weights=kept,
        )

    def close(self) -> None:
        self.sender.close()
        self.thread.shutdown()


class Receiver:
    """An SGLang server of one rank as far as broadcasts go; in place of an HTTP client.

    weights: what arrived. asked: paths, in order. die_at: the bucket before which its process ends.
    """

    def __init__(self, die_at: int = 0) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.asked: list[str] = []
        self.versions: list[str | None] = []
        self._die_at = die_at
        self._groups: dict[str, dist.ProcessGroupGloo] = {}

    async def post(self, path: str, body: Mapping[str, Any], timeout: float | None = None) -> None:
        self.asked.append(path)
        if path == "/init_weights_update_group":
            await asyncio.to_thread(self._join, body)
        elif path == "/destroy_weights_update_group":
            self._groups.pop(body["group_name"], None)
        elif path == "/update_weights_from_distributed":
            self.versions.append(body["weight_version"])
            if len(self.versions) == self._die_at:
                self._groups.clear()
                raise ServerUnreachable("its process ended")
            try:
                await asyncio.to_thread(self._receive, body)
            except RuntimeError as error:
                raise ServerError(f"400: {error}") from error

    def _join(self, body: Mapping[str, Any]) -> None:
        wait = timedelta(seconds=20)
        store = dist.TCPStore(body["master_address"], body["master_port"], body["world_size"], timeout=wait)
        name = body["group_name"]  # the prefixes of torch.distributed itself
        store = dist.PrefixStore("cpu/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, store)))
        rank, size = body["rank_offset"], body["world_size"]
        self._groups[name] = dist.ProcessGroupGloo(store, rank, size, wait)

    def _receive(self, body: Mapping[str, Any]) -> None:
        forms = [
            (name, getattr(torch, dtype), shape)
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True)
        ]
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in forms]
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        self._groups[body["group_name"]].broadcast(flat, 0).wait()
        for (name, dtype, shape), part in zip(forms, flat.split(sizes), strict=True):
            self.weights[name] = part.view(dtype).view(shape)
