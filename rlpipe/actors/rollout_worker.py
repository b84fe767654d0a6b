"""A rollout worker: one engine, one environment suite, one collector.

A plain class: Ray wraps it in an actor, the inline cluster uses it as it is. All methods are
coroutines, so one event loop serves any number of groups at once while the engine's own thread
decodes. Weight updates happen between two decode steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from rlpipe.config.paths import resolve
from rlpipe.config.run import Config
from rlpipe.envs import make_suite
from rlpipe.metrics.values import Last, Mean, Ratio, Sum, Value
from rlpipe.rollout.chat import ChatFormat
from rlpipe.rollout.collector import Collector
from rlpipe.rollout.embedded import EmbeddedEngine
from rlpipe.types import Group, Prompt, Trajectory
from rlpipe.weights.sync import WeightPayload, unpack_weights


class RolloutWorker:
    """Owns its engine and sandbox; everything is freed by `close`."""

    def __init__(self, config: Config) -> None:
        path = resolve(config.model.path)
        self._suite = make_suite(config.env, seed=config.run.seed)
        self._engine = EmbeddedEngine(config.rollout, config.spec, path)
        self._collector = Collector(
            engine=self._engine,
            suite=self._suite,
            chat=ChatFormat.from_pretrained(path),
            rollout=config.rollout,
            env=config.env,
        )
        self._last = self._engine.stats()
        self._last_time = time.monotonic()

    async def collect(self, prompt: Prompt, group_size: int) -> Group:
        """Play one group."""
        return await self._collector.collect(prompt, group_size)

    async def evaluate(
        self, instance_ids: Sequence[str], samples: int, temperature: float
    ) -> list[Trajectory]:
        """Play held-out instances, `samples` times each."""
        return await self._collector.evaluate(instance_ids, samples, temperature)

    async def update_weights(self, payload: WeightPayload) -> dict[str, Value]:
        """Serve a new version from the next decode step on; returns bytes and seconds."""
        started = time.monotonic()
        weights = unpack_weights(payload)
        await asyncio.to_thread(self._engine.update_weights, weights, payload.version)
        return {
            "weights/bytes": Last(payload.num_bytes),
            "timing_s/load_weights": Mean(time.monotonic() - started, 1),
        }

    async def metrics(self) -> dict[str, Value]:
        """Engine counters since the last call."""
        now, stats, last = time.monotonic(), self._engine.stats(), self._last
        busy = stats.busy_seconds - last.busy_seconds
        generated = stats.generated_tokens - last.generated_tokens
        values: dict[str, Value] = {
            "perf/tokens_per_s/rollout": Ratio(generated, busy),
            "perf/rollout_utilization": Ratio(busy, now - self._last_time),
            "rollout/generated_tokens": Sum(generated),
            "rollout/prefill_tokens": Sum(stats.prefill_tokens - last.prefill_tokens),
            "weights/version": Last(stats.policy_version),
        }
        if stats.spec.proposed:
            proposed = stats.spec.proposed - last.spec.proposed
            values["spec/gamma"] = Ratio(proposed, stats.row_steps - last.row_steps)
        if stats.decode_seconds:
            plain = stats.plain_seconds - last.plain_seconds
            values["spec/speedup_observed"] = Ratio(plain, stats.decode_seconds - last.decode_seconds)
            predicted = stats.predicted_seconds - last.predicted_seconds
            values["spec/speedup_predicted"] = Ratio(plain, predicted)
        values["env/sandbox/memo_hit_rate"] = Mean(*self._suite.sandbox_counts())
        self._last, self._last_time = stats, now
        return values

    async def close(self) -> None:
        """Stop decoding and free the sandbox."""
        await self._collector.close()
        await asyncio.to_thread(self._engine.close)
