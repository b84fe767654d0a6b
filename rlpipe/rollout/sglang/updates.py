"""Updates the weights of a replica's server: prepare, pause, send, continue, check.

Slow operations run while the server decodes: hashing in this process, writing a checkpoint or the delta to
the server's weights, and, on a CPU, hashing in the server. A server on a GPU hashes in milliseconds, before
it continues. After a failed check full weights are sent, and deltas are no longer used; `rollout.sglang.
on_canary_failure` sets the reaction to a second failure. Requests survive an update, and each token records
its version. If the server dies in an update, the update is complete when its successor, which starts on these
weights, is usable. `weights.sync` owns transport and check.
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
_ATTEMPTS = 3  # attempts with servers that are alive but do not answer
_SENDS = 2  # times that the same weights are sent before the run reacts to a failed check


class Updates:
    """Weight updates of one engine; used from its event loop.

    on_event: called for `canary_failed`, `broadcast_failed`, `speculation_disabled`.
    last: metrics of the last update: seconds, canary failures, and how drafts were verified before it.
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
        self._deltas = True  # False after one has failed
        self._unsure = ""  # id of a server that may not have the weights of its last update

    async def membership(self) -> Member:
        """Return the server as a member of a broadcast; an empty member if it does not answer or cannot join.

        A broadcast includes fingerprints of the sent tensors; a server that pads tensors computes others, so
        it cannot join.
        """
        replica = self._replica
        if replica.is_serving() and not self._sync.pads:
            client, server = replica.client, replica.server_id
            if await client.answers(PROBE, self._sglang.health_timeout) and server == replica.server_id:
                return Member(server=server, group=self._sync.transport.group_of(client))
        return Member(server="", group="")

    async def bring(self, desired: DesiredWeights) -> None:
        """Update the server to `desired`, or replace it with one that starts with these weights.

        Raises ServerError when the server refuses, RuntimeError when the canary fails and the configured
        reaction is to stop.
        """
        replica, unanswered, before = self._replica, 0, self._replica.desired
        started = time.monotonic()

        # If the server must be replaced from now on, its successor starts on the new weights.
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
        """Prepare, pause, send, check. Raises ServerError, and RuntimeError if the canary fails."""
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
                    replica.stale = True  # until all its weights have one version

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
        """Add to `last` how the server verified drafts since the previous update."""
        replica = self._replica
        if replica.drafts and self._sglang.plugin:
            # If the server is lost here, the replica's watch replaces it.
            with contextlib.suppress(ServerError, TimeoutError):
                async with asyncio.timeout(self._sglang.health_timeout):
                    info = await replica.client.read(PROBE)
                self.last |= self._verified.shares(replica.server_id, info)

    async def _continue(self, client: SglangClient) -> None:
        """Continue a server that has weights of one version, unless it must stay paused."""
        async with self._replica.pausing:
            self._replica.stale = False
            if not self._replica.paused:
                await client.post(*CONTINUE)

    async def _held(self) -> Mapping[str, torch.Tensor] | None:
        """Return the server's weights if they are known and available to this worker, else None."""
        loaded = self._replica.loaded
        if self._replica.server_id == self._unsure:
            return None
        possible = self._deltas and self._sync.transport.sends_deltas and not self._sync.pads
        if not possible or loaded.weights is None:
            return None
        with contextlib.suppress(RuntimeError):  # no process has a broadcast's weights any more
            return await loaded.weights()
        return None

    def _takes_part(self, desired: DesiredWeights) -> bool:
        """Return whether the server is a member of an offered broadcast."""
        return desired.offer is not None and self._replica.server_id in desired.offer.members

    async def _weights(self, desired: DesiredWeights) -> Mapping[str, torch.Tensor]:
        # None means the checkpoint of the first start, which is never sent in an update.
        assert desired.weights is not None
        return await desired.weights()

    async def _hashed(self, desired: DesiredWeights) -> Checksums:
        """Return the checksums of a server with the weights `desired`."""
        if desired.checksums is None:
            desired.checksums = await self._sync.checksums(await self._weights(desired))
        return desired.checksums

    async def _send(
        self, client: SglangClient, desired: DesiredWeights, staged: Staged, *, flush: bool
    ) -> None:
        """Send `desired` by its broadcast, which includes the checksums, or to this server only.

        staged: the data that `Transport.staged` prepared.
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
        """SGLang's name for the handling of running requests and their keys and values."""
        if self._sglang.abort_on_update:
            return "abort"
        return {KvOnUpdate.KEEP: "in_place", KvOnUpdate.RECOMPUTE: "retract"}[self._config.kv_on_update]

    async def _react(self, client: SglangClient, report: CanaryReport, version: int) -> None:
        """React to a failed check: stop, or switch speculation off if only the draft has wrong weights."""
        switch_off = self._sglang.on_canary_failure is CanaryReaction.NO_SPECULATION
        if not switch_off or report.target or not self._replica.drafts:
            raise RuntimeError(
                f"the SGLang server does not hold version {version}: {report.summary()}. See "
                f"{self._replica.server.log} and rollout.sglang.on_canary_failure."
            )

        # Speculation is fixed when a server starts, so switching it off needs a new server.
        self._replica.drain()
        await client.post("/pause_generation", {"mode": "abort"})  # the collector continues the aborted turns
        await self._turns.wait_until_idle()
        self._replica.spec = SpecConfig(mode=SpecMode.NONE)
        await self._replica.restart()
        self._on_event("speculation_disabled", version=version, what=report.summary())
