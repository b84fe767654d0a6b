"""The SGLang engine: one server process, driven over HTTP from a thread with an event loop of its own.

    caller (any thread, any loop) --> our loop: turns, updates, canary --> HTTP --> server process

| who              | waits for                           | woken by                                 |
| `generate`       | its answer                          | the server, or `abort` (partial answer)  |
|                  | a server, while one is replaced     | the new one's first check, or `abort`    |
| `update_weights` | pause, buckets, canary, continue    | the server                               |

Owns the thread, and turns across servers: one that dies or hangs is replaced (`replica.py`), and turns it had
are asked of the next one. New weights are `updates.py`'s.
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
from rlpipe.rollout.sglang.replica import PAUSE, Goal, Replica
from rlpipe.rollout.sglang.server import ServerProcess, pick_port
from rlpipe.rollout.sglang.turns import Turns
from rlpipe.rollout.sglang.updates import CONTINUE, Updates
from rlpipe.rollout.turn import nothing
from rlpipe.types import FinishReason, GenerateRequest, GenerateResult
from rlpipe.weights.canary import CanaryReport
from rlpipe.weights.offer import Member, Offer
from rlpipe.weights.protocols import ServerError, ServerUnreachable
from rlpipe.weights.sync import WeightSync

T = TypeVar("T")
logger = logging.getLogger(__name__)
_ATTEMPTS = 3  # of one turn with servers that live and yet do not answer it


def _log_event(kind: str, **fields: Any) -> None:
    logger.warning("%s: %s", kind, fields)


def check_launch(config: RolloutConfig, spec: SpecConfig, model_path: str | Path) -> SglangEnvironment:
    """What can be known to be wrong on this machine before a server is started.

    Returns the interpreter to use. Raises ValueError: a mode SGLang does not have, a model without MTP layer,
    a draft of another vocabulary, a wrong interpreter or version, a taken port.
    """
    on_gpu = is_on_gpu(config)
    arguments.check_supported(config, spec, model_path, on_gpu)
    pick_port(config.sglang.host, config.sglang.port)
    return find_environment(config.sglang, on_gpu)


class SglangEngine:
    """Implements `rlpipe.rollout.engine.Engine` with a server of its own.

    model_path: checkpoint directory, served as `version`. log_dir: where the server's output goes.
    on_event: told of faults (kind, fields): `canary_failed`, `speculation_disabled`, `server_died`,
        `server_hung`, `server_restarted`, `broadcast_failed`.

    Raises ValueError for what can be known to be wrong (interpreter, versions, port, model, mode), and
    RuntimeError when the server does not come up, or not as it was told.
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
        self._environment = check_launch(config, spec, model_path)
        on_gpu = self._environment.on_gpu
        self._config, self._sglang, self._on_event = config, config.sglang, on_event
        self._sync = WeightSync(config, spec, Path(model_path), on_gpu=on_gpu, folder=Path(log_dir))
        model = read_config(model_path)
        routed = read_architecture(model) if config.replay_routes else None
        self._turns = Turns(config, spec, int(model["vocab_size"]), routed)
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
        self._updates = Updates(config, self._replica, self._sync, self._turns, on_event)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlpipe-sglang", daemon=True)
        self._thread.start()
        try:
            self._call(self._replica.start())
        except BaseException:
            self.close()
            raise
        gc.collect()
        gc.freeze()  # answers make many lists: collections they cause need not walk through all modules

    # ---- public: any thread, any event loop ----

    @property
    def spec(self) -> SpecConfig:
        """How the server decodes now; the canary may have switched speculation off."""
        return self._replica.spec

    @property
    def server(self) -> ServerProcess:
        """The process that serves now."""
        return self._replica.server

    async def generate(self, request: GenerateRequest, priority: int = 0) -> GenerateResult:
        """Generate one turn; see `Engine.generate`.

        priority: requests of a higher one are scheduled first.
        A turn lost with its server is sampled anew on the next one.

        Raises ValueError for an impossible request, ServerError when the server refuses it, RuntimeError
        when servers fail more than `rollout.sglang.max_restarts` times.
        """
        self._require_open()
        self._turns.check(request)

        async def last() -> GenerateResult:
            return [part async for part in self._play(request, priority, stream=False)][-1]

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(last(), self._loop))

    async def stream(self, request: GenerateRequest, priority: int = 0) -> AsyncIterator[GenerateResult]:
        """What there is of one turn, growing, with finish_reason ABORT; the whole turn last.

        Leaving early ends the request; a turn whose server is lost goes on from its last part. Raises as
        `generate`.
        """
        self._require_open()
        self._turns.check(request)
        here, parts = asyncio.get_running_loop(), asyncio.Queue()  # of results, then an exception or None

        async def read() -> None:
            failure: BaseException | None = None
            try:
                async for part in self._play(request, priority, stream=True):
                    here.call_soon_threadsafe(parts.put_nowait, part)
            except Exception as error:
                failure = error
            here.call_soon_threadsafe(parts.put_nowait, failure)

        reading = asyncio.run_coroutine_threadsafe(read(), self._loop)
        try:
            while isinstance(part := await parts.get(), GenerateResult):
                yield part
            if part is not None:
                raise part
        finally:
            reading.cancel()

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests; their `generate` returns what exists. Does not wait."""
        if not self._closed:
            aborting = self._turns.abort(self._http, request_ids)
            asyncio.run_coroutine_threadsafe(aborting, self._loop).add_done_callback(_log_failure)

    def end_session(self, session_id: str) -> None:
        """Nothing to free: the server evicts cached prefixes by itself."""

    def pause(self) -> None:
        """Stop decoding; requests keep their place."""
        self._call(self._pause(True))

    def resume(self) -> None:
        """Continue decoding."""
        self._call(self._pause(False))

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replace target and draft weights and prove it; returns when they serve as `version`.

        They are kept until the next update, for a server that has to be replaced: leave them as they are.

        Raises ValueError naming missing, unknown or misshapen weights (the old ones stay), ServerError when
        the server refuses, RuntimeError when the canary fails and the reaction is to stop.
        """
        self._require_open()
        self._sync.require_fitting(weights, draft=self._replica.drafts)

        async def held() -> Mapping[str, torch.Tensor]:
            return weights

        self._call(self._updates.bring(Goal(weights=held, version=version)))

    def receive_weights(self, offer: Offer) -> None:
        """`update_weights` from what the trainer broadcasts to all servers at once.

        A server that is not in the group, or whose group breaks off (event `broadcast_failed`), is given the
        same weights alone. Raises as `update_weights`.
        """
        self._require_open()
        weights = {name: tensor for bucket in offer.buckets for name, tensor in bucket}
        self._sync.require_fitting(weights, draft=self._replica.drafts)
        self._call(self._updates.bring(Goal(weights=offer.weights, version=offer.version, offer=offer)))

    def membership(self) -> Member:
        """The server, if it answers now, and the group it is in; no other is waited for by a broadcast."""
        self._require_open()
        return self._call(self._updates.membership())

    def check_weights(self, weights: Mapping[str, torch.Tensor]) -> CanaryReport:
        """Compare what the server holds, target and draft, with `weights`."""

        async def compared() -> CanaryReport:
            expecting = self._sync.checksums(weights)
            return await self._sync.check(self._http, expecting, draft=self._replica.drafts)

        return self._call(compared())

    def restart(self, grace: float = 60.0) -> None:
        """Drain the server and replace it by one that holds the newest weights.

        New requests wait for it; those that run have `grace` seconds, then end with what they have.
        """
        self._require_open()
        self._call(self._restart(grace))

    def stats(self) -> EngineStats:
        """Counters since start; `sync` holds seconds and canary failures of the last update."""
        stats, restarts = self._turns.stats(), self._replica.restarts
        server = {
            "rollout/server/{k}/running": stats.running,
            "rollout/server/{k}/waiting": stats.waiting,
            "rollout/server/{k}/restarts": restarts,
        }
        version = self._replica.loaded.version
        return replace(stats, policy_version=version, sync=dict(self._updates.last), server=server)

    def close(self) -> None:
        """End pending requests with ABORT and stop the server with all it started."""
        if self._closed:
            return
        self._closed = True
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- on our loop: turns ----

    async def _play(
        self, request: GenerateRequest, priority: int, *, stream: bool
    ) -> AsyncIterator[GenerateResult]:
        """The turn as `Turns.play` gives it, across servers that are replaced."""
        done: GenerateResult | None = None
        client: SglangClient | None = None
        error: ServerUnreachable | None = None
        for attempt in itertools.count():
            if self._closed:
                break
            if self._replica.is_serving() and error is None:
                client = self._replica.client
            else:
                client = await self._turns.admitted(request, self._next_server(client, error, attempt))
            if client is None:
                break
            try:
                playing = self._turns.play(client, request, priority=priority, stream=stream, done=done)
                async for done in playing:
                    yield done
                return
            except ServerUnreachable as failure:
                if self._turns.ends(request.request_id):
                    break
                error = failure
        yield done or nothing(request, FinishReason.ABORT)

    async def _next_server(
        self, client: SglangClient | None, error: ServerUnreachable | None, attempt: int
    ) -> SglangClient:
        """The server to play on after `attempt` failures, the last of them `error` of `client`."""
        if error is not None and not await self._replica.recover(client, error) and attempt >= _ATTEMPTS:
            raise error
        return await self._replica.serving()

    async def _pause(self, paused: bool) -> None:
        self._replica.paused = paused
        client = await self._replica.serving()
        try:
            async with self._replica.pausing:
                if paused or not self._replica.stale:  # else the update that makes it whole lets it go on
                    await client.post(*(PAUSE if paused else CONTINUE), self._sglang.health_timeout)
        except ServerUnreachable as error:  # the next server starts paused, or not
            if not await self._replica.recover(client, error):
                raise

    async def _restart(self, grace: float) -> None:
        client = await self._replica.serving()
        self._replica.drain()
        await self._turns.wait_until_idle(grace)
        with contextlib.suppress(ServerError, TimeoutError):  # it is replaced in any case
            async with asyncio.timeout(self._sglang.health_timeout):
                await self._turns.abort_running(client)
                await self._turns.wait_until_idle()
        seconds = round(await self._replica.restart(), 1)
        replica = self._replica
        version, restarts = replica.loaded.version, replica.restarts
        self._on_event("server_restarted", version=version, restarts=restarts, seconds=seconds)

    async def _end(self) -> None:
        self._turns.abort_waiting(None)
        if self._replica.is_serving():
            with contextlib.suppress(ServerError):  # it may die meanwhile: it is stopped in any case
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
