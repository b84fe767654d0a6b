"""Bounds the open attempts of one worker by the keys and values that its engine can store.

    admit (waits) -> the attempt's conversations grow with its turns -> it ends, and others are admitted

A conversation that the engine cannot store is computed again at each of its turns, so more open attempts then
make fewer turns. An attempt is therefore admitted when it fits in addition to all open ones. Its length is
assumed to be the final length of recent attempts (until one has ended, the lengths so far). This is an
estimate: open attempts are never interrupted, and whatever does not fit is computed again.

Invariant: attempts are admitted in the order of their calls, and one always is if none is open.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from statistics import fmean

_RECENT = 64  # attempts from which the length of the next one is estimated


@dataclass(slots=True, eq=False)
class Admitted:
    """Attempts that were admitted together. tokens: of their open conversations, by session id."""

    attempts: int
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def length(self) -> float:
        """Return the tokens of one attempt."""
        return sum(self.tokens.values()) / self.attempts


class KvBudget:
    """Admits attempts.

    rows: how many conversations the engine stores at any length. tokens: how many tokens of further
    conversations it stores; 0 admits every attempt.
    """

    def __init__(self, *, rows: int, tokens: int) -> None:
        self._rows, self._tokens = rows, tokens
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._open: set[Admitted] = set()
        self._waiting: deque[tuple[asyncio.Future[None], Admitted]] = deque()

    @property
    def waiting(self) -> int:
        """Return how many attempts wait."""
        return sum(requested.attempts for turn, requested in self._waiting if not turn.done())

    @contextlib.asynccontextmanager
    async def admit(self, attempts: int) -> AsyncIterator[Admitted]:
        """Wait until some attempts fit, and count them as open while the context is entered.

        The caller keeps the `tokens` of the result up to date.
        """
        requested, turn = Admitted(attempts), asyncio.get_running_loop().create_future()
        self._waiting.append((turn, requested))
        self._admit_waiting()
        try:
            await turn
            yield requested
        finally:
            turn.cancel()  # if the caller left while it waited
            self._open.discard(requested)
            if requested.tokens:
                self._recent.append(requested.length)
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting:
            turn, requested = self._waiting[0]
            if not turn.done():
                if self._open and not self._fits(requested):
                    return
                self._open.add(requested)
                turn.set_result(None)
            self._waiting.popleft()

    def _fits(self, requested: Admitted) -> bool:
        """Return whether the engine can store attempts in addition to the open ones."""
        if not self._tokens:
            return True
        expected = fmean(self._recent or [0])
        lengths = sorted(
            max(one.length, expected) for one in (*self._open, requested) for _ in range(one.attempts)
        )

        # It is unknown which attempts have a row: assuming the shortest, the estimate is never too low.
        return sum(lengths[self._rows :]) <= self._tokens
