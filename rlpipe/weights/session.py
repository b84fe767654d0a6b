"""Update sessions with one server: the steps that all transports share.

    begin -> buckets of target and draft; the last has the version -> end

Owns the names, buckets and checkpoints of a model and its draft, and the requests that open and close a
session. The transport (`transports/`) brings a bucket to the server. `sync.py` chooses the transport and
checks that the weights arrived.

An MTP layer is part of its target's checkpoint, and each model of the server selects the weights that it
uses. A draft with a separate checkpoint may use the target's names for other tensors, so each bucket is for
only one of the two. A draft that is not trained is not sent; the check then expects the draft with which the
server started.
"""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlpipe.config.drafters import Drafter
from rlpipe.config.paths import resolve
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import read_config, read_weights, stored_name, write_checkpoint
from rlpipe.weights.buckets import Bucket, buckets, serialize
from rlpipe.weights.canary import is_served, rank_parts
from rlpipe.weights.deltas import Delta, delta
from rlpipe.weights.protocols import Server, ServerError
from rlpipe.weights.shared_memory import LOADER


class WeightSession:
    """The model and the draft on one server, and the requests that update their weights.

    spec: names the draft. folder: folder for checkpoints that the server reads.
    """

    def __init__(self, config: RolloutConfig, spec: SpecConfig, model_path: Path, *, folder: Path) -> None:
        self.config, self.model_path = config, model_path
        self.drafter = spec.drafter if spec.needs_draft else Drafter.MTP
        self.draft_path = resolve(spec.draft_path) if spec.needs_draft else None
        self.draft_prefix = self.drafter.kind.served.prefix
        self.hf_config = read_config(model_path)
        self._folder = folder

    @property
    def timeout(self) -> float:
        """Time limit in seconds of one request of an update."""
        return self.config.sglang.update_timeout

    @contextlib.asynccontextmanager
    async def open(self, client: Server) -> AsyncIterator[None]:
        """Open an update session, and close it even after a failure, so that another can be opened."""
        timeout = self.config.sglang.health_timeout
        await client.post("/begin_weight_update", {"selector": "all"}, timeout)

        try:
            yield
        except BaseException:
            with contextlib.suppress(ServerError):  # report only the first failure
                await client.post("/end_weight_update", {}, timeout)
            raise

        await client.post("/end_weight_update", {}, timeout)

    def buckets(self, weights: Mapping[str, torch.Tensor]) -> list[Bucket]:
        """Split `weights` into buckets in the order of sending; a separate draft's buckets come first."""
        megabytes = self.config.sglang.bucket_mb
        if self.draft_path is None:
            return list(buckets(weights, megabytes))

        served = {name: tensor for name, tensor in weights.items() if is_served(name, self.drafter)}
        target, draft = self._split(served)
        return [*buckets(draft, megabytes), *buckets(target, megabytes)]

    def requests(
        self, sent: Sequence[Bucket], *, version: int, flush: bool
    ) -> Iterator[tuple[Bucket, dict[str, Any]]]:
        """Yield each bucket under the names of its model, with the request body that all transports share.

        The last body completes the update: it contains the version. flush: whether it also drops all cached
        keys and values.
        """
        for number, bucket in enumerate(sent, 1):
            selector, last = "all", number == len(sent)
            if self.draft_path is not None:
                selector = "draft" if bucket[0][0].startswith(self.draft_prefix) else "target"
                bucket = [(name.removeprefix(self.draft_prefix), tensor) for name, tensor in bucket]

            # In checkpoints of some families the names differ from rlpipe's.
            bucket = [(stored_name(name, self.hf_config), tensor) for name, tensor in bucket]
            body = {
                "selector": selector,
                "flush_cache": flush and last,
                "weight_version": str(version) if last else None,
            }
            yield bucket, body

    async def load_mapped(
        self, client: Server, descriptions: Sequence[torch.Tensor], body: dict[str, Any]
    ) -> None:
        """Load a bucket on every rank of the server from memory that it maps.

        descriptions: locations of the memory and of the tensors in it (`encode_layout`), one for each rank,
        or one for all ranks.
        """
        body["load_format"] = LOADER
        serialized = [serialize([("bucket", description)]) for description in descriptions]
        body["serialized_named_tensors"] = serialized * (self.config.sglang.tp // len(serialized))
        await client.post("/update_weights_from_tensor", body, self.timeout)

    def delta(self, held: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> Delta | None:
        """Compute the delta to the server's weights; None if a full update is better."""
        if held.keys() != new.keys():
            return None
        options: Any = {"drafter": self.drafter}
        held_parts, new_parts = (
            rank_parts(weights, self.config, self.hf_config, **options) for weights in (held, new)
        )
        return delta(held_parts, new_parts)

    @contextlib.contextmanager
    def checkpoint(self, weights: Mapping[str, torch.Tensor]) -> Iterator[Path]:
        """Write `weights` as an HF directory, with a separate draft in its `draft`; removed at exit."""
        folder = self._folder / f"sglang-weights-{uuid.uuid4().hex[:8]}"
        target, draft = self._split(weights)
        write_checkpoint(folder, target, like=self.model_path)
        if draft:
            # An update may have only a part of the draft; take the other weights from the draft at the start.
            trained = {name.removeprefix(self.draft_prefix): tensor for name, tensor in draft.items()}
            start = read_weights(self.draft_path)
            write_checkpoint(folder / "draft", start | trained, like=self.draft_path)

        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def _split(
        self, weights: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Separate the target's weights, including an MTP layer, from those of a separate draft."""
        if self.draft_path is None:
            return dict(weights), {}
        draft = {name: tensor for name, tensor in weights.items() if name.startswith(self.draft_prefix)}
        return {name: tensor for name, tensor in weights.items() if name not in draft}, draft
