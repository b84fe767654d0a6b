"""The SGLang engine: one server process, controlled over HTTP from a thread with a separate event loop.

    caller (any thread, any loop) --> our loop: turns, updates, canary --> HTTP --> server process

| who              | waits for                           | woken by                                 |
| `generate`       | its answer                          | the server, or `abort` (partial answer)  |
|                  | a server, while one is replaced     | the new one's first check, or `abort`    |
| `update_weights` | pause, buckets, canary, continue    | the server                               |

Owns the thread, and continues turns across servers: a server that dies or hangs is replaced (`replica.py`),
and the next server generates its turns. `updates.py` handles new weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config
from rlpipe.rollout.engine import EngineStats
from rlpipe.rollout.sglang import arguments
from rlpipe.rollout.sglang.client import SglangClient
from rlpipe.rollout.sglang.environment import SglangEnvironment, find_environment, is_on_gpu
from rlpipe.rollout.sglang.replica import PAUSE, DesiredWeights, Replica
from rlpipe.rollout.sglang.server import ServerProcess, pick_port
from rlpipe.rollout.sglang.turns import Turns
from rlpipe.rollout.sglang.updates import CONTINUE, Updates
from rlpipe.rollout.turn import empty_result
from rlpipe.types import FinishReason, GenerateRequest, GenerateResult
from rlpipe.weights.canary import CanaryReport
from rlpipe.weights.offer import Member, Offer
from rlpipe.weights.protocols import ServerError, ServerUnreachable
from rlpipe.weights.sync import WeightSync

T = TypeVar("T")
logger = logging.getLogger(__name__)
_ATTEMPTS = 3  # attempts at one turn while servers are alive but do not answer it


def _log_event(kind: str, **fields: object) -> None:
    logger.warning("%s: %s", kind, fields)


def check_launch(config: RolloutConfig, spec: SpecConfig, model_path: str | Path) -> SglangEnvironment:
    """Check before the start of a server everything that can be checked on this machine.

    Returns the interpreter to use. Raises ValueError for a mode that SGLang does not have, a model without an
    MTP layer, a draft with another vocabulary, a wrong interpreter or version, or a port in use.
    """
    on_gpu = is_on_gpu(config)
    arguments.check_supported(config, spec, model_path, on_gpu=on_gpu)
    pick_port(config.sglang.host, config.sglang.port)
    return find_environment(config.sglang, on_gpu=on_gpu)


class SglangEngine:
    """Implements `rlpipe.rollout.engine.Engine` with one server process.

    model_path: checkpoint directory, served as `version`. log_dir: directory for the server's output.
    on_event: called for each event with (kind, fields). Kinds: `canary_failed`, `speculation_disabled`,
    `server_died`, `server_hung`, `server_restarted`, `broadcast_failed`.

    Raises ValueError for errors found before the start (interpreter, versions, port, model, mode), and
    RuntimeError when the server does not start or does not run as configured.
    """

    def __init__(
        self,
        config: RolloutConfig,
        spec: SpecConfig,
        model_path: str | Path,
        *,
        log_dir: str | Path,
        version: int = 0,
        on_event: Callable[..., None] = _log_event,
    ) -> None:
        # Fields may have been assigned since the settings were made: check and convert them again.
        config, spec = replace(config), replace(spec)
        self._environment = check_launch(config, spec, model_path)
        on_gpu = self._environment.on_gpu
        self._config, self._sglang, self._on_event = config, config.sglang, on_event
        self._sync = WeightSync(config, spec, Path(model_path), on_gpu=on_gpu, folder=Path(log_dir))
        model = read_config(model_path)
        routed = read_architecture(model) if config.replay_routes else None
        self._turns = Turns(config, spec, vocab=int(model["vocab_size"]), arch=routed)
        self._closed = False

        self._replica = Replica(
            config,
            spec,
            Path(model_path),
            environment=self._environment,
            sync=self._sync,
            log_dir=Path(log_dir),
            version=version,
            on_event=on_event,
        )
        self._updates = Updates(config, self._replica, sync=self._sync, turns=self._turns, on_event=on_event)

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlpipe-sglang", daemon=True)
        self._thread.start()
        try:
            self._call(self._replica.start())
        except BaseException:
            self.close()
            raise

        # Answers create many lists: exclude all present objects from the garbage collections that follow.
        gc.collect()
        gc.freeze()

    # ---- public: any thread, any event loop ----

    @property
    def spec(self) -> SpecConfig:
        """Current settings of decoding; a failed canary may have switched speculation off."""
        return self._replica.spec

    @property
    def server(self) -> ServerProcess:
        """The current server process."""
        return self._replica.server

    async def generate(self, request: GenerateRequest, priority: int = 0) -> GenerateResult:
        """Generate one turn; see `Engine.generate`.

        priority: requests with a higher priority are scheduled first. If the server is lost, the turn is
        sampled again on the next one.

        Raises ValueError for an impossible request, ServerError when the server refuses it, RuntimeError
        when servers fail more than `rollout.sglang.max_restarts` times.
        """
        self._require_open()
        self._turns.check(request)

        async def last() -> GenerateResult:
            return [part async for part in self._run_turn(request, priority, stream=False)][-1]

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(last(), self._loop))

    async def stream(self, request: GenerateRequest, priority: int = 0) -> AsyncIterator[GenerateResult]:
        """Yield one turn as it grows (with finish_reason ABORT), and finally the complete turn.

        Closing the iterator ends the request. If the server is lost, the turn continues from its last part.
        Raises the errors of `generate`.
        """
        self._require_open()
        self._turns.check(request)
        caller_loop = asyncio.get_running_loop()
        parts: asyncio.Queue[GenerateResult | Exception | None] = asyncio.Queue()  # None or an error ends it

        # The turn grows on the engine's loop and is read on the caller's, so a queue joins the two.
        async def read() -> None:
            failure: Exception | None = None
            try:
                async for part in self._run_turn(request, priority, stream=True):
                    caller_loop.call_soon_threadsafe(parts.put_nowait, part)
            except Exception as error:
                failure = error
            caller_loop.call_soon_threadsafe(parts.put_nowait, failure)

        reading = asyncio.run_coroutine_threadsafe(read(), self._loop)
        try:
            while isinstance(part := await parts.get(), GenerateResult):
                yield part
            if part is not None:
                raise part
        finally:
            reading.cancel()

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests; their `generate` calls return the tokens so far. Returns at once."""
        if not self._closed:
            aborting = self._turns.abort(self._http, request_ids)
            asyncio.run_coroutine_threadsafe(aborting, self._loop).add_done_callback(_log_failure)

    def end_session(self, session_id: str) -> None:
        """Do nothing, as the server evicts cached prefixes by itself."""

    def pause(self) -> None:
        """Stop decoding; requests remain on the server."""
        self._call(self._set_paused(paused=True))

    def resume(self) -> None:
        """Continue decoding."""
        self._call(self._set_paused(paused=False))

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replace target and draft weights and verify the update; returns when they are served as `version`.

        The tensors are referenced until the next update, in case the server must be replaced: do not modify
        them.

        Raises ValueError that names missing, unknown or misshapen weights (the old weights stay in use),
        ServerError when the server refuses, RuntimeError when the canary fails and the configured reaction is
        to stop.
        """
        self._require_open()
        self._sync.require_fitting(weights, draft=self._replica.drafts)

        async def in_memory() -> Mapping[str, torch.Tensor]:
            return weights

        self._call(self._updates.bring(DesiredWeights(weights=in_memory, version=version)))

    def receive_weights(self, offer: Offer) -> None:
        """Replace weights by those that the trainer broadcasts to all servers; see `update_weights`.

        A server that is not in the group, or for which the broadcast fails (event `broadcast_failed`),
        receives the same weights separately. Raises the errors of `update_weights`.
        """
        self._require_open()
        weights = {name: tensor for bucket in offer.buckets for name, tensor in bucket}
        self._sync.require_fitting(weights, draft=self._replica.drafts)
        desired = DesiredWeights(weights=offer.weights, version=offer.version, offer=offer)
        self._call(self._updates.bring(desired))

    def membership(self) -> Member:
        """Return the server and its group if it answers now; a broadcast waits only for such servers."""
        self._require_open()
        return self._call(self._updates.membership())

    def check_weights(self, weights: Mapping[str, torch.Tensor]) -> CanaryReport:
        """Compare the server's weights, target and draft, with `weights`."""

        async def compared() -> CanaryReport:
            expecting = self._sync.checksums(weights)
            return await self._sync.check(self._http, expecting, draft=self._replica.drafts)

        return self._call(compared())

    def restart(self, grace: float = 60.0) -> None:
        """Drain the server and replace it with one that has the newest weights.

        New requests wait for the new server; running ones have `grace` seconds, then end with the tokens so
        far.
        """
        self._require_open()
        self._call(self._restart(grace))

    def stats(self) -> EngineStats:
        """Return counters since start; `sync` has seconds and canary failures of the last update."""
        stats, restarts = self._turns.stats(), self._replica.restarts
        server = {
            "rollout/server/{k}/running": stats.running,
            "rollout/server/{k}/waiting": stats.waiting,
            "rollout/server/{k}/restarts": restarts,
        }
        version = self._replica.loaded.version
        return replace(stats, policy_version=version, sync=dict(self._updates.last), server=server)

    def close(self) -> None:
        """End pending requests with ABORT, and stop the server and its child processes."""
        if self._closed:
            return
        self._closed = True
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- on the loop of the engine: turns ----

    async def _run_turn(
        self, request: GenerateRequest, priority: int, *, stream: bool
    ) -> AsyncIterator[GenerateResult]:
        """Yield the turn like `Turns.run`, also if servers are replaced meanwhile."""
        done: GenerateResult | None = None
        client: SglangClient | None = None
        error: ServerUnreachable | None = None
        for attempt in itertools.count():
            if self._closed:
                break

            # Wait only while no server is usable, or after one has failed.
            if self._replica.is_serving() and error is None:
                client = self._replica.client
            else:
                client = await self._turns.admitted(request, self._next_server(client, error, attempt))
            if client is None:
                break

            try:
                parts = self._turns.run(client, request, priority=priority, stream=stream, done=done)
                async for done in parts:
                    yield done
                return
            except ServerUnreachable as failure:
                if self._turns.take_aborted(request.request_id):
                    break
                error = failure
        yield done or empty_result(request, FinishReason.ABORT)

    async def _next_server(
        self, client: SglangClient | None, error: ServerUnreachable | None, attempt: int
    ) -> SglangClient:
        """Return the next server for a turn that failed `attempt` times, last with `error` at `client`."""
        if (
            client is not None
            and error is not None
            and not await self._replica.recover(client, error)
            and attempt >= _ATTEMPTS
        ):
            raise error
        return await self._replica.serving()

    async def _set_paused(self, *, paused: bool) -> None:
        """Pause or continue the server; a server that replaces it starts in the same state."""
        self._replica.paused = paused
        client = await self._replica.serving()
        try:
            async with self._replica.pausing:
                # A running update continues the server at its end.
                if paused or not self._replica.stale:
                    await client.post(*(PAUSE if paused else CONTINUE), self._sglang.health_timeout)
        except ServerUnreachable as error:  # the next server starts in the requested state
            if not await self._replica.recover(client, error):
                raise

    async def _restart(self, grace: float) -> None:
        """Drain the server, and replace it. grace: seconds for running turns."""
        client = await self._replica.serving()
        self._replica.drain()
        await self._turns.wait_until_idle(grace)

        # End requests that are still running after the grace period; waiting ones go to the next server.
        with contextlib.suppress(ServerError, TimeoutError):  # the server is replaced in any case
            async with asyncio.timeout(self._sglang.health_timeout):
                await self._turns.abort_running(client)
                await self._turns.wait_until_idle()

        seconds = round(await self._replica.restart(), 1)
        replica = self._replica
        version, restarts = replica.loaded.version, replica.restarts
        self._on_event("server_restarted", version=version, restarts=restarts, seconds=seconds)

    async def _end(self) -> None:
        """End all turns, then the server."""
        self._turns.abort_waiting(None)
        if self._replica.is_serving():
            # The server may die meanwhile; it is stopped in any case.
            with contextlib.suppress(ServerError):
                await self._turns.abort(self._http, None)
                await self._turns.wait_until_idle()
        await self._replica.stop()
        self._sync.close()

    @property
    def _http(self) -> SglangClient:
        return self._replica.client

    # ---- helpers ----

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("The engine is closed.")

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _log_failure(future: Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.warning("aborting requests failed: %r", error)
