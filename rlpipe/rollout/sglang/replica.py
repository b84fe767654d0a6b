"""Keeps one server alive: starts it, watches it, and replaces it with one that has the newest weights.

    watch    --not running, or silent for health_timeout--+
    a caller --ServerUnreachable--------------------------+--> recover: close the gate, kill what is left,
                                                               start on the newest weights, canary, open

| who       | waits for                     | woken by                                  |
| `serving` | the gate                      | a server that passed its canary, or a final failure |
| `recover` | the lock, then the new server | the first caller, which replaces the server for all |

Owns the process, its failures and the choice of its weights. Invariant: while the gate is open, the server
has the weights `desired`, or an update to them is running. The caller (`engine.py`) repeats the requests of a
dead server, as they were not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rlpipe.config.draft_vocab import table_path
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.models.checkpoint import read_weights
from rlpipe.rollout.sglang import arguments
from rlpipe.rollout.sglang.client import SglangClient
from rlpipe.rollout.sglang.environment import SglangEnvironment
from rlpipe.rollout.sglang.server import ServerProcess, pick_port
from rlpipe.rollout.sglang.target import served_target
from rlpipe.weights.offer import Checksums, Offer
from rlpipe.weights.sync import WeightSync

_POLL_SECONDS = 0.5  # between two checks of the process
_HEALTH_SECONDS = 10.0  # maximum between two health requests
_END_SECONDS = 1.0  # the end of a process is visible only a moment after its connections break
PAUSE = "/pause_generation", {"mode": "in_place"}
PROBE = "/server_info"  # the scheduler answers it even when paused


@dataclass(slots=True, kw_only=True, eq=False)
class DesiredWeights:
    """Weights that the server must have, with their version. weights: None for the model's checkpoint.

    If no process has the weights any more, `weights` raises RuntimeError, and a server starts on the model's
    checkpoint, with the checkpoint's version. checksums: checksums of a server with these weights, computed
    once. offer: a broadcast of these weights, used once.
    """

    weights: Callable[[], Awaitable[Mapping[str, torch.Tensor]]] | None
    version: int
    checksums: Checksums | None = None
    offer: Offer | None = None


class Replica:
    """Keeps one server with the desired weights alive. Used from one event loop.

    on_event: called for `server_died`, `server_hung`, `server_restarted`, `weights_lost`.

    spec: how the server decodes; set it before `restart` to change it. paused: whether a new server starts
    paused. stale: whether the server is paused and may have weights of two versions, until an update arrives.
    pausing: lock for pausing and continuing. restarts: count since the beginning. server_id: a different id
    for each server.
    """

    def __init__(
        self,
        config: RolloutConfig,
        spec: SpecConfig,
        model_path: Path,
        *,
        environment: SglangEnvironment,
        sync: WeightSync,
        log_dir: Path,
        version: int,
        on_event: Callable[..., None],
    ) -> None:
        self.spec, self.paused, self.stale, self.restarts = spec, False, False, 0
        self.server_id = ""
        self.desired = self.loaded = self._initial = DesiredWeights(weights=None, version=version)
        self._config, self._model_path, self._environment = config, model_path, environment
        self._sync, self._log_dir, self._on_event = sync, log_dir, on_event
        self._server: ServerProcess | None = None
        self._client: SglangClient | None = None
        self._gate, self._lock, self.pausing = asyncio.Event(), asyncio.Lock(), asyncio.Lock()
        self._failure: RuntimeError | None = None
        self._answered_at = 0.0  # when the server last answered a probe of `recover`
        self._failures = 0  # failures since the last successful update
        self._loading = self._stopped = False
        self._timeouts: set[asyncio.Timeout] = set()  # timeouts of running probes
        self._recovering: set[asyncio.Task[bool]] = set()
        self._watching: asyncio.Task[None] | None = None

    @property
    def drafts(self) -> bool:
        """Whether the server has a draft."""
        return self.spec.mode is not SpecMode.NONE

    @property
    def server(self) -> ServerProcess:
        """The current server process."""
        assert self._server is not None
        return self._server

    @property
    def client(self) -> SglangClient:
        """HTTP client of the server, even if the gate is closed."""
        assert self._client is not None
        return self._client

    def is_serving(self) -> bool:
        """Return whether the gate is open and the process is not known to be dead."""
        return self._gate.is_set() and self._failure is None and self.server.is_running()

    async def start(self) -> None:
        """Start the first server and watch it. Raises RuntimeError if it does not start as configured."""
        await self._start()
        self._watching = asyncio.create_task(self._watch())

    async def serving(self) -> SglangClient:
        """Wait for a usable server and return its client. Raises RuntimeError if no restarts are left."""
        await self._gate.wait()
        if self._failure is not None:
            raise RuntimeError(str(self._failure)) from self._failure
        return self.client

    async def recover(
        self, client: SglangClient, error: BaseException | str, timeout: float | None = None
    ) -> bool:
        """Replace the server of `client` if it is dead or hangs; returns when a server is usable.

        timeout: seconds in which the server must answer; None: depends on its current activity.

        Returns False if it answers: then only the caller's request failed. Raises RuntimeError when
        `rollout.sglang.max_restarts` is used up.
        """
        work = asyncio.ensure_future(self._recover(client, error, timeout))
        self._recovering.add(work)
        work.add_done_callback(self._recovering.discard)

        # Other callers wait for the same server, even if this caller is cancelled.
        return await asyncio.shield(work)

    async def _recover(self, client: SglangClient, error: BaseException | str, timeout: float | None) -> bool:
        """Replace the server of `client` if it is dead or hung; return whether it was replaced or stopped."""
        called_at = time.monotonic()
        async with self._lock:
            if self._failure is not None:
                raise self._failure
            if client is not self._client or self._stopped:
                return True

            # A thousand requests that fail at the same time need one probe in total, not one each.
            if called_at < self._answered_at:
                return False

            kind = await self._failure_kind(self._answer_timeout if timeout is None else timeout)
            if kind is None:
                self._answered_at = time.monotonic()
                return False

            self._gate.clear()
            self._on_event(kind, version=self.loaded.version, error=_brief(error))
            self._failures += 1
            seconds = await self._replace()
            version = self.loaded.version
            self._on_event(
                "server_restarted", version=version, restarts=self.restarts, seconds=round(seconds, 1)
            )
            return True

    def drain(self) -> None:
        """Make further requests wait until `restart` is done."""
        self._gate.clear()

    async def restart(self) -> float:
        """Replace a healthy server, return seconds; running requests fail. Raises the errors of `recover`."""
        async with self._lock:
            self._gate.clear()
            return await self._replace()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Allow the server to be silent for `update_timeout` within the context, while it reads weights."""
        self._set_loading(loading=True)
        try:
            yield
        finally:
            self._set_loading(loading=False)

    def mark_loaded(self, desired: DesiredWeights) -> None:
        """Record that the running server has the weights of `desired`."""
        self.loaded, self.stale, self._failures = desired, False, 0

    async def stop(self) -> None:
        """Stop watching and serving; a running restart is ended."""
        self._stopped = True
        self._gate.clear()
        if self._watching is not None:
            self._watching.cancel()

        # Repeat once, because a running restart may have started another server.
        for _ in range(2):
            if self._server is not None:
                await asyncio.to_thread(self._server.stop)
            async with self._lock:
                pass
        if self._client is not None:
            await self._client.close()

    # ---- failures ----

    async def _watch(self) -> None:
        """Detect failures while no request would notice them; ends when restarts are used up."""
        probed = time.monotonic()
        while self._failure is None:
            await asyncio.sleep(_POLL_SECONDS)
            if not self._gate.is_set():
                continue

            client, reason = self.client, "its process ended"
            if self.server.is_running():
                if time.monotonic() - probed < min(_HEALTH_SECONDS, self._config.sglang.health_timeout / 3):
                    continue
                answered = await self._answers(client, self._answer_timeout)
                probed, reason = time.monotonic(), "it does not answer"
                if answered:
                    continue

            # `recover` stores the error in `_failure` and raises it in all callers that wait for a server. A
            # short timeout is enough, because the probe above has already allowed for a running update.
            with contextlib.suppress(RuntimeError):
                await self.recover(client, reason, self._config.sglang.health_timeout)

    @property
    def _answer_timeout(self) -> float:
        """Seconds in which the server must answer a probe; depends on its current activity."""
        sglang = self._config.sglang
        return sglang.update_timeout if self._loading else sglang.health_timeout

    def _set_loading(self, *, loading: bool) -> None:
        """Set whether the server is loading weights, and adapt the timeouts of running probes.

        If running probes kept their first timeout, a server that hangs right after an update would get the
        long timeout of loading, and a probe sent just before loading would kill a healthy server.
        """
        self._loading = loading
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(asyncio.get_running_loop().time() + self._answer_timeout)

    async def _answers(self, client: SglangClient, seconds: float) -> bool:
        """Return whether the server answers in `seconds`, or within a timeout that is set meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds) as timeout:
                self._timeouts.add(timeout)
                try:
                    return await client.answers(PROBE, None)
                finally:
                    self._timeouts.discard(timeout)
        return False

    async def _failure_kind(self, timeout: float) -> str | None:
        """Return the kind of event for the server's failure; None when it answers."""
        # Connections break a moment before the end of the process is visible: do not report it as hung.
        deadline = time.monotonic() + _END_SECONDS
        while self.server.is_running():
            if time.monotonic() > deadline:
                if await self._answers(self.client, timeout):
                    return None
                return "server_hung" if self.server.is_running() else "server_died"
            await asyncio.sleep(0.05)
        return "server_died"

    async def _replace(self) -> float:
        """Start servers until one is usable; the lock must be held and the gate closed. Return seconds."""
        began, limit, last = time.monotonic(), self._config.sglang.max_restarts, ""
        while not self._stopped:
            await asyncio.to_thread(self.server.stop)
            if self._failures > limit:
                self._failure = RuntimeError(
                    f"the SGLang server failed {self._failures} times without a weight update in between "
                    f"(rollout.sglang.max_restarts={limit}). {last}See {self.server.log}."
                )
                self._gate.set()
                raise self._failure

            broken = self.client
            try:
                self.restarts += 1
                await self._start()
                break
            except RuntimeError as error:
                if not self._stopped:
                    self._failures, last = self._failures + 1, f"The last: {error} "
                    self._on_event("server_died", version=self.desired.version, error=_brief(error))
            finally:
                if broken is not self._client:
                    await broken.close()
        return time.monotonic() - began

    # ---- start ----

    async def _start(self) -> None:
        """Start a server on the desired weights and check that it runs as configured."""
        desired = self.desired
        try:
            weights = None if desired.weights is None else await desired.weights()
        except RuntimeError as error:
            # The weights were lost with the trainer; its successor publishes weights before it trains.
            self._on_event("weights_lost", version=desired.version, error=_brief(error))
            desired, weights = self._initial, None

        config, spec = self._config, self.spec
        with contextlib.ExitStack() as stack:
            folder = self._model_path
            # New weights come with their own draft, which replaces the draft of the first start.
            if weights is not None:
                folder = stack.enter_context(self._sync.session.checkpoint(weights))
                if spec.needs_draft and (folder / "draft").is_dir():
                    spec = replace(spec, draft_path=str(folder / "draft"))
            served = stack.enter_context(served_target(folder, spec))
            await self._start_on(served, desired, weights, config=config, spec=spec)

    async def _start_on(
        self,
        path: Path,
        desired: DesiredWeights,
        weights: Mapping[str, torch.Tensor] | None,
        *,
        config: RolloutConfig,
        spec: SpecConfig,
    ) -> None:
        """Start a server on the checkpoint in `path`, verify it, and open the gate."""
        sglang, on_gpu = config.sglang, self._environment.on_gpu
        port = pick_port(sglang.host, sglang.port)
        if self._stopped:
            raise RuntimeError("the engine is closed.")

        command = arguments.command(config, spec, path, port=port, on_gpu=on_gpu, version=desired.version)
        url = f"http://{sglang.host}:{port}"
        # A key in hex never begins with a dash, which SGLang would interpret as an option.
        key = secrets.token_hex(24)
        with (
            tempfile.NamedTemporaryFile("w", suffix=".yaml") as settings,  # a command line is readable by all
            tempfile.NamedTemporaryFile("w", suffix=".json") as widths,
        ):
            # SGLang reads the maximum width from this file; rlpipe's plugin chooses one per step.
            if spec.adaptive:
                json.dump({"1": {"candidate_steps": list(range(spec.gamma + 1))}}, widths)
                widths.flush()
                command += ["--speculative-adaptive", "--speculative-adaptive-config", widths.name]
            settings.write(f"api-key: '{key}'\n")
            settings.flush()
            reads_table = spec.draft_vocab and spec.needs_mtp
            table = table_path(spec, self._model_path) if reads_table else None
            self._server = server = ServerProcess(
                [str(self._environment.python), *command, "--config", settings.name],
                arguments.server_environment(
                    config,
                    on_gpu=on_gpu,
                    adaptive=spec.adaptive,
                    draft_vocab=table,
                ),
                self._log_dir / f"sglang-{port}.log",
            )
            self._client = client = SglangClient(url, sglang.request_timeout, key=key)
            self.server_id = uuid.uuid4().hex

            # Hash the checkpoint while the server loads it.
            hashing = asyncio.create_task(self._expected(desired, path, weights))
            try:
                timeout = arguments.start_seconds(config, spec, on_gpu=on_gpu)
                await server.wait_until(lambda: client.answers("/ready"), timeout)
                arguments.check_server_info(await client.read("/server_info"), config, spec)

                def again() -> Awaitable[Checksums]:
                    desired.checksums = None
                    return self._expected(desired, path, weights)

                report = await self._sync.check(client, hashing, draft=self.drafts, again=again)
            finally:
                hashing.cancel()

        if not report.passed:
            raise RuntimeError(
                f"the SGLang server does not hold the weights of {str(path)!r}: {report.summary()}. "
                "rlpipe knows the names and shapes in its families' tables (docs/models.md) and "
                "full-precision weights: use rollout=embedded for others."
            )

        # Exclude the objects of the start from all later garbage collections.
        await client.answers("/freeze_gc")
        if self.paused:
            await client.post(*PAUSE)
        self.loaded, self.stale = desired, False
        self._gate.set()

    async def _expected(
        self, desired: DesiredWeights, path: Path, weights: Mapping[str, torch.Tensor] | None
    ) -> Checksums:
        """Return the checksums of the desired weights. weights: None for the checkpoint in `path`."""
        if desired.checksums is None:
            if weights is None:
                weights = await asyncio.to_thread(read_weights, path)
            desired.checksums = await self._sync.checksums(weights)
        return desired.checksums


def _brief(error: BaseException | str) -> str:
    """Shorten an error for an event, but keep its end, because the end of a log has the cause.

    >>> len(_brief("x" * 9000))
    805
    """
    text = str(error)
    return text if len(text) <= 800 else f"{text[:200]} ... {text[-600:]}"
