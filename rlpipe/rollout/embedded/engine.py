"""The embedded engine: a thread that owns the model and decodes all running requests together.

Owns the thread, the inbox and the weights. The scheduler owns requests, the decoder owns forward passes.

    inbox (requests, aborts, updates) -> scheduler.round: admit, prefill, one decode step -> inbox ...

| who                       | waits for                     | woken by                                |
| the engine thread         | the inbox, when no row runs   | any public method                       |
| `generate`                | its future                    | the thread, `loop.call_soon_threadsafe` |
| `update_weights`, `pause` | the end of the current step     | the thread, between two steps           |

Only the inbox is shared, so there is no lock around the model. An exception in the thread
fails every pending and later call with that exception.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch

from rlpipe.config.draft_vocab import read_draft_vocab
from rlpipe.config.openmp import release_threads, watch_for_contention
from rlpipe.config.rollout import KvOnUpdate, RolloutConfig, check_embedded
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import check_weights, is_mtp_weight, read_config, read_weights, require_mtp
from rlpipe.rollout.embedded.costs import measure_costs, sample_costs
from rlpipe.rollout.embedded.decoder import Decoder
from rlpipe.rollout.embedded.drafters import drafting_streams, make_drafting, read_draft_model
from rlpipe.rollout.embedded.model import Model
from rlpipe.rollout.embedded.rows import RowTable
from rlpipe.rollout.embedded.scheduler import Job, Scheduler
from rlpipe.rollout.engine import EngineStats, check_request
from rlpipe.spec.gamma import AdaptiveGamma, FixedGamma, GammaPolicy
from rlpipe.types import GenerateRequest, GenerateResult

Pending = tuple[asyncio.AbstractEventLoop, asyncio.Future]


class EmbeddedEngine:
    """Implements `rlpipe.rollout.engine.Engine` in this process.

    config: rows, context, device. spec: verification rule and gamma. model_path: checkpoint directory. costs:
    seconds of a step by (batch, gamma), measured at the start. With spec.adaptive it has all pairs; for a
    chain of fixed gamma on a CPU it has a few, for the report; otherwise it is empty.

    Raises ValueError for a model the engine cannot run, a missing draft while speculation is on, or a context
    longer than the model's.
    """

    def __init__(self, config: RolloutConfig, spec: SpecConfig, model_path: str | Path) -> None:
        # Fields may have been assigned since the settings were made: check and convert them again.
        config, spec = replace(config), replace(spec)
        hf_config = read_config(model_path)
        arch = read_architecture(hf_config)
        check_embedded(str(model_path), hf_config)

        drafts = spec.needs_mtp
        if drafts:
            require_mtp(hf_config, model_path, spec.mode)

        if config.max_context > arch.max_position:
            raise ValueError(
                f"rollout.max_context={config.max_context} exceeds the model's longest context of "
                f"{arch.max_position}: set rollout.max_context to at most {arch.max_position}."
            )

        draft = read_draft_model(spec, hf_config)
        draft_vocab = read_draft_vocab(spec, model_path, arch.vocab) if drafts else None
        weights = read_weights(model_path)
        self._config, self._arch = config, arch
        self._shapes = arch.weight_shapes(mtp=drafts)
        self._draft = draft

        # An update may omit a tied head, and the weights of a draft that is not used.
        self._optional = frozenset(n for n in weights if is_mtp_weight(n) and not drafts)
        if arch.tied:
            self._optional |= {"lm_head.weight"}
        check_weights(weights, self._shapes, self._optional)
        self._spec = spec
        device = torch.device(_pick_device(config.device))
        self._model = Model(
            arch,
            weights,
            mtp=min(arch.mtp_layers, spec.depth) if drafts else 0,
            rows=config.max_running,
            slots=config.max_context + spec.drafts + 2,
            device=device,
            dtype=getattr(torch, config.dtype),
            draft=draft,
            draft_vocab=draft_vocab,
            graphs=config.cuda_graphs and device.type == "cuda",
        )
        self._build()
        self._busy_seconds = 0.0
        self._wake = threading.Condition()
        self._inbox: deque[tuple[Callable[[], None], Future | None]] = deque()
        self._pending: dict[str, Pending] = {}
        self._paused = self._closed = False
        self._failure: BaseException | None = None

        watch_for_contention()
        release_threads()
        self._thread = threading.Thread(target=self._main, name="rlpipe-engine", daemon=True)
        self._thread.start()

    def _build(self) -> None:
        """Make the row table, the decoder and the scheduler."""
        config, spec, model = self._config, self._spec, self._model
        streams = drafting_streams(spec)
        history = spec.adaptive and spec.needs_model
        self._table = RowTable(
            model, depth=spec.depth, streams=streams, history=history, routes=config.replay_routes
        )

        drafting = make_drafting(model, self._table, spec)
        self._decoder = Decoder(model, self._table, drafting, config.prefill_tokens)
        policy: GammaPolicy = FixedGamma(spec.depth)
        self.costs: dict[tuple[int, int], float] = {}
        if spec.adaptive:
            self.costs = measure_costs(
                self._decoder, self._table, max_gamma=spec.gamma, threads=config.threads
            )
            policy = AdaptiveGamma(self.costs)
        elif spec.depth and spec.mode is not SpecMode.TREE and self._table.hidden.device.type == "cpu":
            # Not on a GPU, where it would capture graphs for shapes that the run may not use.
            self.costs = sample_costs(self._decoder, self._table, gamma=spec.gamma, threads=config.threads)

        self._scheduler = Scheduler(
            self._table,
            self._decoder,
            policy,
            depth=spec.depth,
            drafts=spec.drafts,
            streams=streams,
            max_context=config.max_context,
            prefill_tokens=config.prefill_tokens,
        )

    # ---- public: any thread, any event loop ----

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn; see `Engine.generate`.

        For a prompt that fills the context the result has no token and finish_reason LENGTH. At temperature
        0, logprobs and entropies are computed at temperature 1. Raises ValueError for an invalid request,
        RuntimeError after `close` or a failure of the engine.
        """
        check_request(request, self._arch.vocab, self._spec.mode)
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        pending = (loop, future)

        job = Job(request, lambda result: self._answer(pending, result))
        with self._wake:
            self._require_running()
            if request.request_id in self._pending:
                raise ValueError(f"request_id={request.request_id!r} is already running; ids must be unique.")
            self._pending[request.request_id] = pending
            self._inbox.append((lambda: self._scheduler.submit(job), None))
            self._wake.notify()

        # If the caller is cancelled, end the request: the row is freed at the next step.
        try:
            return await future
        except asyncio.CancelledError:
            with self._wake:
                self._pending.pop(request.request_id, None)
            self.abort([request.request_id])
            raise

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests before the next step; returns at once."""
        chosen = None if request_ids is None else frozenset(request_ids)
        self._post(lambda: self._scheduler.abort(chosen))

    def end_session(self, session_id: str) -> None:
        """Free the KV row of a conversation before the next step."""
        self._post(lambda: self._table.end_session(session_id))

    def pause(self) -> None:
        """Stop decoding; returns once no step is running. Updates and aborts still work."""
        self._call(lambda: self._set_paused(paused=True))

    def resume(self) -> None:
        """Continue decoding."""
        self._call(lambda: self._set_paused(paused=False))

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replace target and MTP weights between two steps; returns when they are in use.

        If the update has no weights of a separate draft model, the current draft stays in use, and its drafts
        are verified against the new target.

        Raises ValueError that names missing, unknown or misshapen weights; then the old weights stay in use.
        """
        draft = self._draft
        sent = draft is not None and any(name.startswith(draft.prefix) for name in weights)
        check_weights(weights, self._shapes | (draft.shapes if sent else {}), self._optional)
        self._call(lambda: self._load(weights, version))

    def stats(self) -> EngineStats:
        """Return the counters since the start."""
        return replace(self._scheduler.stats(self._busy_seconds), costs=self.costs)

    def close(self) -> None:
        """Stop the thread; pending requests return the tokens generated so far, with ABORT."""
        with self._wake:
            self._closed = True
            self._wake.notify()

        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- the inbox ----

    def _require_running(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"The engine has failed: {self._failure!r}") from self._failure
        if self._closed:
            raise RuntimeError("The engine is closed.")

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            if not self._closed and self._failure is None:
                self._inbox.append((action, None))
                self._wake.notify()

    def _call(self, action: Callable[[], None]) -> None:
        done: Future[None] = Future()
        with self._wake:
            self._require_running()
            self._inbox.append((action, done))
            self._wake.notify()
        done.result()

    # ---- the engine thread ----

    def _main(self) -> None:
        """Run scheduler rounds until the engine is closed; the body of its thread."""
        torch.set_num_threads(self._config.threads)
        try:
            with torch.inference_mode():
                while self._take_inbox():
                    started = time.perf_counter()
                    self._scheduler.round()
                    self._busy_seconds += time.perf_counter() - started
                self._scheduler.abort(None)
        except BaseException as error:
            # An error that ends the thread must be raised in the waiting callers.
            self._fail(error)

    def _take_inbox(self) -> bool:
        """Run the queued actions, waiting while no row decodes; return False when closed."""
        while True:
            with self._wake:
                while not (self._inbox or self._closed or self._has_work()):
                    release_threads()
                    self._wake.wait()
                # After this is set, no action is added to the inbox.
                closed = self._closed

            # Actions run without the lock: they may take as long as a weight update.
            while self._inbox:
                action, done = self._inbox.popleft()
                if done is None:
                    action()
                else:
                    self._run_call(action, done)

            if closed:
                return False
            if self._has_work():
                return True

    @staticmethod
    def _run_call(action: Callable[[], None], done: Future) -> None:
        try:
            action()
        except BaseException as error:
            done.set_exception(error)
            raise  # the weights may be partly replaced

        done.set_result(None)

    def _has_work(self) -> bool:
        return not self._paused and self._scheduler.has_work()

    def _set_paused(self, *, paused: bool) -> None:
        self._paused = paused

    def _load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self._model.load(weights)
        self._scheduler.version = version

        # Cached keys were computed with the old weights.
        if self._config.kv_on_update is KvOnUpdate.RECOMPUTE:
            self._table.drop_idle()
            self._decoder.rebuild()

    def _answer(self, pending: Pending, result: GenerateResult) -> None:
        with self._wake:
            if self._pending.get(result.request_id) is pending:  # otherwise its caller was cancelled
                del self._pending[result.request_id]

        _settle(pending, lambda future: future.set_result(result))

    def _fail(self, error: BaseException) -> None:
        """Raise an error in all waiting callers, and in later ones."""
        with self._wake:
            self._failure = error
            pending, inbox = list(self._pending.values()), list(self._inbox)
            self._pending.clear()
            self._inbox.clear()

        for _, done in inbox:
            if done is not None:
                done.set_exception(error)

        for one in pending:
            _settle(one, lambda future: future.set_exception(error))


def _settle(pending: Pending, action: Callable[[asyncio.Future], None]) -> None:
    """Settle a request's future on the event loop of its caller, unless that loop is closed."""
    loop, future = pending
    if not loop.is_closed():
        loop.call_soon_threadsafe(lambda: None if future.done() else action(future))


def _pick_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"
