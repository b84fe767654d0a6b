"""The SGLang engine: one server process, driven over HTTP from a thread with an event loop of its own.

    caller (any thread, any loop) --> our loop: turns, updates, canary --> HTTP --> server process

| who              | waits for                           | woken by                                 |
| `generate`       | its answer                          | the server, or `abort` (partial answer)  |
|                  | a server, while one is replaced     | the new one's first check                |
| `update_weights` | pause, pieces, canary, continue     | the server                               |

Owns order and reactions. An update is: pause, send, check, continue; requests live through it, each token
with its version. A check that fails is sent again, then answered as `rollout.sglang.on_canary_failure` says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlpipe.config.rollout import KvOnUpdate, RolloutConfig
from rlpipe.config.sglang import CanaryReaction
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.hf_layout import read_config, read_weights
from rlpipe.rollout.engine import EngineStats
from rlpipe.rollout.sglang import arguments
from rlpipe.rollout.sglang.canary import CanaryReport
from rlpipe.rollout.sglang.client import ServerError, SglangClient
from rlpipe.rollout.sglang.environment import SglangEnvironment, find_environment
from rlpipe.rollout.sglang.server import ServerProcess, pick_port
from rlpipe.rollout.sglang.sync import WeightSync
from rlpipe.rollout.sglang.turns import Turns
from rlpipe.types import GenerateRequest, GenerateResult

T = TypeVar("T")
logger = logging.getLogger(__name__)


def _log_event(kind: str, **fields: Any) -> None:
    logger.warning("%s: %s", kind, fields)


def check_launch(config: RolloutConfig, spec: SpecConfig, model_path: str | Path) -> SglangEnvironment:
    """What can be known to be wrong on this machine before a server is started.

    Returns the interpreter to use. Raises ValueError: a mode SGLang does not have, a model without MTP layer,
    a draft of another vocabulary, a wrong interpreter or version, a taken port.
    """
    on_gpu = torch.cuda.is_available() if config.device == "auto" else config.device.startswith("cuda")
    arguments.check_supported(config, spec, model_path, on_gpu)
    pick_port(config.sglang.host, config.sglang.port)
    return find_environment(config.sglang, on_gpu)


class SglangEngine:
    """Implements `rlpipe.rollout.engine.Engine` with a server of its own.

    model_path: checkpoint directory, served as `version`. log_dir: where the server's output goes.
    on_event: told of faults (kind, fields): `canary_failed`, `speculation_disabled`.

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
        self._config, self._sglang, self._spec, self._on_event = config, config.sglang, spec, on_event
        self._model_path, self._log_dir = Path(model_path), Path(log_dir)
        self._sync = WeightSync(config, self._model_path, on_gpu=on_gpu, folder=self._log_dir)
        self._turns = Turns(config, spec, int(read_config(model_path)["vocab_size"]))
        self._version = version
        self._last_update: dict[str, float] = {}
        self._paused = self._closed = False
        self._server: ServerProcess | None = None
        self._client: SglangClient | None = None
        self._serving = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlpipe-sglang", daemon=True)
        self._thread.start()
        try:
            self._call(self._start(self._model_path, version))
        except BaseException:
            self.close()
            raise

    # ---- public: any thread, any event loop ----

    @property
    def spec(self) -> SpecConfig:
        """How the server decodes now; the canary may have switched speculation off."""
        return self._spec

    @property
    def server(self) -> ServerProcess:
        """The process that serves now."""
        assert self._server is not None
        return self._server

    async def generate(self, request: GenerateRequest, priority: int = 0) -> GenerateResult:
        """Generate one turn; see `Engine.generate`.

        priority: requests of a higher one are scheduled first. Entropies are estimates (`answers.py`).
        Raises ValueError for an impossible request, ServerError when the server fails.
        """
        self._require_open()
        self._turns.check(request)

        async def last() -> GenerateResult:
            await self._serving.wait()
            return [part async for part in self._turns.play(self._http, request, priority=priority)][-1]

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(last(), self._loop))

    async def stream(self, request: GenerateRequest, priority: int = 0) -> AsyncIterator[GenerateResult]:
        """What there is of one turn, growing, with finish_reason ABORT; the whole turn last.

        Leaving early ends the request. Raises as `generate`.
        """
        self._require_open()
        self._turns.check(request)
        here, parts = asyncio.get_running_loop(), asyncio.Queue()  # of results, then an exception or None

        async def read() -> None:
            failure: BaseException | None = None
            try:
                await self._serving.wait()
                async for part in self._turns.play(self._http, request, priority=priority, stream=True):
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
        self._call(self._pause("in_place"))

    def resume(self) -> None:
        """Continue decoding."""
        self._call(self._continue())

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replace target and draft weights and prove it; returns when they serve as `version`.

        Raises ValueError naming missing, unknown or misshapen weights (the old ones stay), ServerError when
        the server refuses, RuntimeError when the canary fails and the reaction is to stop.
        """
        self._require_open()
        self._sync.require_fitting(weights, draft=self._drafts)
        self._call(self._update(weights, version))

    def check_weights(self, weights: Mapping[str, torch.Tensor]) -> CanaryReport:
        """Compare what the server holds, target and draft, with `weights`."""
        return self._call(self._sync.check(self._http, weights, draft=self._drafts))

    def stats(self) -> EngineStats:
        """Counters since start; `sync` holds seconds and canary failures of the last update."""
        return replace(self._turns.stats(), policy_version=self._version, sync=dict(self._last_update))

    def close(self) -> None:
        """End pending requests with ABORT and stop the server with all it started."""
        if self._closed:
            return
        if self._serving.is_set() and self.server.is_running():
            with contextlib.suppress(ServerError):  # it may die meanwhile: it is stopped in any case
                self._call(self._turns.abort(self._http, None))
                self._call(self._turns.wait_until_idle())
        self._closed = True
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # ---- on our loop: the server ----

    async def _start(self, model_path: Path, version: int) -> None:
        """Start a server on `model_path` and check that it is what was asked for."""
        config, sglang, on_gpu = self._config, self._sglang, self._environment.on_gpu
        port = pick_port(sglang.host, sglang.port)
        words = arguments.command(config, self._spec, model_path, port=port, on_gpu=on_gpu, version=version)
        self._server = server = ServerProcess(
            [str(self._environment.python), *words],
            arguments.server_environment(config, on_gpu),
            self._log_dir / f"sglang-{port}.log",
        )
        self._client = client = SglangClient(f"http://{sglang.host}:{port}", sglang.request_timeout)
        await server.wait_until(lambda: client.answers("/ready"), sglang.start_timeout)
        arguments.check_server_info(await client.read("/server_info"), config, self._spec)
        report = await self._sync.check(client, read_weights(model_path), draft=self._drafts)
        if not report.passed:
            raise RuntimeError(
                f"the SGLang server does not hold the weights of {str(model_path)!r}: {report.summary()}. "
                "rlpipe knows the layout of MiMo, Qwen2 and Llama models with full-precision weights."
            )
        self._paused = False
        self._serving.set()

    async def _stop(self) -> None:
        self._serving.clear()
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)
        if self._client is not None:
            await self._client.close()

    @property
    def _drafts(self) -> bool:
        return self._spec.mode is not SpecMode.NONE

    @property
    def _http(self) -> SglangClient:
        assert self._client is not None
        return self._client

    async def _pause(self, mode: str) -> None:
        await self._http.post("/pause_generation", {"mode": mode})
        self._paused = True

    async def _continue(self) -> None:
        await self._http.post("/continue_generation", {"torch_empty_cache": False})
        self._paused = False

    # ---- on our loop: weights ----

    async def _update(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        started, was_paused, mode = time.monotonic(), self._paused, self._pause_mode
        await self._pause(mode)
        for attempt in range(self._sglang.canary_retries + 1):
            await self._sync.send(self._http, weights, version, flush=mode != "in_place")
            sent = time.monotonic()
            report = await self._sync.check(self._http, weights, draft=self._drafts)
            if report.passed:
                break
            self._on_event("canary_failed", version=version, attempt=attempt, what=report.summary())
            if self._sglang.on_canary_failure is CanaryReaction.STOP:
                break
        self._last_update = {
            "weights/sync_seconds": sent - started,
            "weights/canary_seconds": time.monotonic() - sent,
            "weights/canary_failures": attempt + (not report.passed),
        }
        if not report.passed:
            await self._react(report, weights, version)
        self._version = version
        if not was_paused:
            await self._continue()

    @property
    def _pause_mode(self) -> str:
        """SGLang's: what becomes of running requests and their keys and values."""
        if self._sglang.abort_on_update:
            return "abort"
        return {KvOnUpdate.KEEP: "in_place", KvOnUpdate.RECOMPUTE: "retract"}[self._config.kv_on_update]

    async def _react(self, report: CanaryReport, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Weights that do not arrive: without speculation a stale draft does no harm, else stop."""
        switch_off = self._sglang.on_canary_failure is CanaryReaction.NO_SPECULATION
        if not switch_off or report.target or not self._drafts:
            raise RuntimeError(
                f"the SGLang server does not hold version {version}: {report.summary()}. See "
                f"{self.server.log} and rollout.sglang.on_canary_failure."
            )
        await self._pause("abort")  # what runs ends with what it has; its collector continues it
        await self._turns.wait_until_idle()
        await self._stop()
        self._spec = SpecConfig(mode=SpecMode.NONE)
        with self._sync.checkpoint(weights) as folder:
            await self._start(folder, version)
        self._on_event("speculation_disabled", version=version, what=report.summary())

    # ---- helpers ----

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("The engine is closed.")

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _log_failure(future: Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.warning("aborting requests failed: %r", error)
