"""Which request runs in which row: admission, bookkeeping of what was emitted, and the end of requests.

Owns the waiting queue and the answers; runs on the engine thread only. One round: admit what fits, run
one step of everything, answer the requests that ended and give their rows back.

Seats: a conversation whose keys are still cached processes only what it has not seen; requests with
equal prompts that join together are processed once, and the keys copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rlpipe.rollout.embedded.decoder import Decoder, Emitted
from rlpipe.rollout.embedded.rows import RowTable
from rlpipe.rollout.engine import EngineStats
from rlpipe.spec.sampling import request_uniforms
from rlpipe.types import FinishReason, GenerateRequest, GenerateResult, SpecCounts


@dataclass(slots=True)
class Job:
    """A request on its way through the engine.

    finish: called once, on the engine thread, with the answer. top: collected top_logprobs.
    """

    request: GenerateRequest
    finish: Callable[[GenerateResult], None]
    top: list[list[tuple[int, float]]] = field(default_factory=list)


class Scheduler:
    """Requests over a row table. gamma: drafts per step; prefill_tokens: budget of one admission."""

    def __init__(
        self, table: RowTable, decoder: Decoder, *, gamma: int, max_context: int, prefill_tokens: int
    ) -> None:
        self._table, self._decoder, self._gamma = table, decoder, gamma
        self._max_context, self._prefill_tokens = max_context, prefill_tokens
        self._waiting: deque[Job] = deque()
        self._accepted = np.zeros(gamma + 1, np.int64)
        self._stats = EngineStats()
        self.version = 0

    def submit(self, job: Job) -> None:
        """Queue a request."""
        self._waiting.append(job)

    def has_work(self) -> bool:
        """Whether a round would do anything."""
        return bool(self._waiting or self._table.active)

    def round(self) -> None:
        """Admit what fits and run one step of everything."""
        starts, copies = self._admit()
        jobs = self._table.jobs[: self._table.active]
        if jobs:
            top = max(job.request.sampling.top_logprobs for job in jobs)
            self._record(self._decoder.step(starts, copies, top))

    def abort(self, chosen: frozenset[str] | None) -> None:
        """Answer the named requests (None: all) with what they have."""

        def hit(job: Job) -> bool:
            return chosen is None or job.request.request_id in chosen

        for row in reversed(range(self._table.active)):
            if hit(self._table.jobs[row]):
                self._finish(self._table.jobs[row], row, FinishReason.ABORT)
        aborted = [job for job in self._waiting if hit(job)]
        self._waiting = deque(job for job in self._waiting if not hit(job))
        for job in aborted:
            self._finish(job, None, FinishReason.ABORT)

    def stats(self, busy_seconds: float) -> EngineStats:
        """Counters since start."""
        return EngineStats(
            policy_version=self.version,
            running=self._table.active,
            waiting=len(self._waiting),
            generated_tokens=self._stats.generated_tokens,
            prefill_tokens=self._stats.prefill_tokens,
            busy_seconds=busy_seconds,
            spec=_counts(self._accepted),
        )

    def _admit(self) -> tuple[list[int], list[int]]:
        """Give waiting requests rows, oldest first; returns what `Decoder.step` needs to know of them."""
        leaders, followers = self._choose()
        table = self._table
        first, copies = table.active, []
        leaders.sort(key=lambda item: item[0])
        starts = [self._seat(job) for _, job in leaders]
        for row, (_, leader) in enumerate(leaders, first):
            for job in followers[tuple(leader.request.prompt_ids)]:
                self._seat(job)
                copies.append(row)
        self._stats.prefill_tokens += int(table.total[first : first + len(starts)].sum()) - sum(starts)
        return starts, copies

    def _choose(self) -> tuple[list[tuple[int, Job]], dict[tuple[int, ...], list[Job]]]:
        """Pop requests that fit: [(tokens to process, job)], and by prompt those that copy its keys."""
        room, budget = self._table.rows - self._table.active, self._prefill_tokens
        leaders: list[tuple[int, Job]] = []
        followers: dict[tuple[int, ...], list[Job]] = {}
        while self._waiting and room:
            job = self._waiting[0]
            prompt = job.request.prompt_ids
            if len(prompt) >= self._max_context:
                self._finish(self._waiting.popleft(), None, FinishReason.LENGTH)
                continue
            row, key = self._table.idle_row(job.request.session_id), tuple(prompt)
            if key in followers and row is None:
                followers[key].append(job)
            elif key in followers:
                break  # a conversation with keys of its own: next round
            else:
                size = len(prompt) - self._start(row, prompt)
                if leaders and size > budget:
                    break
                budget -= size
                leaders.append((size, job))
                followers[key] = []
            self._waiting.popleft()
            room -= 1
        return leaders, followers

    def _start(self, row: int | None, prompt: list[int]) -> int:
        """First prompt position to process, given the row of the conversation (None: a fresh one)."""
        if row is None:
            return 0
        table, length = self._table, len(prompt)
        keys = max(0, min(int(table.total[row]) - 1, length))
        differ = np.flatnonzero(table.tokens[row, :keys] != np.asarray(prompt[:keys]))
        common = int(differ[0]) if len(differ) else keys
        # The draft's key at common - 1 needs the hidden state there and the (new) token after it.
        return max(0, min(common - (self._gamma > 0), length - 1))

    def _seat(self, job: Job) -> int:
        """Write a request into a row; returns the first position to process."""
        table, request, sampling = self._table, job.request, job.request.sampling
        row, known = table.take(request.session_id)
        start = self._start(row if known else None, request.prompt_ids)
        length = len(request.prompt_ids)
        end = min(length + sampling.max_new_tokens, self._max_context)
        table.seat(
            row,
            job,
            prompt=request.prompt_ids,
            end=end,
            temperature=sampling.temperature,
            stops=sampling.stop_token_ids,
            uniforms=request_uniforms(sampling.seed, end - length + self._gamma + 1),
        )
        return start

    def _record(self, emitted: Emitted) -> None:
        """Append what a step emitted, cut at stop tokens and limits, and finish what has ended."""
        table, (batch, width) = self._table, emitted.tokens.shape
        rows = slice(0, batch)
        columns = np.arange(width)
        counts = np.minimum(emitted.counts, table.end[rows] - table.total[rows])
        stop = (emitted.tokens[:, :, None] == table.stops[rows][:, None, :]).any(-1)
        stop &= columns < counts[:, None]
        stopped = stop.any(1)
        counts = np.where(stopped, stop.argmax(1) + 1, counts)
        row, column = np.nonzero(columns < counts[:, None])
        place = row, table.total[row] + column
        table.tokens[place] = emitted.tokens[row, column]
        table.logprobs[place] = emitted.logprobs[row, column]
        table.entropies[place] = emitted.entropies[row, column]
        table.versions[place] = self.version
        if emitted.verified:
            kept = emitted.counts[: emitted.verified] - 1
            table.accepted[np.arange(emitted.verified), kept] += 1
            self._accepted += np.bincount(kept, minlength=len(self._accepted))
        if emitted.top_ids is not None:
            for index, count in enumerate(counts):
                job = table.jobs[index]
                k = job.request.sampling.top_logprobs
                ids, values = emitted.top_ids[index, :count, :k], emitted.top_logprobs[index, :count, :k]
                job.top += [
                    list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)
                ]
        table.total[rows] += counts
        self._stats.generated_tokens += int(counts.sum())
        ended = stopped | (table.total[rows] >= table.end[rows])
        for index in np.flatnonzero(ended)[::-1].tolist():
            reason = FinishReason.STOP if stopped[index] else FinishReason.LENGTH
            self._finish(table.jobs[index], index, reason)

    def _finish(self, job: Job, row: int | None, reason: FinishReason) -> None:
        """Answer a request and give its row back (row None: it never had one)."""
        table, request = self._table, job.request
        output = slice(0, 0) if row is None else slice(len(request.prompt_ids), int(table.total[row]))
        row_or_any = row or 0
        result = GenerateResult(
            request_id=request.request_id,
            output_ids=table.tokens[row_or_any, output].tolist(),
            logprobs=table.logprobs[row_or_any, output].tolist(),
            entropies=table.entropies[row_or_any, output].tolist(),
            versions=table.versions[row_or_any, output].tolist(),
            finish_reason=reason,
            spec=SpecCounts() if row is None else _counts(table.accepted[row]),
            top_logprobs=job.top if request.sampling.top_logprobs else None,
        )
        if row is not None:
            table.release(row)
        job.finish(result)


def _counts(accepted: np.ndarray) -> SpecCounts:
    """Sums from the number of verify steps by accepted drafts, [gamma + 1]; nothing without drafts."""
    gamma = len(accepted) - 1
    if gamma == 0:
        return SpecCounts()
    reached = accepted[::-1].cumsum()[::-1].tolist()  # reached[k]: steps with at least k accepted
    return SpecCounts(
        drafted=reached[:gamma],
        accepted=reached[1:],
        verify_steps=reached[0],
        proposed=gamma * reached[0],
    )
