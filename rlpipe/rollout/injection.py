"""Injected faults of rollouts: an engine with old or noisy weights, and turns that take long.

    published weights --> held for `stale_steps` versions --> noise --> the engine
    a turn            --> the engine --> now and then further tokens, thrown away --> the turn as it was

The wrapper keeps the engine's contract, so neither collector nor engine knows of it. Draws come from the
seeds of requests, so a run repeats its faults. (Slow environments: `rlpipe.envs.slow`.)
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
    """An engine whose weights are old or noisy, and some of whose turns take longer.

    Invariant: served version >= newest version - stale_steps. After a restart, which leaves no older weights
    to serve, it serves the newest until they are that old.
    """

    def __init__(
        self,
        engine: Engine,
        config: InjectionConfig,
        max_context: int,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Disturb `engine`; max_context: tokens of a conversation. weights: those it started with.

        Raises ValueError when weights are to be noisy and `weights` is None.
        """
        self._engine, self._config, self._max_context = engine, config, max_context
        self._held: deque[tuple[int, dict[str, torch.Tensor]]] = deque()
        self._serving = 0
        if config.weight_noise:
            if weights is None:
                raise ValueError("injection.weight_noise also disturbs the weights of the start: pass them.")
            self._serve(weights, 0)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """The engine's turn; if it drew a long one, returned only after further tokens were decoded."""
        result = await self._engine.generate(request)
        context = np.concatenate((request.prompt_ids, result.output_ids))
        tokens = min(self._config.long_turn_tokens, self._max_context - len(context))
        drawn = random.Random(f"long/{request.sampling.seed}").random() < self._config.long_turn_share
        if drawn and tokens > 0 and result.finish_reason is not FinishReason.ABORT:
            await self._decode_on(request, context, tokens)
        return result

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """The engine's."""
        self._engine.abort(request_ids)

    def end_session(self, session_id: str) -> None:
        """The engine's."""
        self._engine.end_session(session_id)

    def pause(self) -> None:
        """The engine's."""
        self._engine.pause()

    def resume(self) -> None:
        """The engine's."""
        self._engine.resume()

    def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Take note of a version, and serve one that is now `stale_steps` old, if there is one."""
        if not self._config.stale_steps:
            self._serve(weights, version)
            return
        if version < self._serving or (self._held and version <= self._held[-1][0]):
            self._held.clear()  # the trainer went back to a checkpoint: what it learnt since is not served
            self._serve(weights, version)
        self._held.append((version, {name: weight.clone() for name, weight in weights.items()}))
        oldest_allowed = version - self._config.stale_steps
        if self._serving >= oldest_allowed:
            return
        while self._held[0][0] < oldest_allowed:
            self._held.popleft()
        held_version, held = self._held.popleft()
        self._serve(held, held_version)

    def stats(self) -> EngineStats:
        """The engine's; tokens that are thrown away count as generated."""
        return self._engine.stats()

    def close(self) -> None:
        """The engine's."""
        self._engine.close()

    def _serve(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        noisy = with_noise(weights, self._config.weight_noise, version)
        self._engine.update_weights(noisy, version)
        self._serving = version

    async def _decode_on(self, request: GenerateRequest, context: np.ndarray, tokens: int) -> None:
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
    """w (1 + scale * n), n standard normal and of a stream of its own for each version; scale 0: as given."""
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
