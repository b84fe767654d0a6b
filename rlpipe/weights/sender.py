"""The trainer's side of broadcasts to servers: copies a version, and sends it while the next step trains.

    copy:  trainer.weight_buckets, draft --> host memory (`HostCopy`)
                                 \\--> checksums for the canary, computed on the bucket's device
    send:  host memory --> BroadcastRoot.send --> every rank of every server

Every trainer rank has a sender, because all ranks take part in gathering. A root is a sender that has the
weights and owns a group of servers. Rank 0 is the root of all servers; if ranks and servers share GPUs, each
rank is the root of its GPU's server. `send` and `copy` are called on different threads, and a version is sent
before the next one is copied. A server that joins, or replaces a lost one, gets the copy from `newest`. The
rollout workers send the requests to the servers (`weights.sync`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch

from rlpipe.config.drafters import Drafter
from rlpipe.config.rollout import RolloutConfig
from rlpipe.models.checkpoint import has_mtp
from rlpipe.weights.buckets import Bucket, buckets
from rlpipe.weights.canary import is_served, rank_parts
from rlpipe.weights.checksums import BucketChecksums
from rlpipe.weights.fingerprint import Parts
from rlpipe.weights.host_copy import HostCopy
from rlpipe.weights.offer import BroadcastResult, Checksums, Rendezvous
from rlpipe.weights.payload import WeightPayload, pack_weights
from rlpipe.weights.process_group import GroupBroken
from rlpipe.weights.protocols import ExportsDraft, ExportsWeights
from rlpipe.weights.transports import TRANSPORTS
from rlpipe.weights.transports.base import Audience, BroadcastRoot


class WeightSender:
    """Broadcasts the trainer's weights to servers, in the servers' dtype.

    config: settings of the rollout. trainer: the trainer's object on this rank. on_gpu: whether the servers
    are on GPUs. drafter: drafter of the servers. draft: on rank 0, the trainer of a separate draft; the
    draft's weights are sent first. root: whether this rank has servers. everywhere: whether every rank has
    servers.
    """

    def __init__(
        self,
        config: RolloutConfig,
        trainer: ExportsWeights,
        *,
        on_gpu: bool,
        drafter: Drafter = Drafter.MTP,
        draft: ExportsDraft | None = None,
        root: bool = True,
        everywhere: bool = False,
    ) -> None:
        self._config, self._trainer, self._draft = config, trainer, draft
        self._model = trainer.hf_config
        self._drafter = drafter if drafter is not Drafter.MTP or has_mtp(self._model) else None
        self._megabytes, self._dtype = config.sglang.bucket_mb, getattr(torch, config.dtype)
        self._on_gpu = on_gpu
        self._is_root, self._everywhere = root, everywhere
        self._root: BroadcastRoot | None = None
        self._plan: Sequence[Bucket] = ()  # on a root: the buckets of every version, on the meta device
        self._copy = HostCopy((), trainer.device)
        self._checksums = Checksums(ranks=[])  # of the copied version
        self._version: int | None = None  # the version whose copy is complete
        self._copied = threading.Condition()  # the copy is written on one thread and packed on another

    def copy(self, version: int) -> None:
        """Copy the trainer's weights; collective over its ranks, which may continue training afterwards."""
        draft = list(self._draft_buckets())
        if self._is_root and not self._plan:
            plan = self._served(self._trainer.bucket_plan(self._megabytes, self._dtype))
            forms = ([(name, tensor.to("meta")) for name, tensor in bucket] for bucket in draft)
            self._plan = [*forms, *plan]

        with self._copied:
            self._version = None
            if not self._copy.fits(self._plan):
                self._copy.close()
                self._copy = HostCopy(self._plan, self._trainer.device)

        copy = self._copy
        checksums = BucketChecksums(
            self._plan,
            self._rank_parts,
            ranks=self._config.sglang.tp,
            on_gpu=self._on_gpu,
            copied=copy.read,
        )
        gathered = self._trainer.weight_buckets(self._megabytes, self._dtype, everywhere=self._everywhere)
        for bucket in chain(draft, self._served(gathered)):
            copy.write(bucket)
            checksums.add(bucket)
        copy.read()
        with self._copied:
            self._checksums, self._version = checksums.result(), version
            self._copied.notify_all()

    def open(self, host: str, servers: int) -> tuple[Rendezvous, list[Bucket]]:
        """Open a new group with `servers` servers; return it, and the copied buckets on the meta device.

        host: address at which the servers reach this machine. All servers join when the first version is
        sent.
        """
        self.close()
        sglang = self._config.sglang
        audience = Audience(
            host=host,
            servers=servers,
            ranks=sglang.tp,
            on_gpu=self._on_gpu,
            timeout=sglang.update_timeout,
            device=self._trainer.device,
            buckets=self._plan,
        )
        root = self._root = TRANSPORTS[sglang.weight_transfer].open_root(audience)
        return root.rendezvous, list(self._plan)

    def send(self, version: int) -> BroadcastResult:
        """Broadcast the copy; if a bucket does not arrive, the buckets after it are not sent.

        Servers have `update_timeout` seconds for all buckets, which limits the delay by a hanging server.
        """
        assert self._version == version, f"version {self._version} was copied, and {version} is to be sent"
        deadline = time.monotonic() + self._config.sglang.update_timeout
        tensors = self._copy.tensors
        sent = ([(name, tensors[name]) for name, _ in bucket] for bucket in self._plan)
        failure = ""
        if self._root is None:
            failure = "there is no group to send to"
        else:
            try:
                self._root.send(sent, deadline)
            except GroupBroken as error:
                failure = str(error)

        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        return BroadcastResult(checksums=self._checksums, num_bytes=num_bytes, failure=failure)

    def newest(self) -> WeightPayload:
        """Return the weights that were copied last; wait for a copy in progress.

        Raises RuntimeError when none is complete within `update_timeout`.
        """
        with self._copied:
            timeout = self._config.sglang.update_timeout
            self._copied.wait_for(lambda: self._version is not None, timeout)
            if self._version is None:
                raise RuntimeError(f"the trainer has no complete copy of its weights after {timeout:g} s.")
            return pack_weights(self._copy.tensors, self._version)

    def close(self) -> None:
        """Leave the group."""
        if self._root is not None:
            self._root.close()
            self._root = None

    def _rank_parts(self, weights: Mapping[str, torch.Tensor]) -> list[dict[str, Parts]]:
        return rank_parts(weights, self._config, self._model, drafter=self._drafter)

    def _draft_buckets(self) -> Iterator[Bucket]:
        """Yield the buckets of a separate draft's weights, if there is one."""
        if self._draft is None:
            return

        served = {
            name: tensor.to(self._trainer.device, self._dtype)
            for name, tensor in self._draft.export_weights().items()
            if is_served(name, self._drafter)
        }
        yield from buckets(served, self._megabytes)

    def _served(self, exported: Iterable[Bucket]) -> Iterator[Bucket]:
        """Yield the buckets, without the MTP layer if the servers use another draft."""
        for bucket in exported:
            if self._drafter not in (None, Drafter.MTP):
                bucket = [pair for pair in bucket if is_served(pair[0], self._drafter)]
            if bucket:
                yield bucket
