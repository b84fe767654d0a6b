"""Generates the turns of attempts with an engine, and continues turns that were aborted."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from rlpipe.envs.base import InfrastructureError
from rlpipe.rollout.attempt import Attempt, ExitReason, Masked
from rlpipe.rollout.engine import Engine
from rlpipe.rollout.turn import Turn, joined, next_route, stream_seed
from rlpipe.types import FinishReason, GenerateRequest, GenerateResult, SamplingParams

_MAX_EMPTY_ABORTS = 100  # consecutive, in one turn


class TurnGenerator:
    """Generates turns with an engine.

    engine: may be replaced; the new engine continues turns that the previous one ends with ABORT. running:
    turns in the engine. ignore_eos: whether turns end only by their budget.
    """

    def __init__(self, engine: Engine, *, ignore_eos: bool) -> None:
        self.engine = engine
        self.running = 0
        self._ignore_eos = ignore_eos
        self._closed = False

    def close(self) -> None:
        """Abort all turns; from now on, `generate` masks the trajectory."""
        self._closed = True
        self.engine.abort()

    def check_open(self) -> None:
        """Raise Masked if the generator is closed."""
        if self._closed:
            raise Masked(ExitReason.CLOSED, "the collector was closed")

    async def generate(self, attempt: Attempt, turn: Turn) -> GenerateResult:
        """Generate one turn; after an abort, continue it with requests that have other seeds."""
        generated: GenerateResult | None = None
        empty_aborts = 0
        started = time.monotonic()

        while generated is None or generated.finish_reason is FinishReason.ABORT:
            self.check_open()
            result = await self._request(attempt, turn, generated)

            # An engine that keeps aborting must not block the trajectory for ever.
            empty_aborts = 0 if len(result.output_ids) else empty_aborts + 1
            if empty_aborts == _MAX_EMPTY_ABORTS:
                raise InfrastructureError(f"the engine aborted a turn {empty_aborts} times without a token")

            extended: GenerateResult = result if generated is None else joined(generated, result)

            # If the last token of the budget arrives together with an abort, the turn is complete.
            if extended.finish_reason is FinishReason.ABORT and len(extended.output_ids) >= turn.budget:
                extended.finish_reason = FinishReason.LENGTH
            generated = extended

        attempt.gen_seconds += time.monotonic() - started
        attempt.stored[turn.session_id] = len(turn.prompt) + len(generated.output_ids)
        return generated

    async def _request(
        self, attempt: Attempt, turn: Turn, generated: GenerateResult | None
    ) -> GenerateResult:
        """Request the missing tokens of a turn. generated: the result of earlier requests, None at first."""
        task, prompt = attempt.task, turn.prompt
        done = 0 if generated is None else len(generated.output_ids)
        if generated is not None:
            prompt = np.concatenate((prompt, generated.output_ids))
        start = len(prompt)
        request = GenerateRequest(
            request_id=f"{turn.session_id}/{turn.key}/{start}",
            prompt_ids=prompt,
            sampling=SamplingParams(
                temperature=task.temperature,
                max_new_tokens=turn.budget - done,
                stop_token_ids=() if self._ignore_eos else turn.stop_token_ids,
                seed=stream_seed(task.seed, turn.key, start),
                top_logprobs=turn.top_logprobs,
                record_drafts=task.record,
                routes=task.routes,
                routes_from=next_route(turn.routes, generated),
            ),
            session_id=turn.session_id,
        )

        self.running += 1
        try:
            return await self.engine.generate(request)
        except asyncio.CancelledError:
            # The caller was cancelled, so the engine need not finish the turn.
            self.engine.abort([request.request_id])
            raise
        except Exception:
            attempt.engine_failed = True
            raise
        finally:
            self.running -= 1
