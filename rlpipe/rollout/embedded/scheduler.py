"""Request scheduling: admission to rows, bookkeeping of emitted tokens, and the end of requests.

Owns the waiting queue and the answers; runs only on the engine thread. A round admits the requests that fit,
runs one step of all rows, answers the requests that ended, and releases their rows.

For a conversation with cached keys only the new tokens are processed. Among requests with equal prompts that
join in one round, one is processed, and its keys are copied for the others.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from rlpipe.rollout.embedded.decoder import Decoder, Emitted
from rlpipe.rollout.embedded.rows import Cached, RowTable
from rlpipe.rollout.engine import EngineStats
from rlpipe.spec.gamma import AdaptiveGamma, GammaPolicy
from rlpipe.spec.sampling import request_uniforms
from rlpipe.types import DraftStep, FinishReason, GenerateRequest, GenerateResult, SpecCounts, unrecorded


@dataclass(slots=True)
class Job:
    """A request in the engine.

    finish: called once with the answer, on the engine thread. top, drafts: collected on request.
    """

    request: GenerateRequest
    finish: Callable[[GenerateResult], None]
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    drafts: list[DraftStep] = field(default_factory=list)


class Scheduler:
    """Runs requests over a row table.

    policy: chooses gamma. depth: maximum of draft tokens that a step accepts per row. drafts: maximum that it
    proposes. streams: uniforms per position. prefill_tokens: token budget of one admission.
    """

    def __init__(
        self,
        table: RowTable,
        decoder: Decoder,
        policy: GammaPolicy,
        *,
        depth: int,
        drafts: int,
        streams: int,
        max_context: int,
        prefill_tokens: int,
    ) -> None:
        self._table, self._decoder, self._policy = table, decoder, policy
        self._depth, self._drafts, self._streams = depth, drafts, streams
        self._max_context, self._prefill_tokens = max_context, prefill_tokens
        self._gamma = 0  # in the current round
        self._waiting: deque[Job] = deque()
        self._stats = EngineStats()
        self.version = 0

    def submit(self, job: Job) -> None:
        """Queue a request."""
        self._waiting.append(job)

    def has_work(self) -> bool:
        """Return whether a request is waiting or running."""
        return bool(self._waiting or self._table.active)

    def round(self) -> None:
        """Admit the requests that fit, and run one step of all rows."""
        decoding = self._table.active
        self._gamma = self._policy.choose(min(self._table.rows, decoding + len(self._waiting)))
        self._table.tidy()

        starts, copies = self._admit()
        jobs = self._table.jobs[: self._table.active]
        if not jobs:
            return
        sampling = [job.request.sampling for job in jobs]
        plain = decoding == len(jobs)  # no request joined
        started = time.perf_counter()
        emitted = self._decoder.step(
            starts,
            copies,
            gamma=self._gamma,
            top=max(s.top_logprobs for s in sampling),
            record=any(s.record_drafts for s in sampling),
        )
        seconds = time.perf_counter() - started
        tokens = self._record(emitted)
        self._stats.row_steps += decoding

        # A step that includes prefill would distort the measured cost of decoding.
        if plain and isinstance(self._policy, AdaptiveGamma):
            self._policy.timed(decoding, self._gamma, seconds)
            if self._gamma:
                # The time that the same tokens would have taken without drafts.
                without = tokens * self._policy.seconds(decoding, 0) / decoding
                self._stats.decode_seconds += seconds
                self._stats.plain_seconds += without
                self._stats.predicted_seconds += without / self._policy.speedup(decoding, self._gamma)

    def abort(self, chosen: frozenset[str] | None) -> None:
        """Answer the named requests (None: all) with the tokens generated so far."""

        def hit(job: Job) -> bool:
            return chosen is None or job.request.request_id in chosen

        # Start from the end, because finishing a row moves the last active row into its position.
        for row in reversed(range(self._table.active)):
            if hit(self._table.jobs[row]):
                self._finish(self._table.jobs[row], row, FinishReason.ABORT)

        aborted = [job for job in self._waiting if hit(job)]
        self._waiting = deque(job for job in self._waiting if not hit(job))
        for job in aborted:
            self._finish(job, None, FinishReason.ABORT)

    def stats(self, busy_seconds: float) -> EngineStats:
        """Return the counters since the start. busy_seconds: time in which steps were computed."""
        return replace(
            self._stats,
            policy_version=self.version,
            running=self._table.active,
            waiting=len(self._waiting),
            busy_seconds=busy_seconds,
            kv_rows=self._table.rows,
            kv_tokens=self._table.max_parked_tokens,
            spec=copy.deepcopy(self._stats.spec),
        )

    def _admit(self) -> tuple[list[int], list[int]]:
        """Assign rows to waiting requests, oldest first; return `starts` and `copies` of `Decoder.step`."""
        leaders, followers = self._choose()
        table = self._table
        first, copies = table.active, []

        # Sort by length, so that the prompts of neighbours need little padding.
        leaders.sort(key=lambda item: item[0])

        # Copies come after all rows that are processed; `Decoder.step` expects this order. If several leaders
        # have the same prompt, copies use the first.
        starts = [self._seat(job) for _, job in leaders]
        for row, (_, leader) in enumerate(leaders, first):
            for job in followers.pop(leader.request.prompt_ids.tobytes(), ()):
                self._seat(job)
                copies.append(row)

        self._stats.prefill_tokens += int(table.total[first : first + len(starts)].sum()) - sum(starts)
        return starts, copies

    def _choose(self) -> tuple[list[tuple[int, Job]], dict[bytes, list[Job]]]:
        """Pop requests that fit: [(tokens to process, job)], and the jobs that copy keys, by prompt."""
        room, budget = self._table.rows - self._table.active, self._prefill_tokens
        leaders: list[tuple[int, Job]] = []
        followers: dict[bytes, list[Job]] = {}
        while self._waiting and room:
            job = self._waiting[0]
            prompt = job.request.prompt_ids
            if len(prompt) >= self._max_context:
                self._finish(self._waiting.popleft(), None, FinishReason.LENGTH)
                continue

            cached, key = self._table.cached(job.request.session_id), prompt.tobytes()
            if key in followers and cached is None:
                followers[key].append(job)
            else:
                # A conversation with cached keys copies no keys, even if another request has the same prompt.
                size = len(prompt) - self._start(cached, prompt)
                if leaders and size > budget:
                    break
                budget -= size
                leaders.append((size, job))
                followers.setdefault(key, [])

            self._waiting.popleft()
            room -= 1
        return leaders, followers

    def _start(self, cached: Cached | None, prompt: np.ndarray) -> int:
        """Return the first prompt position to process. cached: the conversation's cache, None if new."""
        if cached is None:
            return 0
        length, depths = len(prompt), self._table.hidden.shape[1]
        keys = max(0, min(len(cached.tokens) - 1, length))
        differ = np.flatnonzero(cached.tokens[:keys] != prompt[:keys])
        common = int(differ[0]) if len(differ) else keys
        start = min(common, length - 1)
        if self._depth:
            # A key of the draft's last layer depends on the tokens up to `depths` positions later.
            start = min(start, common - depths)
        if self._gamma:
            start = min(start, cached.draft_keys + 1 - depths)
        return max(0, start)

    def _seat(self, job: Job) -> int:
        """Write a request into a row; return the first position to process."""
        table, request, sampling = self._table, job.request, job.request.sampling
        row, known = table.take(request.session_id)
        start = self._start(table.cached_in(row) if known else None, request.prompt_ids)

        length = len(request.prompt_ids)
        end = min(length + sampling.max_new_tokens, self._max_context)
        table.seat(
            row,
            job,
            prompt=request.prompt_ids,
            end=end,
            temperature=sampling.temperature,
            stops=sampling.stop_token_ids,
            uniforms=request_uniforms(sampling.seed, end - length + self._depth + 1, self._streams),
        )
        return start

    def _record(self, emitted: Emitted) -> int:
        """Append emitted tokens up to a stop token or the limit, and finish the requests that ended.

        Returns the number of tokens appended.
        """
        table, (batch, width) = self._table, emitted.tokens.shape
        rows = slice(0, batch)
        columns = np.arange(width)

        # A row stops at its first stop token or at its maximum length.
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
            self._count(emitted, counts)

        if emitted.top_ids is not None:
            for index, count in enumerate(counts):
                job = table.jobs[index]
                k = job.request.sampling.top_logprobs
                ids, values = emitted.top_ids[index, :count, :k], emitted.top_logprobs[index, :count, :k]
                job.top += [
                    list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)
                ]

        table.total[rows] += counts
        total = int(counts.sum())
        self._stats.generated_tokens += total

        # From the end, as in `abort`.
        ended = stopped | (table.total[rows] >= table.end[rows])
        for index in np.flatnonzero(ended)[::-1].tolist():
            reason = FinishReason.STOP if stopped[index] else FinishReason.LENGTH
            self._finish(table.jobs[index], index, reason)
        return total

    def _count(self, emitted: Emitted, counts: np.ndarray) -> None:
        """Count the drafts of the verified rows, update the policy, and record drafts on request."""
        table, rows = self._table, slice(0, emitted.verified)
        kept = emitted.counts[rows, None] - 1
        depths = np.arange(self._depth)
        gamma = min(self._gamma, self._depth)
        reached, accepted = (kept >= depths) & (depths < gamma), kept > depths
        proposed = self._drafts if gamma == self._depth else gamma

        table.drafted[rows] += reached
        table.accepted[rows] += accepted
        table.verify_steps[rows] += 1
        table.proposed[rows] += proposed

        spec = SpecCounts(
            drafted=reached.sum(0).tolist(),
            accepted=accepted.sum(0).tolist(),
            verify_steps=emitted.verified,
            proposed=emitted.verified * proposed,
        )
        self._stats.spec.add(spec)

        # Accepted drafts after a stop token save no time.
        useful = counts[rows, None] - 1
        self._policy.observe(
            ((useful >= depths) & (depths < gamma)).sum(0).tolist()[:gamma],
            (useful > depths).sum(0).tolist()[:gamma],
        )

        if emitted.draft_tokens is None:
            return
        for row, job in enumerate(table.jobs[rows]):
            if job.request.sampling.record_drafts:
                step = DraftStep(
                    position=int(table.total[row] - table.prompt[row]),
                    tokens=emitted.draft_tokens[row].tolist(),
                    target_probs=emitted.draft_target_probs[row].tolist(),
                    draft_probs=emitted.draft_probs[row].tolist(),
                    num_accepted=int(kept[row, 0]),
                )
                job.drafts.append(step)

    def _finish(self, job: Job, row: int | None, reason: FinishReason) -> None:
        """Answer a request and release its row (None: it never had one)."""
        table, request = self._table, job.request
        output = slice(0, 0) if row is None else slice(len(request.prompt_ids), int(table.total[row]))
        row_or_any = row or 0
        result = GenerateResult(
            request_id=request.request_id,
            output_ids=table.tokens[row_or_any, output].astype(np.int32),
            logprobs=table.logprobs[row_or_any, output].copy(),
            entropies=table.entropies[row_or_any, output].copy(),
            versions=table.versions[row_or_any, output].copy(),
            finish_reason=reason,
            spec=SpecCounts() if row is None else self._spec(row),
            top_logprobs=job.top if request.sampling.top_logprobs else None,
            drafts=job.drafts if request.sampling.record_drafts else None,
            routes=self._routes(row, request.sampling.routes_from) if request.sampling.routes else None,
            routes_from=request.sampling.routes_from,
        )
        if row is not None:
            table.release(row)
        job.finish(result)

    def _routes(self, row: int | None, start: int) -> np.ndarray | None:
        """Return the experts of a row's tokens from `start` on; the last token, still unread, has none."""
        if row is None or self._table.routes is None:
            return None
        routes = self._table.routes[row, start : int(self._table.total[row])].numpy().copy()
        routes[-1] = unrecorded(routes)
        return routes

    def _spec(self, row: int) -> SpecCounts:
        """Return the counts of drafts of a row's request; lists are empty when no token was drafted."""
        table = self._table
        if not table.verify_steps[row]:
            return SpecCounts()
        return SpecCounts(
            drafted=table.drafted[row].tolist(),
            accepted=table.accepted[row].tolist(),
            verify_steps=int(table.verify_steps[row]),
            proposed=int(table.proposed[row]),
        )
