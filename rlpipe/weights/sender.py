"""The trainer's side of a broadcast to all servers: buckets of full weights, sent as they are gathered.

    trainer.weight_buckets, draft --> BroadcastRoot.send --> every rank of every server
                          |--> checksums for the canary, computed on the bucket's device
                          \\--> host memory: a copy for a server that was lost

Every trainer rank has a sender, because all of them gather; that of rank 0 owns the group and the copy of the
newest version. Requests to the servers are the rollout workers' (`weights.sync`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from rlpipe.config.drafters import Drafter
from rlpipe.config.rollout import RolloutConfig
from rlpipe.models.checkpoint import has_mtp
from rlpipe.weights.buckets import Bucket, buckets
from rlpipe.weights.canary import is_served, rank_parts
from rlpipe.weights.checksums import BucketChecksums
from rlpipe.weights.fingerprint import Parts
from rlpipe.weights.host_copy import HostCopy
from rlpipe.weights.offer import BroadcastResult, Rendezvous
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
        self._plan: Sequence[Bucket] = ()
        self._copy: HostCopy | None = None
        self._version: int | None = None  # of which the copy is complete
        self._reading = threading.Lock()  # the copy is packed on another thread than versions are sent

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

        self._plan = plan

        # Before the servers pause: new memory is slow to write to.
        self._reserve_copy(plan)
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
        with self._reading:  # of the version before, which ends here
            self._version = None
            copy = self._copy = self._copy or HostCopy((), self._trainer.device)  # only rank 0 has buckets
        checksums = BucketChecksums(
            self._plan,
            self._rank_parts,
            ranks=self._config.sglang.tp,
            on_gpu=self._on_gpu,
            copied=copy.read,
        )
        failure = ""

        with ThreadPoolExecutor(1) as thread:
            for bucket in self._buckets():
                # while a bucket travels it is copied and hashed
                sending = None if failure else thread.submit(self._send_bucket, bucket, deadline)
                copy.write(bucket)
                checksums.add(bucket)
                failure = sending.result() if sending else failure

        num_bytes = sum(tensor.nbytes for tensor in copy.read().values())
        self._version = version
        return BroadcastResult(checksums=checksums.result(), num_bytes=num_bytes, failure=failure)

    def newest(self, version: int) -> WeightPayload:
        """Return the weights last sent. Raises RuntimeError when they are of another version."""
        with self._reading:
            if self._copy is None or self._version != version:
                held = "none" if self._version is None else self._version
                raise RuntimeError(f"the trainer does not hold version {version} any more, but {held}.")
            return pack_weights(self._copy.tensors, version)

    def close(self) -> None:
        """Leave the group."""
        if self._root is not None:
            self._root.close()
            self._root = None

    def _reserve_copy(self, plan: Sequence[Bucket]) -> None:
        """Make the memory of the copy, unless that of the last group is for the same weights."""
        with self._reading:
            if self._copy is None or not self._copy.fits(plan):
                if self._copy is not None:
                    self._copy.close()
                self._copy, self._version = HostCopy(plan, self._trainer.device), None

    def _rank_parts(self, weights: Mapping[str, torch.Tensor]) -> list[dict[str, Parts]]:
        return rank_parts(weights, self._config, self._model, drafter=self._drafter)

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
