"""An embedded engine whose rounds the test runs itself: joins, batch sizes and updates fall where it says.

The engine's own thread is paused and only takes updates; requests go straight to the scheduler. What is
left out is the inbox and the futures, which change no token. So a schedule is a function of its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.rollout.embedded import EmbeddedEngine
from rlpipe.rollout.embedded.scheduler import Job
from rlpipe.spec.gamma import GammaPolicy
from rlpipe.types import GenerateRequest, GenerateResult


class GammaScript:
    """A policy that follows a script, and stays at the last entry."""

    def __init__(self, *gammas: int) -> None:
        self.gammas = list(gammas)

    def choose(self, batch: int) -> int:
        return self.gammas.pop(0) if len(self.gammas) > 1 else self.gammas[0]

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Nothing is learnt."""


class RandomGamma:
    """Any gamma in 0..most, anew for each step, from numbers that know nothing of tokens."""

    def __init__(self, most: int, seed: int = 0) -> None:
        self._most, self._random = most, random.Random(seed)

    def choose(self, batch: int) -> int:
        return self._random.randint(0, self._most)

    def observe(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Nothing is learnt."""


@dataclass(slots=True)
class DrivenEngine:
    """A paused engine. results: by request id, as requests end."""

    engine: EmbeddedEngine
    results: dict[str, GenerateResult] = field(default_factory=dict)

    @property
    def running(self) -> int:
        """Requests in rows."""
        return self.engine._table.active

    def submit(self, *requests: GenerateRequest) -> None:
        """Queue requests; they join in the next round if there is room."""
        for one in requests:
            self.engine._scheduler.submit(
                Job(one, lambda result: self.results.__setitem__(result.request_id, result))
            )

    def round(self) -> None:
        """One step of everything."""
        with torch.inference_mode():
            self.engine._scheduler.round()

    def run(self) -> None:
        """Rounds until all requests have ended."""
        while self.engine._scheduler.has_work():
            self.round()

    def generate(self, *requests: GenerateRequest) -> list[GenerateResult]:
        """Run these requests to their end."""
        self.submit(*requests)
        self.run()
        return [self.results[one.request_id] for one in requests]

    def play(self, conversations: Sequence[Sequence[GenerateRequest]], seed: int = 0, **hooks: Any) -> None:
        """Run conversations, turn after turn, joining so that the number of running rows keeps changing.

        between: called with the number of the round before each round.
        """
        between: Callable[[int], None] = hooks.pop("between", lambda number: None)
        shuffled, number = random.Random(seed), 0
        waiting, playing = list(reversed(conversations)), []
        while waiting or playing:
            wanted = shuffled.randint(1, self.engine._table.rows)
            while waiting and len(playing) < wanted:
                turns = list(waiting.pop())
                playing.append(turns)
                self.submit(turns[0])
            between(number)
            self.round()
            number += 1
            for turns in [turns for turns in playing if turns[0].request_id in self.results]:
                done = turns.pop(0)
                if turns:
                    self.submit(turns[0])
                    continue
                playing.remove(turns)
                if done.session_id is not None:
                    self.engine._table.end_session(done.session_id)

    def update(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """As `EmbeddedEngine.update_weights`, between two rounds."""
        self.engine.update_weights(weights, version)


class Recorded:
    """What a drafting drafted and was given to verify, step by step.

    steps: (ids of the decoding rows, drafts, Drafted, what the target samples from, Verified).
    """

    def __init__(self, driven: DrivenEngine) -> None:
        self.steps: list[tuple] = []
        inner = driven.engine._decoder._drafting
        table, verify = driven.engine._table, inner.verify

        def recording(drafted, choices):
            rows = range(len(choices))
            ids = [table.tokens[row, : table.total[row]].tolist() for row in rows]
            tokens = drafted.part.tokens[:, 1:].clone()
            emitted = verify(drafted, choices)
            self.steps.append((ids, tokens, drafted, choices.clone(), emitted))
            return emitted

        inner.verify = recording


@contextmanager
def driven_engine(
    path: Path,
    mode: str = "rejection",
    *,
    gamma: int = 3,
    tree: Sequence[int] = (2, 2, 1),
    policy: GammaPolicy | None = None,
    drafter: str = "mtp",
    draft_path: object = "",
    draft_vocab: object = "",
    **rollout: Any,
) -> Iterator[DrivenEngine]:
    """An engine to drive. policy: chooses gamma in place of what the engine would have used."""
    settings = {"max_running": 8, "max_context": 128, "device": "cpu"} | rollout
    spec = SpecConfig(
        mode=mode,
        gamma=gamma,
        tree=list(tree),
        adaptive=policy is not None,
        drafter=drafter,
        draft_path=str(draft_path),
        draft_vocab=str(draft_vocab),
    )
    engine = EmbeddedEngine(RolloutConfig(**settings), spec, path)
    engine.pause()
    if policy is not None:
        engine._scheduler._policy = policy
    try:
        yield DrivenEngine(engine)
    finally:
        engine.close()
