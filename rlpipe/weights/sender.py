"""The trainer's side of a broadcast to all servers: buckets of full weights, sent as they are gathered.

    trainer.weight_buckets, draft --> BroadcastRoot.send --> every rank of every server
                          |--> checksums for the canary, computed on the bucket's device
                          \\--> host memory: a copy for a server that was lost

Every trainer rank has a sender, because all of them gather; that of rank 0 owns the group and the copy of the
newest version. Requests to the servers are the rollout workers' (`weights.sync`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from rlpipe.config.drafters import Drafter
from rlpipe.config.rollout import RolloutConfig
from rlpipe.models.checkpoint import has_mtp
from rlpipe.weights.buckets import Bucket, buckets
from rlpipe.weights.canary import is_served, rank_fingerprints
from rlpipe.weights.offer import BroadcastResult, Checksums, Rendezvous
from rlpipe.weights.payload import WeightPayload, pack_weights
from rlpipe.weights.process_group import GroupBroken
from rlpipe.weights.protocols import ExportsDraft, ExportsWeights
from rlpipe.weights.transports import TRANSPORTS
from rlpipe.weights.transports.base import Audience, BroadcastRoot


class WeightSender:
    """Broadcasts the trainer's weights to all servers, in the dtype of the rollout side.

    config: of the rollout side. trainer: this rank. on_gpu: whether the servers are on GPUs. drafter: what
    they draft with. draft: on rank 0, the trainer of a separate draft, whose weights are sent first.
    """

    def __init__(
        self,
        config: RolloutConfig,
        trainer: ExportsWeights,
        *,
        on_gpu: bool,
        drafter: Drafter = Drafter.MTP,
        draft: ExportsDraft | None = None,
    ) -> None:
        self._config, self._trainer, self._draft = config, trainer, draft
        self._model = trainer.hf_config
        self._drafter = drafter if drafter is not Drafter.MTP or has_mtp(self._model) else None
        self._megabytes, self._dtype = config.sglang.bucket_mb, getattr(torch, config.dtype)
        self._on_gpu = on_gpu
        self._root: BroadcastRoot | None = None
        self._newest: tuple[int, dict[str, torch.Tensor]] | None = None

    def open(self, host: str, servers: int) -> tuple[Rendezvous, list[Bucket]]:
        """Open a new group with so many servers; returns it, and the buckets of each update (on meta).

        host: how the servers reach this machine. All join at the first update.
        """
        self.close()
        sglang, device = self._config.sglang, self._trainer.device
        draft = [[(name, tensor.to("meta")) for name, tensor in bucket] for bucket in self._draft_buckets()]
        plan = [
            *draft,
            *self._served(self._trainer.bucket_plan(megabytes=self._megabytes, dtype=self._dtype)),
        ]

        audience = Audience(
            host=host,
            servers=servers,
            ranks=sglang.tp,
            on_gpu=self._on_gpu,
            timeout=sglang.update_timeout,
            device=device,
            buckets=plan,
        )
        root = self._root = TRANSPORTS[sglang.weight_transfer].open_root(audience)
        return root.rendezvous, plan

    def send(self, version: int) -> BroadcastResult:
        """Broadcast the trainer's weights; after a bucket that does not arrive the others are only copied.

        Servers have `update_timeout` seconds for all buckets, so one that hangs delays the trainer no longer.
        """
        deadline = time.monotonic() + self._config.sglang.update_timeout
        copies: dict[str, torch.Tensor] = {}
        checksums = Checksums(ranks=[{} for _ in range(self._config.sglang.tp)])
        failure = ""

        with ThreadPoolExecutor(1) as thread:
            for bucket in self._buckets():
                # while a bucket travels it is copied and hashed
                sending = None if failure else thread.submit(self._send_bucket, bucket, deadline)
                copies |= {name: tensor.to("cpu", copy=True) for name, tensor in bucket}
                # by buckets: tensors that SGLang fuses are in one
                of_bucket = rank_fingerprints(
                    dict(bucket), self._config, self._model, drafter=self._drafter, on_gpu=self._on_gpu
                )
                for rank_sums, bucket_sums in zip(checksums.ranks, of_bucket, strict=True):
                    rank_sums |= bucket_sums
                failure = sending.result() if sending else failure

        self._newest = version, copies
        num_bytes = sum(tensor.nbytes for tensor in copies.values())
        return BroadcastResult(checksums=checksums, num_bytes=num_bytes, failure=failure)

    def newest(self, version: int) -> WeightPayload:
        """Return the weights last sent. Raises RuntimeError when they are of another version."""
        if self._newest is None or self._newest[0] != version:
            held = "none" if self._newest is None else self._newest[0]
            raise RuntimeError(f"the trainer does not hold version {version} any more, but {held}.")
        return pack_weights(self._newest[1], version)

    def close(self) -> None:
        """Leave the group."""
        if self._root is not None:
            self._root.close()
            self._root = None

    def _buckets(self) -> Iterator[Bucket]:
        yield from self._draft_buckets()
        yield from self._served(self._trainer.weight_buckets(megabytes=self._megabytes, dtype=self._dtype))

    def _draft_buckets(self) -> Iterator[Bucket]:
        if self._draft is None:
            return

        served = {
            name: tensor.to(self._trainer.device, self._dtype)
            for name, tensor in self._draft.export_weights().items()
            if is_served(name, self._drafter)
        }
        yield from buckets(served, self._megabytes)

    def _served(self, exported: Iterable[Bucket]) -> Iterator[Bucket]:
        """Yield the buckets without the MTP layer where another draft is served."""
        for bucket in exported:
            if self._drafter not in (None, Drafter.MTP):
                bucket = [pair for pair in bucket if is_served(pair[0], self._drafter)]
            if bucket:
                yield bucket

    def _send_bucket(self, bucket: Bucket, deadline: float) -> str:
        """Send a bucket to all servers; returns why that failed, or an empty text."""
        if self._root is None:
            return "there is no group to send to"
        try:
            self._root.send([bucket], deadline)
        except GroupBroken as error:
            return str(error)
        return ""
