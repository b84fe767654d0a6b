"""A rollout worker: one engine, one environment suite, one collector.

It is a plain class: Ray wraps it in an actor, the inline cluster uses it directly. All methods are
coroutines, so one event loop serves any number of groups concurrently while the engine's own thread decodes.
Weight updates happen between two decode steps. torch is imported only in the constructor, because the driver
imports this module but not torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe.actors.engines import make_engine
from rlpipe.actors.network import choose_interface
from rlpipe.config.paths import resolve_model
from rlpipe.config.run import Config
from rlpipe.envs import make_suite
from rlpipe.envs.base import sandbox_counts
from rlpipe.envs.slow import SlowSuite
from rlpipe.metrics.spans import SpanLog
from rlpipe.metrics.values import Last, Max, Mean, Ratio, Sum, Value
from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.rollout.chat import ChatFormat
from rlpipe.rollout.collector import Collector
from rlpipe.rollout.engine import Engine
from rlpipe.rollout.injection import InjectedEngine
from rlpipe.rollout.kv_budget import KvBudget
from rlpipe.rollout.relay import RelayEngine
from rlpipe.serve.server import AgentServer
from rlpipe.types import GenerateRequest, GenerateResult, Group, Prompt, Trajectory
from rlpipe.weights.protocols import ReceivesBroadcasts

if TYPE_CHECKING:
    from rlpipe.envs.base import Suite
    from rlpipe.weights.offer import Member, Offer
    from rlpipe.weights.payload import WeightPayload


class RolloutWorker:
    """Owns its engine and sandbox; `close` frees both. number: this worker's number in the run, from 0."""

    def __init__(self, config: Config, number: int = 0) -> None:
        from rlpipe.algo.correction import top_logprobs

        choose_interface(config)
        busy = {"generate": "perf/utilisation/rollout", "env": "perf/utilisation/env"}
        self._number = number
        self._spans = SpanLog(f"rollout {number}", busy)
        self._events: list[tuple[str, dict[str, Any]]] = []
        path = resolve_model(config.model.path)  # its chat template; a decoupled actor shares the tokenizer
        self._suite = make_suite(config.env, seed=config.run.seed)
        self._engine: Engine = make_engine(config, self._note)
        self._engines = [self._engine]  # all engines that receive new weights
        self._agents = AgentServer(config.env.agent.host, config.env.tools.parser)
        shared = partial(
            Collector,
            agents=self._agents,
            chat=ChatFormat.from_pretrained(path),
            rollout=config.rollout,
            env=config.env,
            top_logprobs=top_logprobs(config.algo, int(read_config(path)["vocab_size"])),
            record_drafts=config.metrics.rollouts_per_step > 0,
            spans=self._spans,
        )

        def collector(engine: Engine, suite: Suite) -> Collector:
            stats = engine.stats()
            budget = KvBudget(rows=stats.kv_rows, tokens=stats.kv_tokens)
            return shared(engine=engine, suite=suite, kv_budget=budget)

        self._evaluator = self._collector = collector(engine=self._engine, suite=self._suite)
        if config.injection.active():
            self._inject(config, resolve_model(config.rollout_model), collector)
        engine = self._engine
        self._relay: RelayEngine | None = None  # replaces the engine when this worker is leaving
        self._member = engine if isinstance(engine, ReceivesBroadcasts) else None
        self._policy: Engine | None = None
        if config.decoupled.active and config.val.every:
            self._policy = make_engine(config, self._note, config.model.path)
            self._evaluator = collector(engine=self._policy, suite=self._suite)
        self._last = self._engine.stats()
        self._has_reported_costs = False
        self._last_time = time.monotonic()

    def _inject(self, config: Config, path: Path, collector: Callable[..., Collector]) -> None:
        """Inject faults into training rollouts; evaluations use the clean suite and clean weights."""
        clean, weights = self._engine, None

        # Evaluations need a separate engine only if injection changes the weights.
        if config.injection.changes_weights and not config.decoupled.active:
            clean = make_engine(config, self._note)
        if config.injection.weight_noise:
            weights = read_weights(path)
        disturbed = InjectedEngine(
            self._engine, config.injection, max_context=config.rollout.max_context, weights=weights
        )
        self._engines = [disturbed] if clean is self._engine else [disturbed, clean]
        self._evaluator = collector(engine=clean, suite=self._suite)
        slow = SlowSuite(self._suite, config.injection, config.run.seed)
        self._engine, self._collector = disturbed, collector(engine=disturbed, suite=slow)

    async def collect(self, prompt: Prompt, group_size: int) -> Group:
        """Roll out one group."""
        return await self._collector.collect(prompt, group_size)

    async def evaluate(
        self, instance_ids: Sequence[str], samples: int, temperature: float
    ) -> list[Trajectory]:
        """Roll out held-out instances, `samples` times each."""
        return await self._evaluator.evaluate(instance_ids, samples, temperature)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate a turn for a worker that is leaving."""
        return await self._engine.generate(request)

    async def hand_over(self) -> bool:
        """Stop the engine; from then on `next_turn` returns the turns that another worker must generate.

        The first are the turns that the engine has not finished. Conversations and sandboxes stay in
        this worker. Returns False without a change if the workers' engines differ, as with injections or with
        evaluations by another policy.
        """
        if self._evaluator is not self._collector or isinstance(self._engine, InjectedEngine):
            return False

        before, relay = self._engine, RelayEngine(self._engine, f"worker {self._number}")
        self._collector.use_engine(relay)
        self._relay = self._engine = relay
        self._engines, self._member = [relay], None
        await asyncio.to_thread(before.close)
        return True

    async def next_turn(self) -> GenerateRequest:
        """Wait for the next turn that another worker must generate, and return it."""
        return await self._handed_over().next_turn()

    async def turn_generated(self, request_id: str, result: GenerateResult) -> None:
        """Receive the result of a turn that another worker generated."""
        self._handed_over().turn_generated(request_id, result)

    async def turn_failed(self, request_id: str, reason: str) -> None:
        """End a turn that no other worker could generate."""
        self._handed_over().turn_failed(request_id, reason)

    def _handed_over(self) -> RelayEngine:
        assert self._relay is not None, "the engine has not been handed over"
        return self._relay

    async def update_weights(self, payload: WeightPayload) -> dict[str, Value]:
        """Load a new version, which is served from the next decode step on; return bytes and seconds."""
        from rlpipe.weights.payload import unpack_weights

        started = time.monotonic()
        with self._spans.lane() as lane, lane.span("sync", version=payload.version):
            weights = unpack_weights(payload)
            for engine in self._engines:
                await asyncio.to_thread(engine.update_weights, weights, payload.version)

            # The payload has a decoupled policy only at versions that are validated.
            if self._policy is not None and payload.policy is not None:
                policy = unpack_weights(payload.policy)
                await asyncio.to_thread(self._policy.update_weights, policy, payload.version)
        return {
            "weights/bytes": Last(payload.num_bytes),
            "timing_s/load_weights": Mean(time.monotonic() - started, 1),
        }

    async def membership(self) -> Member:
        """Return this worker's server and its group, if the server answers now."""
        return replace(await asyncio.to_thread(self._in_group().membership), worker=self._number)

    async def receive_weights(self, offers: Sequence[Offer]) -> dict[str, Value]:
        """Receive weights that the trainer broadcasts, instead of `update_weights`.

        offers: one for the servers of all workers, or one for each worker.
        """
        offer = offers[self._number] if len(offers) > 1 else offers[0]
        started = time.monotonic()
        with self._spans.lane() as lane, lane.span("sync", version=offer.version):
            await asyncio.to_thread(self._in_group().receive_weights, offer)
            sent = await offer.result()
        return {
            "weights/bytes": Last(sent.num_bytes),
            "timing_s/load_weights": Mean(time.monotonic() - started, 1),
        }

    def _in_group(self) -> ReceivesBroadcasts:
        """Return the engine if it can receive broadcasts. Raises ValueError if it cannot."""
        if self._member is None:
            raise ValueError(
                f"{type(self._engine).__name__} receives no broadcasts: set rollout.sglang.weight_transfer "
                "to another method than collective, or rollout.engine=sglang without injections."
            )
        return self._member

    async def metrics(self) -> dict[str, Value]:
        """Return the engine's counters since the last call."""
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

        # Costs are measured once, so only the first record of an engine has them.
        if not self._has_reported_costs:
            self._has_reported_costs = True
            for (batch, gamma), cost in stats.costs.items():
                values[f"spec/step_seconds/batch_{batch}/gamma_{gamma}"] = Last(cost)

        values |= {name: Max(figure) for name, figure in stats.sync.items()}  # the maximum over all servers
        values |= {name.format(k=self._number): Last(figure) for name, figure in stats.server.items()}
        values["env/sandbox/memo_hit_rate"] = Mean(*sandbox_counts(self._suite))

        self._last, self._last_time = stats, now
        return values | self._spans.drain()

    async def activity(self) -> str:
        """Return a text on the activity of the collectors."""
        both = [one.activity() for one in dict.fromkeys((self._collector, self._evaluator))]
        return "; ".join(filter(None, both)) or "idle"

    async def take_events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the failures (kind, fields) that the engines recorded since the last call."""
        events, self._events = self._events, []
        return events

    def _note(self, kind: str, **fields: object) -> None:
        self._events.append((kind, fields))

    async def close(self) -> None:
        """Stop decoding and free the sandbox."""
        for collector in dict.fromkeys((self._collector, self._evaluator)):
            await collector.close()
        await self._agents.close()
        for engine in [*self._engines, *([self._policy] if self._policy else [])]:
            await asyncio.to_thread(engine.close)
