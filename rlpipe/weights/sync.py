"""Brings new weights to a server with the configured transport, and checks that they arrived.

`send` sends weights of this process to the server. `receive` makes the server load the weights that the
trainer broadcasts to all servers. `check` compares fingerprints. Sessions and buckets are in `session.py`,
transports in `transports/`. The engine pauses the server and reacts to a failed check.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import is_mtp_weight, read_weights, weight_shapes
from rlpipe.weights import canary
from rlpipe.weights.canary import CanaryReport
from rlpipe.weights.offer import BroadcastResult, Checksums, Offer
from rlpipe.weights.protocols import Server
from rlpipe.weights.session import WeightSession
from rlpipe.weights.shared_memory import CHECK, PENDING
from rlpipe.weights.transports import TRANSPORTS
from rlpipe.weights.transports.base import Transport, WeightUpdate

_POLL_SECONDS = 0.05  # between two requests for fingerprints that a server still computes


class WeightSync:
    """Sends weights of a model and its draft to one server, and checks them there.

    spec: names the draft. on_gpu: whether the server hashes weights on a GPU. folder: folder for checkpoints
    that the server reads.
    """

    def __init__(
        self, config: RolloutConfig, spec: SpecConfig, model_path: Path, *, on_gpu: bool, folder: Path
    ) -> None:
        self.session = WeightSession(config, spec, model_path, folder=folder)
        self.on_gpu = on_gpu
        self._config = config
        self._transports: dict[type[Transport], Transport] = {}  # created at the first use
        self._tied = bool(self.session.hf_config.get("tie_word_embeddings"))
        self._shapes = weight_shapes(model_path)
        self._draft_shapes: dict[str, tuple[int, ...]] = {}
        if self.session.draft_path is not None:
            shapes = weight_shapes(self.session.draft_path, "spec.draft_path")
            prefix = self.session.draft_prefix
            self._draft_shapes = {prefix + name: shape for name, shape in shapes.items()}
        self._initial_draft: Checksums | None = None  # checksums of a separate draft at the server's start
        self._padded_channels = 0  # channels of each expert on the server; 0 if the server does not pad

    def require_fitting(self, weights: Mapping[str, torch.Tensor], *, draft: bool) -> None:
        """Refuse weights of another model, before any request to the server. Meta tensors are allowed.

        draft: whether an MTP layer is served; then the weights must include it. A separate draft must be
        complete or absent. Raises ValueError.
        """
        expected = self._shapes
        if any(name.startswith(self.session.draft_prefix) for name in weights):
            expected = expected | self._draft_shapes

        optional = {"lm_head.weight"} if self._tied else set()
        optional |= {name for name in expected if not canary.is_served(name, self.session.drafter)}
        if not draft:
            optional |= {name for name in expected if is_mtp_weight(name)}

        missing = sorted(expected.keys() - weights.keys() - optional)
        unknown = sorted(weights.keys() - expected.keys() - optional)
        shapes = sorted(
            name for name in expected.keys() & weights.keys() if tuple(weights[name].shape) != expected[name]
        )
        if missing or unknown or shapes:
            raise ValueError(
                f"weights do not fit {str(self.session.model_path)!r}: "
                f"missing {missing[:3]} ({len(missing)}), unknown {unknown[:3]} ({len(unknown)}), "
                f"of another shape {shapes[:3]} ({len(shapes)}). "
                "Send target and draft by the names of their checkpoints."
            )

    @property
    def transport(self) -> Transport:
        """The transport that `rollout.sglang.weight_transfer` currently names."""
        kind = TRANSPORTS[self._config.sglang.weight_transfer]
        if kind not in self._transports:
            self._transports[kind] = kind(self.session)
        return self._transports[kind]

    async def send(self, client: Server, update: WeightUpdate) -> None:
        """Replace target and draft together. Raises ServerError."""
        await self.transport.send(client, update)

    async def receive(self, client: Server, offer: Offer, member: str, *, flush: bool) -> BroadcastResult:
        """Make the server load the weights that the trainer broadcasts; see `Transport.receive`."""
        return await self.transport.receive(client, offer, member, flush=flush)

    def close(self) -> None:
        """Free the memory that the transports keep between two updates."""
        for transport in self._transports.values():
            transport.close()

    async def checksums(self, weights: Mapping[str, torch.Tensor]) -> Checksums:
        """Compute the checksums that `check` expects of a server with `weights`, without a request to it."""
        return await asyncio.to_thread(self._checksums, weights)

    def _checksums(self, weights: Mapping[str, torch.Tensor]) -> Checksums:
        """Compute the hashes that a server should have after an update."""
        return Checksums(
            ranks=canary.rank_fingerprints(
                weights,
                self._config,
                self.session.hf_config,
                drafter=self.session.drafter,
                channels=self._padded_channels,
                on_gpu=self.on_gpu,
            )
        )

    @property
    def pads(self) -> bool:
        """Whether the server pads tensors, which changes fingerprints; only `checksums` considers it."""
        return self._padded_channels > 0

    def _expected_parts(self, rank: int) -> dict[str, canary.Parts]:
        """Return the tensors that a rank of the server should have, on the meta device."""
        shapes = (self._shapes | self._draft_shapes).items()
        weights = {name: torch.empty(shape, device="meta") for name, shape in shapes}
        return canary.rank_parts(
            weights,
            self._config,
            self.session.hf_config,
            drafter=self.session.drafter,
            channels=self._padded_channels,
        )[rank]

    async def check(
        self,
        client: Server,
        expecting: Awaitable[Checksums],
        *,
        draft: bool,
        again: Callable[[], Awaitable[Checksums]] | None = None,
    ) -> CanaryReport:
        """Compare the fingerprints of every rank with the expected ones.

        expecting: the expected checksums, which may still be computed while the server hashes. draft: whether
        the server has a draft. again: computes the expected checksums again, if the server turns out to pad
        experts.
        """
        if draft and self.session.draft_path is not None and self._initial_draft is None:
            self._initial_draft = await asyncio.to_thread(self._draft_checksums, self.session.draft_path)

        answer, expected = await asyncio.gather(self._served_checksums(client), expecting)

        report, other_shapes = CanaryReport(), {}
        for served in answer.get("ranks") or []:
            rank = served["parallelism_info"][0]["tp_rank"]

            # If updates omit a separate draft, the server must still have the draft of its start.
            wanted = expected.for_rank(rank, draft=draft)
            if draft and self._initial_draft is not None:
                wanted = self._initial_draft.ranks[rank] | wanted

            differing = canary.compare(wanted, served["checksums"])
            if not differing.passed:
                other_shapes |= canary.explain(differing, self._expected_parts(rank), served["checksums"])
            report.target += differing.target
            report.draft += differing.draft
            report.reasons |= differing.reasons

        # If the server pads experts, its shapes show the number of channels: compare again with this number.
        channels = canary.padded_channels(other_shapes, self._config.sglang.tp)
        if again is not None and channels:
            self._padded_channels = channels
            return await self.check(client, again(), draft=draft)

        if not answer.get("ranks"):
            report.target.append("every tensor: the server sent no checksums")
        return report

    async def _served_checksums(self, client: Server) -> dict[str, Any]:
        """Request the server's fingerprints until all are computed; the server decodes while it hashes."""
        # SGLang has no field for an id, so send it as a name to skip that no tensor has.
        skipped = [CHECK + uuid.uuid4().hex]
        body = {"action": "checksum", "selector": "all", "skip_tensor_list": skipped}
        while True:
            answer = await client.read("/weights_checker", body)
            names = [name for rank in answer.get("ranks") or [] for name in rank["checksums"]]
            if not any(name.endswith(PENDING) for name in names):
                return answer
            await asyncio.sleep(_POLL_SECONDS)

    def _draft_checksums(self, draft_path: Path) -> Checksums:
        prefix = self.session.draft_prefix
        return self._checksums({prefix + name: tensor for name, tensor in read_weights(draft_path).items()})
