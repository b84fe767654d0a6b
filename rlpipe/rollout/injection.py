"""Injected faults in rollouts: an engine with old or noisy weights, and turns that take long.

    published weights --> delayed by `stale_steps` versions --> noise --> the engine
    a turn            --> the engine --> for some, further tokens that are discarded --> the unchanged turn

The wrapper keeps the engine's contract, so collector and engine need no change. Which turns take long depends
only on the seeds of requests, so a run can be repeated with the same faults. (Slow environments:
`rlpipe.envs.slow`.)
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpipe.rollout.engine import Engine, EngineStats
from rlpipe.types import FinishReason, GenerateRequest, GenerateResult

if TYPE_CHECKING:
    import torch

    from rlpipe.config.injection import InjectionConfig


class InjectedEngine:
    """An engine with old or noisy weights, in which some turns take longer.

    Invariant: served version >= newest version - stale_steps. After a restart there are no older weights to
    serve, so the weights of the start are served until they are `stale_steps` old.
    """

    def __init__(
        self,
        engine: Engine,
        config: InjectionConfig,
        *,
        max_context: int,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Wrap `engine`.

        Args:
            engine: the engine that generates; `close` closes it.
            config: the faults.
            max_context: tokens of a conversation.
            weights: the weights that the engine started with.

        Raises:
            ValueError: if the weights must be noisy and `weights` is None.
        """
        self._engine, self._config, self._max_context = engine, config, max_context
        self._held: deque[tuple[int, dict[str, torch.Tensor]]] = deque()
        self._serving = 0
        if config.weight_noise:
            if weights is None:
                raise ValueError("injection.weight_noise also disturbs the weights of the start: pass them.")
            self._serve(weights, 0)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Return the engine's turn; for some turns, decode and discard further tokens first."""
        result = await self._engine.generate(request)
        context = np.concatenate((request.prompt_ids, result.output_ids))
        tokens = min(self._config.long_turn_tokens, self._max_context - len(context))
        is_long = random.Random(f"long/{request.sampling.seed}").random() < self._config.long_turn_share
        if is_long and tokens > 0 and result.finish_reason is not FinishReason.ABORT:
            await self._decode_on(request, context, tokens)
        return result

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Abort requests of the engine."""
        self._engine.abort(request_ids)

    def end_session(self, session_id: str) -> None:
        """End a session of the engine."""
        self._engine.end_session(session_id)

    def pause(self) -> None:
        """Pause the engine."""
        self._engine.pause()

    def resume(self) -> None:
        """Resume the engine."""
        self._engine.resume()

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Store a version, and serve the version that is now `stale_steps` old, if there is one."""
        if not self._config.stale_steps:
            self._serve(weights, version)
            return

        # The trainer went back to a checkpoint: versions after it must not be served.
        if version < self._serving or (self._held and version <= self._held[-1][0]):
            self._held.clear()
            self._serve(weights, version)

        self._held.append((version, {name: weight.clone() for name, weight in weights.items()}))
        oldest_allowed = version - self._config.stale_steps
        if self._serving >= oldest_allowed:
            return

        # If versions were skipped, several may be too old; serve the oldest that is allowed.
        while self._held[0][0] < oldest_allowed:
            self._held.popleft()
        held_version, held = self._held.popleft()
        self._serve(held, held_version)

    def stats(self) -> EngineStats:
        """Return the engine's counters; discarded tokens count as generated."""
        return self._engine.stats()

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def _serve(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        noisy = with_noise(weights, self._config.weight_noise, version)
        self._engine.update_weights(noisy, version)
        self._serving = version

    async def _decode_on(self, request: GenerateRequest, context: np.ndarray, tokens: int) -> None:
        """Decode further tokens after a turn and discard them."""
        sampling = replace(request.sampling, max_new_tokens=tokens, stop_token_ids=(), top_logprobs=0)
        longer = GenerateRequest(
            request_id=f"{request.request_id}/long", prompt_ids=context, sampling=sampling
        )
        try:
            await self._engine.generate(longer)
        except asyncio.CancelledError:
            self._engine.abort([longer.request_id])
            raise


def with_noise(weights: Mapping[str, torch.Tensor], scale: float, version: int) -> Mapping[str, Any]:
    """Return w (1 + scale * n), with n standard normal, sampled with the version as the seed.

    Scale 0 returns the weights unchanged.
    """
    if not scale:
        return weights

    import torch

    generator = torch.Generator().manual_seed(version)
    noisy = {}
    for name in sorted(weights):
        weight = weights[name]
        noise = torch.randn(weight.shape, generator=generator)
        noisy[name] = (weight.float() * (1 + scale * noise)).to(weight.dtype)
    return noisy
