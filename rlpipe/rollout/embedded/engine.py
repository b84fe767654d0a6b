"""The embedded engine: a thread that owns the model and decodes all running requests together.

Owns requests, threads and weights; the passes are the decoder's. Flow of the thread:

    inbox (requests, aborts, updates) -> admit waiting requests and prefill -> one decode step -> finish

| who                       | waits for                     | woken by                                |
| the engine thread         | the inbox, when nothing runs  | any public method                       |
| `generate`                | its future                    | the thread, `loop.call_soon_threadsafe` |
| `update_weights`, `pause` | the end of the step under way | the thread, between two steps           |

Nothing but the inbox is shared, so there is no lock around the model. An exception in the thread
fails every pending and later call with that exception.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from rlpipe.config.rollout import KvOnUpdate, RolloutConfig
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.hf_layout import is_mtp_weight, read_config, read_weights, require_mtp
from rlpipe.rollout.embedded.architecture import check_weights, read_architecture
from rlpipe.rollout.embedded.decoder import Decoder, Emitted
from rlpipe.rollout.embedded.model import Model
from rlpipe.rollout.embedded.rows import RowTable
from rlpipe.rollout.engine import EngineStats
from rlpipe.spec.sampling import request_uniforms
from rlpipe.types import FinishReason, GenerateRequest, GenerateResult, SpecCounts


@dataclass(slots=True)
class _Job:
    """A request on its way through the engine."""

    request: GenerateRequest
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future
    prompt_length: int = 0
    greedy: bool = False
    plain_temperature: bool = True  # no division needed: temperature 1, or greedy
    top: list[list[tuple[int, float]]] = field(default_factory=list)


class EmbeddedEngine:
    """Implements `rlpipe.rollout.engine.Engine` in this process.

    config: rows, context, device. spec: verification rule and gamma. model_path: checkpoint directory.

    Raises ValueError for a model the engine cannot run, a missing MTP layer while speculation is on,
    or a context beyond the model's.
    """

    def __init__(self, config: RolloutConfig, spec: SpecConfig, model_path: str | Path) -> None:
        hf_config = read_config(model_path)
        arch = read_architecture(hf_config)
        speculate = spec.mode is not SpecMode.NONE
        if speculate:
            require_mtp(hf_config, model_path, spec.mode)
        if config.max_context > arch.max_position:
            raise ValueError(
                f"rollout.max_context={config.max_context} exceeds the model's max_position_embeddings="
                f"{arch.max_position}: set rollout.max_context to at most {arch.max_position}."
            )
        weights = read_weights(model_path)
        self._config, self._arch = config, arch
        self._shapes = arch.weight_shapes(mtp=speculate)
        # A tied head may be left out of an update, and a draft that is not used may be sent or not.
        self._optional = frozenset(n for n in weights if is_mtp_weight(n) and not speculate)
        if arch.tied:
            self._optional |= {"lm_head.weight"}
        check_weights(weights, self._shapes, self._optional)
        self._model = Model(
            arch,
            weights,
            mtp=speculate,
            rows=config.max_running,
            slots=config.max_context + spec.drafts + 2,
            device=torch.device(_pick_device(config.device)),
            dtype=getattr(torch, config.dtype),
        )
        self._table = RowTable(self._model, spec.drafts)
        self._decoder = Decoder(self._model, self._table, spec, config.prefill_tokens)
        self._gamma = spec.drafts
        self._stats = EngineStats()
        self._accepted = np.zeros(self._gamma + 1, np.int64)
        self._waiting: deque[_Job] = deque()
        self._inbox: deque[tuple[Callable[[], None], Future | None]] = deque()
        self._wake = threading.Condition()
        self._jobs: dict[str, _Job] = {}
        self._paused = self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="rlpipe-engine", daemon=True)
        self._thread.start()

    # ---- public: any thread, any event loop ----

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one turn; see `Engine.generate`.

        A prompt that fills the context returns no token and finish_reason LENGTH. At temperature 0
        logprobs and entropies are of the distribution at temperature 1. Raises ValueError for an
        impossible request, RuntimeError after `close` or a failure of the engine.
        """
        self._check(request)
        loop = asyncio.get_running_loop()
        job = _Job(request, loop, loop.create_future())
        with self._wake:
            self._require_running()
            if request.request_id in self._jobs:
                raise ValueError(f"request_id={request.request_id!r} is already running; ids must be unique.")
            self._jobs[request.request_id] = job
            self._inbox.append((lambda: self._waiting.append(job), None))
            self._wake.notify()
        try:
            return await job.future
        except asyncio.CancelledError:
            self.abort([request.request_id])
            raise

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests at the next step boundary; does not wait for it."""
        chosen = None if request_ids is None else frozenset(request_ids)
        self._post(lambda: self._abort(chosen))

    def end_session(self, session_id: str) -> None:
        """Free the KV row of a conversation at the next step boundary."""
        self._post(lambda: self._table.forget_session(session_id))

    def pause(self) -> None:
        """Stop decoding; returns once no step is running. Updates and aborts still work."""
        self._call(lambda: self._set_paused(True))

    def resume(self) -> None:
        """Continue decoding."""
        self._call(lambda: self._set_paused(False))

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replace target and draft weights between two steps; returns when they are in use.

        Raises ValueError naming missing, unknown or misshapen weights; the old ones stay in use then.
        """
        check_weights(weights, self._shapes, self._optional)
        self._call(lambda: self._load(weights, version))

    def stats(self) -> EngineStats:
        """Counters since start."""
        stats = copy.copy(self._stats)
        stats.running, stats.waiting = self._table.active, len(self._waiting)
        stats.spec = _counts(self._accepted)
        return stats

    def close(self) -> None:
        """Stop the thread; pending requests return what they have, with ABORT."""
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
        torch.set_num_threads(self._config.threads)
        try:
            while self._take_inbox():
                started = time.perf_counter()
                self._admit()
                if self._table.active:
                    self._record(0, self._decoder.step(self._top(self._table.jobs[: self._table.active])))
                self._stats.busy_seconds += time.perf_counter() - started
            self._abort(None)
        except BaseException as error:  # whatever ends the thread must reach those who wait for it
            self._fail(error)

    def _take_inbox(self) -> bool:
        """Run what was asked for, waiting while there is nothing to decode; False when closed."""
        while True:
            with self._wake:
                while not (self._inbox or self._closed or self._has_work()):
                    self._wake.wait()
                actions, closed = list(self._inbox), self._closed
                self._inbox.clear()
            for index, (action, done) in enumerate(actions):
                try:
                    action()
                except BaseException as error:
                    if done is None:
                        raise
                    done.set_exception(error)
                    if not isinstance(error, ValueError):  # the model may be half replaced
                        self._inbox.extendleft(reversed(actions[index + 1 :]))
                        raise
                else:
                    if done is not None:
                        done.set_result(None)
            if closed or self._has_work():
                return not closed

    def _has_work(self) -> bool:
        return not self._paused and bool(self._waiting or self._table.active)

    def _fail(self, error: BaseException) -> None:
        with self._wake:
            self._failure = error
            jobs, inbox = list(self._jobs.values()), list(self._inbox)
            self._jobs.clear()
            self._inbox.clear()
        for _, done in inbox:
            if done is not None:
                done.set_exception(error)
        for job in jobs:
            _resolve(job, lambda future: future.set_exception(error))

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    @torch.inference_mode()
    def _load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self._model.load(weights)
        self._stats.policy_version = version
        if self._config.kv_on_update is KvOnUpdate.RECOMPUTE:
            self._table.drop_idle()
            self._decoder.rebuild()

    # ---- requests: check, admit, record, finish ----

    def _check(self, request: GenerateRequest) -> None:
        ids, sampling, vocab = request.prompt_ids, request.sampling, self._arch.vocab
        if not ids or min(ids) < 0 or max(ids) >= vocab:
            what = "is empty" if not ids else f"has token ids outside 0..{vocab - 1}"
            raise ValueError(
                f"prompt_ids of request {request.request_id!r} {what}: tokenize with the model's own tokenizer."
            )
        if sampling.max_new_tokens < 1 or sampling.temperature < 0 or sampling.top_logprobs < 0:
            raise ValueError(
                f"sampling of request {request.request_id!r} is impossible: {sampling}. max_new_tokens must be "
                "at least 1, temperature and top_logprobs at least 0."
            )

    def _admit(self) -> None:
        """Give waiting requests rows, oldest first, and prefill them."""
        joining: list[tuple[int, _Job]] = []  # (tokens to process, job)
        room, budget = len(self._table.jobs) - self._table.active, self._config.prefill_tokens
        leaders: dict[tuple[int, ...], list[_Job]] = {}
        while self._waiting and room:
            job = self._waiting[0]
            prompt, length = job.request.prompt_ids, len(job.request.prompt_ids)
            if length >= self._config.max_context:
                self._waiting.popleft()
                self._finish(job, None, FinishReason.LENGTH)
                continue
            key = tuple(prompt)
            if key not in leaders:
                row = self._table.idle_row(job.request.session_id)
                size = length - self._start(row, prompt)
                if joining and size > budget:
                    break
                budget -= size
                joining.append((size, job))
                leaders[key] = []
            elif self._table.idle_row(job.request.session_id) is None:
                leaders[key].append(job)
            else:
                break  # a conversation of its own with the same prompt: next time
            self._waiting.popleft()
            room -= 1
        if not joining:
            return
        joining.sort(key=lambda item: item[0])
        first, starts, copies = self._table.active, [], []
        for _, job in joining:
            starts.append(self._seat(job))
        followers = [(first + i, job) for i, (_, leader) in enumerate(joining)
                     for job in leaders[tuple(leader.request.prompt_ids)]]  # fmt: skip
        for row, job in followers:
            self._seat(job)
            copies.append(row)
        ends = self._table.total[first : first + len(starts)]
        self._stats.prefill_tokens += int(ends.sum()) - sum(starts)
        jobs = self._table.jobs[first : self._table.active]
        self._record(first, self._decoder.prefill(first, starts, copies, self._top(jobs)))

    def _start(self, row: int | None, prompt: list[int]) -> int:
        """First prompt position to process, given the row of the conversation (None: a fresh one)."""
        if row is None:
            return 0
        table, length = self._table, len(prompt)
        keys = min(int(table.total[row]) - 1, length)
        differ = np.flatnonzero(table.tokens[row, :keys] != np.asarray(prompt[:keys]))
        common = int(differ[0]) if len(differ) else keys
        # The draft's key at common - 1 needs the hidden state there and the (new) token after it.
        return max(0, min(common - (self._gamma > 0), length - 1))

    def _seat(self, job: _Job) -> int:
        """Write a request into a row; returns the first position to process."""
        table, request, sampling = self._table, job.request, job.request.sampling
        row, known = table.take(request.session_id)
        start = self._start(row if known else None, request.prompt_ids)
        job.prompt_length = length = len(request.prompt_ids)
        job.greedy = sampling.temperature == 0
        job.plain_temperature = sampling.temperature in (0, 1)
        table.jobs[row] = job
        table.tokens[row, :length] = request.prompt_ids
        table.total[row] = length
        table.end[row] = end = min(length + sampling.max_new_tokens, self._config.max_context)
        table.allow_stops(len(sampling.stop_token_ids))
        table.stops[row] = -1
        table.stops[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        table.accepted[row] = 0
        table.temperature[row] = 1.0 if job.greedy else sampling.temperature
        table.greedy[row] = job.greedy
        draws = request_uniforms(sampling.seed, int(end) - length + self._gamma + 1)
        table.uniforms[row, : len(draws)] = torch.from_numpy(draws).to(table.uniforms.device)
        return start

    @staticmethod
    def _top(jobs: Sequence[_Job]) -> int:
        return max(job.request.sampling.top_logprobs for job in jobs)

    def _record(self, first: int, emitted: Emitted) -> None:
        """Append what a pass emitted, cut at stop tokens and limits, and finish what has ended."""
        table, (batch, width) = self._table, emitted.tokens.shape
        rows = np.arange(first, first + batch)
        counts = np.minimum(emitted.counts, table.end[rows] - table.total[rows])
        columns = np.arange(width)
        stop = (emitted.tokens[:, :, None] == table.stops[rows][:, None, :]).any(-1)
        stop &= columns < counts[:, None]
        stopped = stop.any(1)
        counts = np.where(stopped, stop.argmax(1) + 1, counts)
        row, column = np.nonzero(columns < counts[:, None])
        place = first + row, table.total[first + row] + column
        table.tokens[place] = emitted.tokens[row, column]
        table.logprobs[place] = emitted.logprobs[row, column]
        table.entropies[place] = emitted.entropies[row, column]
        table.versions[place] = self._stats.policy_version
        if emitted.drafted:
            table.accepted[rows, emitted.counts - 1] += 1
            np.add.at(self._accepted, emitted.counts - 1, 1)
        if emitted.top_ids is not None:
            for job, ids, values, count in zip(
                table.jobs[first : first + batch], emitted.top_ids, emitted.top_logprobs, counts, strict=True
            ):
                k = job.request.sampling.top_logprobs
                job.top += [
                    list(zip(ids[i, :k].tolist(), values[i, :k].tolist(), strict=True)) for i in range(count)
                ]
        table.total[rows] += counts
        self._stats.generated_tokens += int(counts.sum())
        ended = stopped | (table.total[rows] >= table.end[rows])
        for index in np.flatnonzero(ended)[::-1]:
            reason = FinishReason.STOP if stopped[index] else FinishReason.LENGTH
            self._finish(table.jobs[first + index], int(first + index), reason)

    def _abort(self, chosen: frozenset[str] | None) -> None:
        def hit(job: _Job) -> bool:
            return chosen is None or job.request.request_id in chosen

        for row in reversed(range(self._table.active)):
            if hit(self._table.jobs[row]):
                self._finish(self._table.jobs[row], row, FinishReason.ABORT)
        aborted = [job for job in self._waiting if hit(job)]
        self._waiting = deque(job for job in self._waiting if not hit(job))
        for job in aborted:
            self._finish(job, None, FinishReason.ABORT)

    def _finish(self, job: _Job, row: int | None, reason: FinishReason) -> None:
        """Answer a request and give its row back (row None: it never had one)."""
        result = GenerateResult(
            request_id=job.request.request_id,
            output_ids=[],
            logprobs=[],
            entropies=[],
            versions=[],
            finish_reason=reason,
            spec=SpecCounts(),
            top_logprobs=job.top if job.request.sampling.top_logprobs else None,
        )
        if row is not None:
            table = self._table
            output = slice(job.prompt_length, int(table.total[row]))
            result.output_ids = table.tokens[row, output].tolist()
            result.logprobs = table.logprobs[row, output].tolist()
            result.entropies = table.entropies[row, output].tolist()
            result.versions = table.versions[row, output].tolist()
            if self._gamma:
                result.spec = _counts(table.accepted[row])
            table.release(row, keep=True)
        with self._wake:
            self._jobs.pop(job.request.request_id, None)
        _resolve(job, lambda future: future.set_result(result))


def _resolve(job: _Job, action: Callable[[asyncio.Future], None]) -> None:
    """Settle a request's future on its own event loop, unless the caller is gone."""

    def settle() -> None:
        if not job.future.done():
            action(job.future)

    if not job.loop.is_closed():
        job.loop.call_soon_threadsafe(settle)


def _counts(accepted: np.ndarray) -> SpecCounts:
    """Sums from the number of verify steps by accepted drafts, [gamma + 1]."""
    gamma = len(accepted) - 1
    reached = accepted[::-1].cumsum()[::-1].tolist()  # reached[k]: steps with at least k accepted
    return SpecCounts(
        drafted=reached[:gamma],
        accepted=reached[1:],
        verify_steps=reached[0],
        proposed=gamma * reached[0],
    )


def _pick_device(device: str) -> str:
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"
