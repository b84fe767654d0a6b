"""New weights into a server: a session of its own, by one of four ways, and the proof that they arrived.

    begin -> pieces of target and draft, the version on the last -> end -> fingerprints

`send` brings weights of this process there; `receive` takes what the trainer broadcasts to all servers. Owns
what is sent and checked; pausing, and what to do about a failed check, are the engine's.

An MTP layer is part of its target's checkpoint, and each model of the server picks what it knows. Names of
a draft with a directory of its own, may mean other tensors in the target, so each piece is for one of
the two. A draft that is not trained is not sent; the server is checked to hold the one it was started with.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlpipe.config.paths import resolve
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.sglang import WeightTransfer
from rlpipe.config.spec import Drafter, SpecConfig
from rlpipe.models import family_of
from rlpipe.models.checkpoint import (
    is_mtp_weight,
    read_config,
    read_weights,
    stored_name,
    weight_shapes,
    write_checkpoint,
)
from rlpipe.weights import canary
from rlpipe.weights.buckets import Bucket, buckets, serialize
from rlpipe.weights.canary import CanaryReport
from rlpipe.weights.collective import (
    Checksums,
    GroupBroken,
    Offer,
    Rendezvous,
    Root,
    Sent,
    described,
)
from rlpipe.weights.mapped import BACKEND, Taker
from rlpipe.weights.protocols import Server, ServerError, ServerUnreachable
from rlpipe.weights.shared import LOADER, SharedBuckets, encoded, laid


class WeightSync:
    """Weights of one model and its draft.

    spec: names the draft. on_gpu: where the server hashes them. folder: for checkpoints that it reads.
    """

    def __init__(
        self, config: RolloutConfig, spec: SpecConfig, model_path: Path, *, on_gpu: bool, folder: Path
    ) -> None:
        self._config, self._model_path = config, model_path
        self._drafter = spec.drafter if spec.needs_draft else Drafter.MTP
        self._draft_path = resolve(spec.draft_path) if spec.needs_draft else None
        self._prefix = self._drafter.kind.served.prefix
        self.on_gpu, self._folder = on_gpu, folder
        self._hf_config = read_config(model_path)
        self._tied = bool(self._hf_config.get("tie_word_embeddings"))
        self._shapes = weight_shapes(model_path)
        self._draft_shapes: dict[str, tuple[int, ...]] = {}
        if self._draft_path is not None:
            shapes = weight_shapes(self._draft_path, "spec.draft_path")
            self._draft_shapes = {self._prefix + name: shape for name, shape in shapes.items()}
        self._started_with: Checksums | None = None  # of a draft apart
        self._channels = 0  # to which the server pads experts, as it told
        self._root: Root | None = None  # of the group with this server alone
        self._memory: SharedBuckets | None = None
        self._joined: tuple[Server, str] | None = None  # the server, and the group it is in
        self._taker: Taker | None = None  # there, where the trainer's memory is mapped

    def require_fitting(self, weights: Mapping[str, torch.Tensor], *, draft: bool) -> None:
        """Refuse weights of another model before anything is touched; they may be on the meta device.

        draft: whether an MTP layer is served, and so must be there. A draft apart is there as a whole or not
        at all. Raises ValueError.
        """
        expected = self._shapes
        if any(name.startswith(self._prefix) for name in weights):
            expected = expected | self._draft_shapes
        optional = {"lm_head.weight"} if self._tied else set()
        optional |= {name for name in expected if not canary.is_served(name, self._drafter)}
        if not draft:
            optional |= {name for name in expected if is_mtp_weight(name)}
        missing = sorted(expected.keys() - weights.keys() - optional)
        unknown = sorted(weights.keys() - expected.keys() - optional)
        shapes = sorted(
            name for name in expected.keys() & weights.keys() if tuple(weights[name].shape) != expected[name]
        )
        if missing or unknown or shapes:
            raise ValueError(
                f"weights do not fit {str(self._model_path)!r}: missing {missing[:3]} ({len(missing)}), "
                f"unknown {unknown[:3]} ({len(unknown)}), of another shape {shapes[:3]} ({len(shapes)}). "
                "Send target and draft by the names of their checkpoints."
            )

    async def send(
        self,
        client: Server,
        weights: Mapping[str, torch.Tensor],
        version: int,
        *,
        flush: bool,
        staged: Path | None = None,
    ) -> None:
        """Replace target and draft together. Raises ServerError.

        flush: drop all cached keys and values. staged: where `staged` laid the weights, if it did before.
        """
        transfer = self._config.sglang.weight_transfer
        if transfer is WeightTransfer.DISK:
            with contextlib.nullcontext(staged) if staged else self.staged(weights) as folder:
                body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": flush}
                await client.post("/update_weights_from_disk", body | {"keep_pause": True}, self._patience)
            return
        pieces = self._pieces(weights)
        if transfer is WeightTransfer.COLLECTIVE:
            await self._broadcast(client, pieces, version, flush)
            return
        if transfer is not WeightTransfer.TENSOR:
            await self._share(client, pieces, version, flush)
            return
        async with self._session(client):
            for piece, body in self._requests(pieces, version, flush):
                await self._post_tensors(client, await asyncio.to_thread(serialize, piece), body)

    async def _share(self, client: Server, pieces: Sequence[Bucket], version: int, flush: bool) -> None:
        """Lay each piece into shared memory while the server loads the one before."""
        requests = list(self._requests(pieces, version, flush))
        dtype, float32 = getattr(torch, self._config.dtype), family_of(self._hf_config).float32
        memory = self._memory = self._memory or SharedBuckets(dtype, float32)
        try:
            async with self._session(client):
                loading: Awaitable[None] = asyncio.sleep(0)
                for piece, body in requests:
                    description, _ = await asyncio.gather(asyncio.to_thread(memory.lay, piece), loading)
                    loading = self._post_laid(client, description, body)
                await loading
        except BaseException:
            self.close()  # what the server still reads must not be written over
            raise

    async def _post_tensors(self, client: Server, serialized: str, body: dict[str, Any]) -> None:
        body["serialized_named_tensors"] = [serialized] * self._config.sglang.tp
        await client.post("/update_weights_from_tensor", body, self._patience)

    async def _post_laid(self, client: Server, description: torch.Tensor, body: dict[str, Any]) -> None:
        body["load_format"] = LOADER
        await self._post_tensors(client, serialize([("bucket", description)]), body)

    async def receive(self, client: Server, offer: Offer, member: str, *, flush: bool) -> Sent:
        """Have the server, `member` of the group, take what the trainer broadcasts.

        Raises ServerError when either breaks off: some of its weights may be new then.
        """
        place = offer.first_rank(member)
        taking = asyncio.ensure_future(
            self._take(client, offer.group, place, offer.pieces, offer.version, flush)
        )
        sending = asyncio.ensure_future(offer.sent())
        try:
            await asyncio.wait({taking, sending}, return_when=asyncio.FIRST_COMPLETED)
            if taking.done():
                await taking
            sent = await sending
            if sent.failure:  # what the server still waits for does not come
                raise ServerError(f"the trainer's broadcast of version {offer.version}: {sent.failure}")
            await taking
        except BaseException:
            for one in (taking, sending):
                one.cancel()
            await asyncio.gather(taking, sending, return_exceptions=True)
            await self._leave(client)
            raise
        return sent

    def group_of(self, client: Server) -> str:
        """Name of the group that the server is in; empty for none."""
        return self._joined[1] if self._joined is not None and self._joined[0] is client else ""

    async def _broadcast(self, client: Server, pieces: Sequence[Bucket], version: int, flush: bool) -> None:
        """Be rank 0 ourselves, for this server alone."""
        if self._root is None or self._root.left or self.group_of(client) != self._root.rendezvous.name:
            self.close()
            sglang = self._config.sglang
            self._root = await asyncio.to_thread(Root, sglang.host, sglang.tp, self._patience)
        root = self._root
        sending = asyncio.ensure_future(asyncio.to_thread(root.send, pieces))
        taking = asyncio.ensure_future(self._take(client, root.rendezvous, 1, pieces, version, flush))
        try:
            await asyncio.wait({sending, taking}, return_when=asyncio.FIRST_EXCEPTION)
            for one in (sending, taking):
                if one.done():
                    await one
        except BaseException as error:
            self.close()  # first, so that neither waits for the other
            for one in (sending, taking):
                one.cancel()
            await asyncio.gather(sending, taking, return_exceptions=True)
            if isinstance(error, GroupBroken):
                raise ServerUnreachable(str(error)) from error
            raise

    async def _take(
        self,
        client: Server,
        group: Rendezvous,
        first_rank: int,
        pieces: Sequence[Bucket],
        version: int,
        flush: bool,
    ) -> None:
        """The server's part of a broadcast: join the group if it is new, then ask for piece after piece."""
        if self.group_of(client) != group.name:
            await self._leave(client)
            if group.backend == BACKEND:
                self._taker = await asyncio.to_thread(Taker, group, first_rank, self._patience)
            else:
                await client.post("/init_weights_update_group", group.body(first_rank), self._patience)
            self._joined = client, group.name
        async with self._session(client):
            for piece, body in self._requests(pieces, version, flush):
                if self._taker is not None:
                    where = await self._taker.where()
                    await self._post_laid(client, encoded(where | laid(piece)), body)
                    await self._taker.taken()
                else:
                    body |= described(piece, group.name)
                    await client.post("/update_weights_from_distributed", body, self._patience)

    async def _leave(self, client: Server) -> None:
        """Have the server leave its group; one that broke off cannot always be left in order."""
        if self._taker is not None:
            with contextlib.suppress(dist.DistError):  # its holder may be gone
                await self._taker.taken("a server did not take it")
            self._taker = None
        elif name := self.group_of(client):
            with contextlib.suppress(ServerError):
                body = {"group_name": name}
                await client.post("/destroy_weights_update_group", body, self._config.sglang.health_timeout)
        self._joined = None

    def close(self) -> None:
        """Leave the group with the server, if we are its rank 0, and free the memory shared with it."""
        if self._root is not None:
            self._root.close()
            self._root = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    @contextlib.asynccontextmanager
    async def _session(self, client: Server) -> AsyncIterator[None]:
        """An update session; closed also when it fails, so that another can be opened."""
        patience = self._config.sglang.health_timeout
        await client.post("/begin_weight_update", {"selector": "all"}, patience)
        try:
            yield
        except BaseException:
            with contextlib.suppress(ServerError):  # the first failure is the one to tell
                await client.post("/end_weight_update", {}, patience)
            raise
        await client.post("/end_weight_update", {}, patience)

    @property
    def _patience(self) -> float:
        return self._config.sglang.update_timeout

    async def checksums(self, weights: Mapping[str, torch.Tensor]) -> Checksums:
        """What `check` expects of a server that holds `weights`; takes no server."""
        return await asyncio.to_thread(self._checksums, weights)

    def _checksums(self, weights: Mapping[str, torch.Tensor]) -> Checksums:
        given = {"drafter": self._drafter, "channels": self._channels, "on_gpu": self.on_gpu}
        return Checksums(ranks=canary.rank_fingerprints(weights, self._config, self._hf_config, **given))

    @property
    def pads(self) -> bool:
        """Whether the server keeps tensors of other shapes than those sent: only `checksums` knows them."""
        return self._channels > 0

    def _parts(self, place: int) -> dict[str, canary.Parts]:
        """What a rank of the server keeps, on the meta device."""
        shapes = (self._shapes | self._draft_shapes).items()
        weights = {name: torch.empty(shape, device="meta") for name, shape in shapes}
        given = {"drafter": self._drafter, "channels": self._channels}
        return canary.rank_parts(weights, self._config, self._hf_config, **given)[place]

    async def check(
        self,
        client: Server,
        expecting: Awaitable[Checksums],
        *,
        draft: bool,
        again: Callable[[], Awaitable[Checksums]] | None = None,
    ) -> CanaryReport:
        """Fingerprints of every rank against those expected of it, which may be made while the server hashes.

        draft: whether the server drafts. again: makes what is expected once more, if the server pads experts.
        """
        if draft and self._draft_path is not None and self._started_with is None:
            self._started_with = await asyncio.to_thread(self._draft_checksums)
        answer, expected = await asyncio.gather(
            client.read("/weights_checker", {"action": "checksum", "selector": "all"}), expecting
        )
        report, others = CanaryReport(), {}
        for rank in answer.get("ranks") or []:
            place = rank["parallelism_info"][0]["tp_rank"]
            wanted = expected.of(place, draft)
            if draft and self._started_with is not None:
                wanted = self._started_with.ranks[place] | wanted
            found = canary.compare(wanted, rank["checksums"])
            if not found.passed:
                others |= canary.explain(found, self._parts(place), rank["checksums"])
            report.target += found.target
            report.draft += found.draft
            report.reasons |= found.reasons
        channels = canary.padded_channels(others, self._config.sglang.tp)
        if again is not None and channels:
            self._channels = channels
            return await self.check(client, again(), draft=draft)
        if not answer.get("ranks"):
            report.target.append("every tensor: the server sent no checksums")
        return report

    @contextlib.contextmanager
    def staged(self, weights: Mapping[str, torch.Tensor]) -> Iterator[Path | None]:
        """All that sending by disk can do before the server is paused; None by other ways."""
        if self._config.sglang.weight_transfer is not WeightTransfer.DISK:
            yield None
            return
        with self.checkpoint(weights) as folder:
            yield folder

    @contextlib.contextmanager
    def checkpoint(self, weights: Mapping[str, torch.Tensor]) -> Iterator[Path]:
        """`weights` as a Hugging Face directory, a draft apart in `draft` there; gone at the end."""
        folder = self._folder / f"sglang-weights-{uuid.uuid4().hex[:8]}"
        target, draft = self._split(weights)
        write_checkpoint(folder, target, like=self._model_path)
        if draft:
            trained = {name.removeprefix(self._prefix): tensor for name, tensor in draft.items()}
            start = read_weights(self._draft_path)
            write_checkpoint(folder / "draft", start | trained, like=self._draft_path)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def _split(
        self, weights: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """What goes to the target (an MTP layer with it), and what to a draft apart."""
        apart = {n for n in weights if self._draft_path is not None and n.startswith(self._prefix)}
        return {n: w for n, w in weights.items() if n not in apart}, {n: weights[n] for n in apart}

    def _draft_checksums(self) -> Checksums:
        weights = read_weights(self._draft_path)
        return self._checksums({self._prefix + name: tensor for name, tensor in weights.items()})

    def _pieces(self, weights: Mapping[str, torch.Tensor]) -> list[Bucket]:
        """What is sent, in order: a draft apart first, and in pieces of its own."""
        megabytes = self._config.sglang.bucket_mb
        if self._draft_path is None:
            return list(buckets(weights, megabytes))
        served = {name: w for name, w in weights.items() if canary.is_served(name, self._drafter)}
        target, draft = self._split(served)
        return [*buckets(draft, megabytes), *buckets(target, megabytes)]

    def _requests(
        self, pieces: Sequence[Bucket], version: int, flush: bool
    ) -> Iterator[tuple[Bucket, dict[str, Any]]]:
        """Each piece by the names of the model it is for, and what is said with it: the last completes the
        update."""
        for number, piece in enumerate(pieces, 1):
            selector, last = "all", number == len(pieces)
            if self._draft_path is not None:
                selector = "draft" if piece[0][0].startswith(self._prefix) else "target"
                piece = [(name.removeprefix(self._prefix), tensor) for name, tensor in piece]
            piece = [(stored_name(name, self._hf_config), tensor) for name, tensor in piece]
            yield (
                piece,
                {
                    "selector": selector,
                    "flush_cache": flush and last,
                    "weight_version": str(version) if last else None,
                },
            )
