"""One server that is kept alive: started, watched, and replaced by one that holds the newest weights.

    watch    --not running, or silent for health_timeout--+
    a caller --ServerUnreachable--------------------------+--> recover: close the gate, kill what is left,
                                                               start on the newest weights, canary, open

| who       | waits for                     | woken by                                  |
| `serving` | the gate                      | a server that passed its canary, or a failure that stays |
| `recover` | the lock, then the new server | whoever recovers first; the others find it done |

Owns the process, its faults and which weights it must hold. Invariant: behind an open gate is a server that
holds `goal`, or one that an update is bringing there. What was asked of a dead server is asked again by its
caller (`engine.py`): nothing of it was counted.
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

_POLL_SECONDS = 0.5  # between two looks at the process
_END_SECONDS = 1.0  # a process is seen to end a moment after its connections broke
PAUSE = "/pause_generation", {"mode": "in_place"}
PROBE = "/server_info"  # answered by the scheduler, paused or not


@dataclass(slots=True, kw_only=True, eq=False)
class Goal:
    """What the server must hold: `weights` (None: the model's checkpoint) as `version`.

    Asking for weights raises RuntimeError when nobody is left to give them: then a server starts on the
    model's checkpoint, as the version that is. checksums: what a server that holds them shows, computed once.
    offer: a broadcast that brings them; it passes once.
    """

    weights: Callable[[], Awaitable[Mapping[str, torch.Tensor]]] | None
    version: int
    checksums: Checksums | None = None
    offer: Offer | None = None


class Replica:
    """Used from one event loop. on_event: told of `server_died`, `server_hung`, `server_restarted`,
        `weights_lost`.

    spec: how the server decodes; set it before `restart` to change it. paused: a new server starts paused.
    stale: the server is paused, and may hold the weights of two versions until an update arrives.
    pausing: held by who pauses the server or lets it go on.
    restarts: since the beginning. server_id: of the server that is there now, new with each.
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
        self.goal = self.loaded = self._first = Goal(weights=None, version=version)
        self._config, self._model_path, self._environment = config, model_path, environment
        self._sync, self._log_dir, self._on_event = sync, log_dir, on_event
        self._server: ServerProcess | None = None
        self._client: SglangClient | None = None
        self._gate, self._lock, self.pausing = asyncio.Event(), asyncio.Lock(), asyncio.Lock()
        self._failure: RuntimeError | None = None
        self._well = 0.0  # when the server was last asked by `recover`, and answered
        self._strikes = 0  # faults since an update arrived without one
        self._loading = self._stopped = False
        self._clocks: set[asyncio.Timeout] = set()  # of questions that the server has not answered
        self._recovering: set[asyncio.Task[bool]] = set()
        self._watching: asyncio.Task[None] | None = None

    @property
    def drafts(self) -> bool:
        """Whether the server has a draft."""
        return self.spec.mode is not SpecMode.NONE

    @property
    def server(self) -> ServerProcess:
        """The process that serves now."""
        assert self._server is not None
        return self._server

    @property
    def client(self) -> SglangClient:
        """HTTP to it, whether it serves or not."""
        assert self._client is not None
        return self._client

    def is_serving(self) -> bool:
        """Whether requests are let through, to a process that lives as far as is known."""
        return self._gate.is_set() and self._failure is None and self.server.is_running()

    async def start(self) -> None:
        """Start the first server and watch it. Raises RuntimeError when it does not come up as told."""
        await self._start()
        self._watching = asyncio.create_task(self._watch())

    async def serving(self) -> SglangClient:
        """HTTP to a server that may be used. Raises RuntimeError once restarting was given up."""
        await self._gate.wait()
        if self._failure is not None:
            raise RuntimeError(str(self._failure)) from self._failure
        return self.client

    async def recover(
        self, client: SglangClient, error: BaseException | str, patience: float | None = None
    ) -> bool:
        """Replace the server behind `client` if it is dead or hangs; returns when one serves.

        patience: seconds in which it must answer, if not what it has at this time.

        Returns False when it answers, so that only the caller's own request failed. Raises RuntimeError when
        `rollout.sglang.max_restarts` is used up.
        """
        work = asyncio.ensure_future(self._recover(client, error, patience))
        self._recovering.add(work)
        work.add_done_callback(self._recovering.discard)
        return await asyncio.shield(work)  # a caller that is cancelled leaves the others their server

    async def _recover(
        self, client: SglangClient, error: BaseException | str, patience: float | None
    ) -> bool:
        asked = time.monotonic()
        async with self._lock:
            if self._failure is not None:
                raise self._failure
            if client is not self._client or self._stopped:
                return True
            if asked < self._well:  # a thousand requests that fail at once need one answer, not one each
                return False
            kind = await self._fault(self._patience if patience is None else patience)
            if kind is None:
                self._well = time.monotonic()
                return False
            self._gate.clear()
            self._on_event(kind, version=self.loaded.version, error=_brief(error))
            self._strikes += 1
            seconds = await self._replace()
            version = self.loaded.version
            self._on_event(
                "server_restarted", version=version, restarts=self.restarts, seconds=round(seconds, 1)
            )
            return True

    def drain(self) -> None:
        """Let no further request through until `restart` is done."""
        self._gate.clear()

    async def restart(self) -> float:
        """Replace a server that is well; what runs on it breaks off. Returns seconds; raises as `recover`."""
        async with self._lock:
            self._gate.clear()
            return await self._replace()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """While the server reads weights it may be silent for `update_timeout` instead."""
        self._set_loading(True)
        try:
            yield
        finally:
            self._set_loading(False)

    def arrived(self, goal: Goal) -> None:
        """The running server was brought to `goal` by an update."""
        self.loaded, self.stale, self._strikes = goal, False, 0

    async def stop(self) -> None:
        """Stop watching and serving; ends a restart that is under way."""
        self._stopped = True
        self._gate.clear()
        if self._watching is not None:
            self._watching.cancel()
        for _ in range(2):  # a restart may have been about to start another
            if self._server is not None:
                await asyncio.to_thread(self._server.stop)
            async with self._lock:
                pass
        if self._client is not None:
            await self._client.close()

    # ---- faults ----

    async def _watch(self) -> None:
        """Find what no request tells of; ends when restarting was given up."""
        probed = time.monotonic()
        while self._failure is None:
            await asyncio.sleep(_POLL_SECONDS)
            if not self._gate.is_set():
                continue
            client, said = self.client, "its process ended"
            if self.server.is_running():
                if time.monotonic() - probed < self._config.sglang.health_interval:
                    continue
                answered = await self._answers(client, self._patience)
                probed, said = time.monotonic(), "it does not answer"
                if answered:
                    continue
            with contextlib.suppress(
                RuntimeError
            ):  # kept in `_failure`, and told to all who ask for a server
                # it had the patience of an update already, if there is one
                await self.recover(client, said, self._config.sglang.health_timeout)

    @property
    def _patience(self) -> float:
        sglang = self._config.sglang
        return sglang.update_timeout if self._loading else sglang.health_timeout

    def _set_loading(self, loading: bool) -> None:
        """Questions that are under way have the patience of what the server does from now on.

        With that of their beginning, a server that hangs right behind an update would be waited for as one
        that loads, and one that loads would be killed for a question that came just before.
        """
        self._loading = loading
        for clock in self._clocks:
            if not clock.expired():
                clock.reschedule(asyncio.get_running_loop().time() + self._patience)

    async def _answers(self, client: SglangClient, patience: float) -> bool:
        """Whether the server answers within so many seconds, or within the new patience if that changes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience) as clock:
                self._clocks.add(clock)
                try:
                    return await client.answers(PROBE, None)
                finally:
                    self._clocks.discard(clock)
        return False

    async def _fault(self, patience: float) -> str | None:
        """The event's kind: what is wrong with the server; None when it answers."""
        deadline = time.monotonic() + _END_SECONDS
        while self.server.is_running():
            if time.monotonic() > deadline:
                if await self._answers(self.client, patience):
                    return None
                return "server_hung" if self.server.is_running() else "server_died"
            await asyncio.sleep(0.05)
        return "server_died"

    async def _replace(self) -> float:
        """Start servers until one serves; with the lock held and the gate closed. Returns seconds."""
        began, limit, last = time.monotonic(), self._config.sglang.max_restarts, ""
        while not self._stopped:
            await asyncio.to_thread(self.server.stop, 0.0)
            if self._strikes > limit:
                self._failure = RuntimeError(
                    f"the SGLang server failed {self._strikes} times without a weight update in between "
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
                    self._strikes, last = self._strikes + 1, f"The last: {error} "
                    self._on_event("server_died", version=self.goal.version, error=_brief(error))
            finally:
                if broken is not self._client:
                    await broken.close()
        return time.monotonic() - began

    # ---- start ----

    async def _start(self) -> None:
        """Start a server on `goal` and check that it is what was asked for."""
        goal = self.goal
        try:
            weights = None if goal.weights is None else await goal.weights()
        except RuntimeError as error:  # a trainer that was lost; its successor publishes before it trains
            self._on_event("weights_lost", version=goal.version, error=_brief(error))
            goal, weights = self._first, None
        config, spec = self._config, self.spec
        with contextlib.ExitStack() as stack:
            folder = self._model_path
            if weights is not None:  # the draft of the goal, not the one that was started with
                folder = stack.enter_context(self._sync.session.checkpoint(weights))
                config = replace(config, sglang=replace(config.sglang, draft_path=""))
                if spec.needs_draft and (folder / "draft").is_dir():
                    spec = replace(spec, draft_path=str(folder / "draft"))
            served = stack.enter_context(served_target(folder, spec))
            await self._start_on(served, config, spec, goal, weights)

    async def _start_on(
        self,
        path: Path,
        config: RolloutConfig,
        spec: SpecConfig,
        goal: Goal,
        weights: Mapping[str, torch.Tensor] | None,
    ) -> None:
        sglang, on_gpu = config.sglang, self._environment.on_gpu
        port = pick_port(sglang.host, sglang.port)
        if self._stopped:
            raise RuntimeError("the engine is closed.")
        words = arguments.command(config, spec, path, port=port, on_gpu=on_gpu, version=goal.version)
        url = f"http://{sglang.host}:{port}"
        key = secrets.token_hex(24)  # never begins with a dash, which SGLang would take for an option
        with (
            tempfile.NamedTemporaryFile("w", suffix=".yaml") as settings,  # a command line is readable by all
            tempfile.NamedTemporaryFile("w", suffix=".json") as widths,
        ):
            if spec.adaptive:  # read for the largest width; rlpipe's plugin chooses
                json.dump({"1": {"candidate_steps": list(range(spec.gamma + 1))}}, widths)
                widths.flush()
                words += ["--speculative-adaptive", "--speculative-adaptive-config", widths.name]
            settings.write(f"api-key: '{key}'\n")
            settings.flush()
            self._server = server = ServerProcess(
                [str(self._environment.python), *words, "--config", settings.name],
                arguments.server_environment(config, on_gpu, spec.adaptive),
                self._log_dir / f"sglang-{port}.log",
            )
            self._client = client = SglangClient(url, sglang.request_timeout, key=key)
            self.server_id = uuid.uuid4().hex
            # while the server loads the same
            hashing = asyncio.create_task(self._expected(goal, path, weights))
            try:
                await server.wait_until(lambda: client.answers("/ready"), sglang.start_timeout)
                arguments.check_server_info(await client.read("/server_info"), config, spec)

                def again() -> Awaitable[Checksums]:
                    goal.checksums = None
                    return self._expected(goal, path, weights)

                report = await self._sync.check(client, hashing, draft=self.drafts, again=again)
            finally:
                hashing.cancel()
        if not report.passed:
            raise RuntimeError(
                f"the SGLang server does not hold the weights of {str(path)!r}: {report.summary()}. "
                "rlpipe knows the names and shapes in its families' tables (docs/models.md) and "
                "full-precision weights: use rollout=embedded for others."
            )
        await client.answers("/freeze_gc")  # no collection walks through what was made while it started
        if self.paused:
            await client.post(*PAUSE)
        self.loaded, self.stale = goal, False
        self._gate.set()

    async def _expected(
        self, goal: Goal, path: Path, weights: Mapping[str, torch.Tensor] | None
    ) -> Checksums:
        if goal.checksums is None:
            if weights is None:
                weights = await asyncio.to_thread(read_weights, path)
            goal.checksums = await self._sync.checksums(weights)
        return goal.checksums


def _brief(error: BaseException | str) -> str:
    """What an event says of an error: of a log, the end, where the cause is.

    >>> len(_brief("x" * 9000))
    805
    """
    text = str(error)
    return text if len(text) <= 800 else f"{text[:200]} ... {text[-600:]}"
