"""New weights into the server of a replica: pause, send, check, continue; they are hashed meanwhile.

Requests live through an update, each token with its version. A check that fails is sent again, then answered
as `rollout.sglang.on_canary_failure` says. An update that a server dies of is complete when the next one,
started on those weights, serves. How weights travel and are checked is `weights.sync`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from rlpipe.config.rollout import KvOnUpdate, RolloutConfig
from rlpipe.config.sglang import CanaryReaction
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.rollout.sglang.client import SglangClient
from rlpipe.rollout.sglang.replica import PROBE, Goal, Replica
from rlpipe.rollout.sglang.turns import Turns
from rlpipe.weights.canary import CanaryReport
from rlpipe.weights.offer import Checksums, Member
from rlpipe.weights.protocols import ServerError, ServerUnreachable
from rlpipe.weights.sync import WeightSync
from rlpipe.weights.transports.base import WeightUpdate

CONTINUE = "/continue_generation", {"torch_empty_cache": False}
_ATTEMPTS = 3  # with servers that live and yet do not answer


class Updates:
    """Used from the engine's event loop. last: seconds and canary failures of the last update.

    on_event: told of `canary_failed`, `broadcast_failed`, `speculation_disabled`.
    """

    def __init__(
        self,
        config: RolloutConfig,
        replica: Replica,
        sync: WeightSync,
        turns: Turns,
        on_event: Callable[..., None],
    ) -> None:
        self._config, self._sglang, self._on_event = config, config.sglang, on_event
        self._replica, self._sync, self._turns = replica, sync, turns
        self.last: dict[str, float] = {}

    async def membership(self) -> Member:
        """Our server as a member of a broadcast: nobody, unless it answers now and keeps what is sent.

        A broadcast brings fingerprints of what was sent, which a server that pads does not have.
        """
        replica = self._replica
        if replica.is_serving() and not self._sync.pads:
            client, server = replica.client, replica.server_id
            if await client.answers(PROBE, self._sglang.health_timeout) and server == replica.server_id:
                return Member(server=server, group=self._sync.transport.group_of(client))
        return Member(server="", group="")

    async def bring(self, goal: Goal) -> None:
        """Have the server hold `goal`, or replaced by one that was started on it.

        Raises ServerError when the server refuses, RuntimeError when the canary fails and the reaction is to
        stop.
        """
        replica, unanswered, before = self._replica, 0, self._replica.goal
        started = time.monotonic()
        replica.goal = goal
        try:
            while True:
                client = await replica.serving()
                try:
                    if replica.loaded is not goal:
                        await self._transfer(client, goal)
                    else:  # a server was replaced while it was told
                        self.last = {"weights/sync_seconds": time.monotonic() - started}
                        self.last |= {"weights/canary_seconds": 0.0, "weights/canary_failures": 0}
                    if not replica.paused:
                        await replica.client.post(*CONTINUE)
                    return
                except ServerUnreachable as error:
                    unanswered += not await replica.recover(client, error)
                    if unanswered == _ATTEMPTS:
                        raise
        except BaseException:
            replica.goal = before
            raise

    async def _transfer(self, client: SglangClient, goal: Goal) -> None:
        """Pause, send, check. Raises ServerError, and RuntimeError for a canary that fails.

        A server on a CPU takes as long to hash as we do, so both do it at once; one on a GPU is not made to
        wait for us.
        """
        version, replica = goal.version, self._replica
        with contextlib.ExitStack() as stack:
            staged = hashing = None
            if not self._takes_part(goal):
                hashing = asyncio.ensure_future(self._hashed(goal))
                stack.callback(hashing.cancel)
                if self._sync.on_gpu:
                    await asyncio.wait([hashing])
                weights = await goal.weights()
                staged = await asyncio.to_thread(stack.enter_context, self._sync.transport.staged(weights))
            started, mode = time.monotonic(), self._pause_mode
            async with replica.pausing:
                await client.post("/pause_generation", {"mode": mode}, self._sglang.update_timeout)
                replica.stale = True  # until its fingerprints agree
            for attempt in range(self._sglang.canary_retries + 1):
                with replica.loading():
                    await self._send(client, goal, staged, flush=mode != "in_place")
                    sent = time.monotonic()
                    expecting = hashing or self._hashed(goal)
                    report = await self._sync.check(client, expecting, draft=replica.drafts)
                if report.passed:
                    break
                self._on_event("canary_failed", version=version, attempt=attempt, what=report.summary())
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
        replica.arrived(goal)

    def _takes_part(self, goal: Goal) -> bool:
        """Whether our server is in the group of a broadcast that has not passed."""
        return goal.offer is not None and self._replica.server_id in goal.offer.members

    async def _hashed(self, goal: Goal) -> Checksums:
        """What a server that holds `goal` shows."""
        if goal.checksums is None:
            goal.checksums = await self._sync.checksums(await goal.weights())
        return goal.checksums

    async def _send(self, client: SglangClient, goal: Goal, staged: Path | None, *, flush: bool) -> None:
        """Get `goal` into the server, by the broadcast it is part of, which brings its checksums, or alone.

        staged: the checkpoint that `Transport.staged` wrote, if it did.
        """
        takes_part, offer, goal.offer = self._takes_part(goal), goal.offer, None
        if takes_part:
            member = self._replica.server_id
            try:
                goal.checksums = (await self._sync.receive(client, offer, member, flush=flush)).checksums
                return
            except ServerUnreachable:
                raise
            except ServerError as error:
                self._on_event("broadcast_failed", version=goal.version, error=str(error)[:300])
        weights = await goal.weights()
        update = WeightUpdate(weights=weights, version=goal.version, flush=flush, checkpoint=staged)
        await self._sync.send(client, update)

    @property
    def _pause_mode(self) -> str:
        """SGLang's: what becomes of running requests and their keys and values."""
        if self._sglang.abort_on_update:
            return "abort"
        return {KvOnUpdate.KEEP: "in_place", KvOnUpdate.RECOMPUTE: "retract"}[self._config.kv_on_update]

    async def _react(self, client: SglangClient, report: CanaryReport, version: int) -> None:
        """Weights that do not arrive: without speculation a stale draft does no harm, else stop."""
        switch_off = self._sglang.on_canary_failure is CanaryReaction.NO_SPECULATION
        if not switch_off or report.target or not self._replica.drafts:
            raise RuntimeError(
                f"the SGLang server does not hold version {version}: {report.summary()}. See "
                f"{self._replica.server.log} and rollout.sglang.on_canary_failure."
            )
        self._replica.drain()
        await client.post("/pause_generation", {"mode": "abort"})  # its collector continues what it ends
        await self._turns.wait_until_idle()
        self._replica.spec = SpecConfig(mode=SpecMode.NONE)
        await self._replica.restart()
        self._on_event("speculation_disabled", version=version, what=report.summary())
