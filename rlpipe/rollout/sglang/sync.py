"""New weights into a server: a session of its own, by one of three ways, and the proof that they arrived.

    begin -> pieces of target and draft together, the version on the last -> end -> fingerprints

Owns what is sent and checked; pausing, and what to do about a failed check, are the engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.sglang import WeightTransfer
from rlpipe.hf_layout import is_mtp_weight, read_config, weight_shapes, write_checkpoint
from rlpipe.rollout.sglang import canary
from rlpipe.rollout.sglang.canary import CanaryReport, Shard
from rlpipe.rollout.sglang.client import ServerError, SglangClient
from rlpipe.rollout.sglang.collective import Broadcast
from rlpipe.rollout.sglang.weights import buckets, serialize


class WeightSync:
    """Weights of one model. on_gpu: where the server hashes them. folder: for checkpoints sent by disk."""

    def __init__(self, config: RolloutConfig, model_path: Path, *, on_gpu: bool, folder: Path) -> None:
        self._config, self._model_path = config, model_path
        self._on_gpu, self._folder = on_gpu, folder
        self._hf_config = read_config(model_path)
        self._tied = bool(self._hf_config.get("tie_word_embeddings"))
        self._shapes = weight_shapes(model_path)
        self._group: Broadcast | None = None

    def require_fitting(self, weights: Mapping[str, torch.Tensor], *, draft: bool) -> None:
        """Refuse weights of another model before anything is touched.

        draft: whether the MTP layer is served, and so must be there. Raises ValueError.
        """
        optional = {"lm_head.weight"} if self._tied else set()
        if not draft:
            optional |= {name for name in self._shapes if is_mtp_weight(name)}
        missing = sorted(self._shapes.keys() - weights.keys() - optional)
        unknown = sorted(weights.keys() - self._shapes.keys() - optional)
        shapes = sorted(
            name
            for name in self._shapes.keys() & weights.keys()
            if tuple(weights[name].shape) != self._shapes[name]
        )
        if missing or unknown or shapes:
            raise ValueError(
                f"weights do not fit {str(self._model_path)!r}: missing {missing[:3]} ({len(missing)}), "
                f"unknown {unknown[:3]} ({len(unknown)}), of another shape {shapes[:3]} ({len(shapes)}). "
                "Send target and MTP layer by their Hugging Face names."
            )

    async def send(
        self, client: SglangClient, weights: Mapping[str, torch.Tensor], version: int, *, flush: bool
    ) -> None:
        """Replace target and draft together. flush: drop all cached keys and values. Raises ServerError."""
        if self._config.sglang.weight_transfer is WeightTransfer.DISK:
            with self.checkpoint(weights) as folder:
                body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": flush}
                await client.post("/update_weights_from_disk", body | {"keep_pause": True}, self._patience)
            return
        collective = self._config.sglang.weight_transfer is WeightTransfer.COLLECTIVE
        group = await self._joined(client) if collective else None
        async with self._session(client):
            pieces = list(buckets(weights, self._config.sglang.bucket_mb))
            for number, piece in enumerate(pieces, 1):
                last = number == len(pieces)
                body: dict[str, Any] = {
                    "selector": "all",
                    "flush_cache": flush and last,
                    "weight_version": str(version) if last else None,
                }
                if group is not None:
                    await group.send(piece, body)
                    continue
                serialized = await asyncio.to_thread(serialize, piece)
                body["serialized_named_tensors"] = [serialized] * self._config.sglang.tp
                await client.post("/update_weights_from_tensor", body, self._patience)

    async def _joined(self, client: SglangClient) -> Broadcast:
        """The group with this server, made at its first update."""
        if self._group is None or self._group.client is not client:
            self.close()
            sglang = self._config.sglang
            group = await asyncio.to_thread(Broadcast, client, sglang.host, sglang.tp, self._patience)
            await group.join()
            self._group = group
        return self._group

    def close(self) -> None:
        """Leave the group with a server."""
        if self._group is not None:
            self._group.close()
            self._group = None

    @staticmethod
    @contextlib.asynccontextmanager
    async def _session(client: SglangClient) -> AsyncIterator[None]:
        """An update session; closed also when it fails, so that another can be opened."""
        await client.post("/begin_weight_update", {"selector": "all"})
        try:
            yield
        except BaseException:
            with contextlib.suppress(ServerError):  # the first failure is the one to tell
                await client.post("/end_weight_update", {})
            raise
        await client.post("/end_weight_update", {})

    @property
    def _patience(self) -> float:
        return self._config.sglang.update_timeout

    async def check(
        self, client: SglangClient, weights: Mapping[str, torch.Tensor], *, draft: bool
    ) -> CanaryReport:
        """Fingerprints of every rank against those of `weights`. draft: whether the server drafts."""
        answer = await client.read("/weights_checker", {"action": "checksum", "selector": "all"})
        report = CanaryReport()
        for rank in answer.get("ranks") or []:
            place = rank["parallelism_info"][0]
            shard = Shard(
                rank=place["tp_rank"],
                size=place["tp_size"],
                kv_heads=int(self._hf_config["num_key_value_heads"]),
            )
            expected = await asyncio.to_thread(self._fingerprints, weights, shard, draft)
            found = canary.compare(expected, rank["checksums"])
            report.target += found.target
            report.draft += found.draft
        if not answer.get("ranks"):
            report.target.append("every tensor: the server sent no checksums")
        return report

    def _fingerprints(self, weights: Mapping[str, torch.Tensor], shard: Shard, draft: bool) -> dict[str, str]:
        dtype = getattr(torch, self._config.dtype)
        tensors = canary.server_tensors(weights, dtype, shard, tied=self._tied, draft=draft)
        return canary.fingerprints(tensors, self._on_gpu)

    @contextlib.contextmanager
    def checkpoint(self, weights: Mapping[str, torch.Tensor]) -> Iterator[Path]:
        """`weights` as a Hugging Face directory, gone again at the end."""
        folder = self._folder / f"sglang-weights-{uuid.uuid4().hex[:8]}"
        write_checkpoint(folder, weights, like=self._model_path)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)
