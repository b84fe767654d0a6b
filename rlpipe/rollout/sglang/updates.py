"""New weights into the server of a replica: prepare, pause, send, continue, check.

What takes long happens while the server decodes: hashing here, writing a checkpoint or what differs from the
weights that it holds, and, on a CPU, hashing there. A server on a GPU hashes in milliseconds, before it
continues. After a failed check full weights are sent, and no delta any more; `rollout.sglang.
on_canary_failure` sets what follows another failure. Requests survive an update, and each token carries its
version. When the server dies in an update, the update is complete once its successor, started on those
weights, serves. Transport and check are `weights.sync`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping

import torch

from rlpipe.config.rollout import KvOnUpdate, RolloutConfig
from rlpipe.config.sglang import CanaryReaction
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.rollout.sglang.client import SglangClient
from rlpipe.rollout.sglang.replica import PROBE, DesiredWeights, Replica
from rlpipe.rollout.sglang.turns import Turns
from rlpipe.rollout.sglang.verified import VerifiedSteps
from rlpipe.weights.canary import CanaryReport
from rlpipe.weights.deltas import Delta
from rlpipe.weights.offer import Checksums, Member
from rlpipe.weights.protocols import ServerError, ServerUnreachable
from rlpipe.weights.sync import WeightSync
from rlpipe.weights.transports.base import Staged, WeightUpdate

CONTINUE = "/continue_generation", {"torch_empty_cache": False}
_ATTEMPTS = 3  # with servers that live and yet do not answer
_SENDS = 2  # of the same weights, before the run reacts to a server that does not hold them


class Updates:
    """Weight updates of one engine; used from its event loop.

    on_event: called for `canary_failed`, `broadcast_failed`, `speculation_disabled`.
    last: seconds and canary failures of the last update, and how drafts were verified before it.
    """

    def __init__(
        self,
        config: RolloutConfig,
        replica: Replica,
        *,
        sync: WeightSync,
        turns: Turns,
        on_event: Callable[..., None],
    ) -> None:
        self._config, self._sglang, self._on_event = config, config.sglang, on_event
        self._replica, self._sync, self._turns = replica, sync, turns
        self.last: dict[str, float] = {}
        self._verified = VerifiedSteps()
        self._deltas = True  # until one fails
        self._unsure = ""  # id of a server whose last update did not end well

    async def membership(self) -> Member:
        """Return the server as a member of a broadcast; an empty one unless it answers now and can take part.

        A broadcast brings fingerprints of what was sent, which a server that pads tensors does not show.
        """
        replica = self._replica
        if replica.is_serving() and not self._sync.pads:
            client, server = replica.client, replica.server_id
            if await client.answers(PROBE, self._sglang.health_timeout) and server == replica.server_id:
                return Member(server=server, group=self._sync.transport.group_of(client))
        return Member(server="", group="")

    async def bring(self, desired: DesiredWeights) -> None:
        """Update the server to `desired`, or replace it by one that was started on it.

        Raises ServerError when the server refuses, RuntimeError when the canary fails and the reaction is to
        stop.
        """
        replica, unanswered, before = self._replica, 0, self._replica.desired
        started = time.monotonic()

        # A server that has to be replaced from here on starts on the new weights.
        replica.desired = desired
        try:
            while True:
                client = await replica.serving()
                try:
                    if replica.loaded is not desired:
                        await self._transfer(client, desired)
                    else:
                        # The server was replaced during the transfer.
                        self.last = {"weights/sync_seconds": time.monotonic() - started}
                        self.last |= {"weights/canary_seconds": 0.0, "weights/canary_failures": 0}
                    if not replica.paused:
                        await replica.client.post(*CONTINUE)
                    await self._read_verified()
                    return
                except ServerUnreachable as error:
                    unanswered += not await replica.recover(client, error)
                    if unanswered == _ATTEMPTS:
                        raise
        except BaseException:
            replica.desired = before
            raise

    async def _transfer(self, client: SglangClient, desired: DesiredWeights) -> None:
        """Prepare, pause, send, check. Raises ServerError, and RuntimeError for a canary that fails."""
        version, replica = desired.version, self._replica
        with contextlib.ExitStack() as stack:
            staged: Staged = None
            if not self._takes_part(desired):
                staging = self._sync.transport.staged(await self._weights(desired), await self._held())
                staged, _ = await asyncio.gather(
                    asyncio.to_thread(stack.enter_context, staging), self._hashed(desired)
                )

            started, mode, self._unsure = time.monotonic(), self._pause_mode, replica.server_id
            for attempt in range(_SENDS):
                async with replica.pausing:
                    await client.post("/pause_generation", {"mode": mode}, self._sglang.update_timeout)
                    replica.stale = True  # until it has the weights of one version

                with replica.loading():
                    await self._send(client, desired, staged, flush=mode != "in_place")
                    sent = time.monotonic()
                    if not self._sync.on_gpu:
                        await self._continue(client)
                    report = await self._sync.check(client, self._hashed(desired), draft=replica.drafts)

                if report.passed:
                    break
                self._on_event("canary_failed", version=version, attempt=attempt, what=report.summary())
                if isinstance(staged, Delta):
                    staged, self._deltas = None, False
                if self._sglang.on_canary_failure is CanaryReaction.STOP:
                    break

        self.last = {
            "weights/sync_seconds": sent - started,
            "weights/canary_seconds": time.monotonic() - sent,
            "weights/canary_failures": attempt + (not report.passed),
        }
        if not report.passed:
            await self._react(client, report, version)
            return
        replica.mark_loaded(desired)
        self._unsure = ""

    async def _read_verified(self) -> None:
        """Add to `last` how the server verified drafts since the update before."""
        replica = self._replica
        if replica.drafts and self._sglang.plugin:
            # A server that is lost here is replaced by its watch.
            with contextlib.suppress(ServerError, TimeoutError):
                async with asyncio.timeout(self._sglang.health_timeout):
                    info = await replica.client.read(PROBE)
                self.last |= self._verified.shares(replica.server_id, info)

    async def _continue(self, client: SglangClient) -> None:
        """Have a server that holds one version decode, unless it is to stay paused."""
        async with self._replica.pausing:
            self._replica.stale = False
            if not self._replica.paused:
                await client.post(*CONTINUE)

    async def _held(self) -> Mapping[str, torch.Tensor] | None:
        """Return the weights that the server holds, where that is known and this worker has them."""
        loaded = self._replica.loaded
        if self._replica.server_id == self._unsure:
            return None
        possible = self._deltas and self._sync.transport.sends_deltas and not self._sync.pads
        if not possible or loaded.weights is None:
            return None
        with contextlib.suppress(RuntimeError):  # of a broadcast, and no process has them any more
            return await loaded.weights()
        return None

    def _takes_part(self, desired: DesiredWeights) -> bool:
        """Return whether the server is in the group of a broadcast that is still to come."""
        return desired.offer is not None and self._replica.server_id in desired.offer.members

    async def _weights(self, desired: DesiredWeights) -> Mapping[str, torch.Tensor]:
        # None means the checkpoint of the first start, which no update brings.
        assert desired.weights is not None
        return await desired.weights()

    async def _hashed(self, desired: DesiredWeights) -> Checksums:
        """Return the checksums of a server that holds `desired`."""
        if desired.checksums is None:
            desired.checksums = await self._sync.checksums(await self._weights(desired))
        return desired.checksums

    async def _send(
        self, client: SglangClient, desired: DesiredWeights, staged: Staged, *, flush: bool
    ) -> None:
        """Send `desired` to the server: by its broadcast, which brings the checksums, or to this server only.

        staged: what `Transport.staged` prepared.
        """
        takes_part, offer, desired.offer = self._takes_part(desired), desired.offer, None
        if takes_part and offer is not None:
            member = self._replica.server_id
            try:
                desired.checksums = (await self._sync.receive(client, offer, member, flush=flush)).checksums
                return
            except ServerUnreachable:
                raise
            except ServerError as error:
                self._on_event("broadcast_failed", version=desired.version, error=str(error)[:300])

        weights = await self._weights(desired)
        update = WeightUpdate(weights=weights, version=desired.version, flush=flush, staged=staged)
        await self._sync.send(client, update)

    @property
    def _pause_mode(self) -> str:
        """SGLang's name for what happens to running requests and their keys and values."""
        if self._sglang.abort_on_update:
            return "abort"
        return {KvOnUpdate.KEEP: "in_place", KvOnUpdate.RECOMPUTE: "retract"}[self._config.kv_on_update]

    async def _react(self, client: SglangClient, report: CanaryReport, version: int) -> None:
        """React to weights that did not arrive: stop, or drop speculation if only the draft is stale."""
        switch_off = self._sglang.on_canary_failure is CanaryReaction.NO_SPECULATION
        if not switch_off or report.target or not self._replica.drafts:
            raise RuntimeError(
                f"the SGLang server does not hold version {version}: {report.summary()}. See "
                f"{self._replica.server.log} and rollout.sglang.on_canary_failure."
            )

        # Speculation is set at the start of a server, so switching it off needs another one.
        self._replica.drain()
        await client.post("/pause_generation", {"mode": "abort"})  # its collector continues what it ends
        await self._turns.wait_until_idle()
        self._replica.spec = SpecConfig(mode=SpecMode.NONE)
        await self._replica.restart()
        self._on_event("speculation_disabled", version=version, what=report.summary())
