"""Generates trajectories of prompts with an engine, under one verification rule.

Owns the engine: builds it, loads weights into it, and closes it. Only one engine (or server) at a time is in
memory. Seeds depend only on prompt and attempt, so with the embedded engine two drafts are compared on the
same random streams; with a server they are not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rlpipe.actors.engines import make_engine
from rlpipe.adapt.domains import Domain
from rlpipe.config.paths import resolve_model
from rlpipe.config.run import Config
from rlpipe.config.spec import SpecMode
from rlpipe.envs.base import Suite
from rlpipe.loop.event_loop import run_coroutine
from rlpipe.rollout.chat import ChatFormat
from rlpipe.rollout.collector import Collector, gather_or_cancel
from rlpipe.rollout.engine import Engine
from rlpipe.types import Group, Prompt, Trajectory

OnEvent = Callable[..., None]  # called for failures of servers: kind, fields


@dataclass(slots=True, kw_only=True)
class DomainRollouts:
    """Attempts at a domain's prompts, in order. tokens: number generated. seconds: engine's busy time."""

    trajectories: list[Trajectory]
    tokens: int
    seconds: float


def generate_domains(
    config: Config,
    domains: Sequence[Domain],
    mode: SpecMode,
    *,
    weights: Mapping[str, Any] | None,
    on_event: OnEvent,
) -> dict[str, DomainRollouts]:
    """Run every prompt of every domain `adapt.eval_samples` times, one domain after another.

    Args:
        weights: HF names -> tensors of target and draft; None for the weights of model.path.

    Returns:
        Trajectories and speed by name of the domain.
    """
    # With a changing gamma, the rates of two evaluations could not be compared.
    spec = replace(config.spec, mode=mode, adaptive=False)
    rollout = config.rollout

    async def generate_all(engine: Engine) -> dict[str, DomainRollouts]:
        by_domain = {}
        for domain in domains:
            before = engine.stats()
            async with _collector(config, engine, domain.suite) as collector:
                trajectories = await collector.evaluate(
                    domain.instance_ids, config.adapt.eval_samples, rollout.temperature
                )

            after = engine.stats()
            by_domain[domain.name] = DomainRollouts(
                trajectories=trajectories,
                tokens=after.generated_tokens - before.generated_tokens,
                seconds=after.busy_seconds - before.busy_seconds,
            )
        return by_domain

    with _engine(replace(config, spec=spec), on_event) as engine:
        if weights is not None:
            engine.update_weights(weights, 1)
        return run_coroutine(generate_all(engine))


def collect(
    config: Config,
    suite: Suite,
    prompts: Sequence[Prompt],
    *,
    on_group: Callable[[Group], None],
    stopped: Callable[[], bool],
    on_event: OnEvent,
) -> None:
    """Generate `adapt.samples` trajectories of each prompt.

    Args:
        on_group: called with each group when it ends, in any order.
        stopped: when it returns True, no further group begins.
    """
    size, workers = config.adapt.samples, config.rollout.workers

    async def collect_all(collect_group: Callable[[Prompt, int], Awaitable[Group]]) -> None:
        # Run as many groups concurrently as the engines have rows for.
        slots = asyncio.Semaphore(workers * max(1, config.rollout.max_running // size))

        async def collect_one(prompt: Prompt) -> None:
            async with slots:
                if not stopped():
                    on_group(await collect_group(prompt, size))

        await gather_or_cancel(collect_one(prompt) for prompt in prompts)

    async def in_this_process(engine: Engine) -> None:
        async with _collector(config, engine, suite) as collector:
            await collect_all(collector.collect)

    async def on_ray_workers() -> None:
        from rlpipe.actors.adapt_cluster import recording

        async with recording(config, on_event) as collect_group:
            await collect_all(collect_group)

    if workers > 1:
        run_coroutine(on_ray_workers())
        return

    with _engine(config, on_event) as engine:
        run_coroutine(in_this_process(engine))


@contextmanager
def _engine(config: Config, on_event: OnEvent) -> Iterator[Engine]:
    engine = make_engine(config, on_event)
    try:
        yield engine
    finally:
        engine.close()


@asynccontextmanager
async def _collector(config: Config, engine: Engine, suite: Suite) -> AsyncIterator[Collector]:
    chat = ChatFormat.from_pretrained(resolve_model(config.model.path))
    collector = Collector(engine=engine, suite=suite, chat=chat, rollout=config.rollout, env=config.env)
    try:
        yield collector
    finally:
        await collector.close()
