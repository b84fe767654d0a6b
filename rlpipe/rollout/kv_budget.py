"""Limits the open attempts of a worker to the capacity of its engine for keys and values.

    admit (waits) -> the attempt's conversations grow with its turns -> it ends, and others are admitted

If the engine cannot store a conversation, its prefix is computed again at each turn, so too many open
attempts slow each other down. An attempt is therefore admitted when it fits in addition to all open ones. Its
length is estimated from the final lengths of recent attempts (until one has ended, from the lengths so far).
If the estimate is too low, open attempts are not interrupted: what does not fit is computed again.

Invariant: attempts are admitted in the order of their calls. If none is open, one is always admitted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from statistics import fmean

_RECENT = 64  # recent attempts used to estimate the length of the next one


@dataclass(slots=True, eq=False)
class Admitted:
    """Attempts that were admitted together. tokens: lengths of their open conversations, by session id."""

    attempts: int
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def length(self) -> float:
        """Return the mean number of tokens of one attempt."""
        return sum(self.tokens.values()) / self.attempts


class KvBudget:
    """Admits attempts.

    rows: number of conversations of any length that the engine can store. tokens: number of tokens of further
    conversations that it can store; 0 admits every attempt.
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
        """Wait until `attempts` attempts fit, and count them as open within the context.

        The caller must keep the `tokens` of the result up to date.
        """
        requested, turn = Admitted(attempts), asyncio.get_running_loop().create_future()
        self._waiting.append((turn, requested))
        self._admit_waiting()
        try:
            await turn
            yield requested
        finally:
            turn.cancel()  # if the caller was cancelled while it waited
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
        """Return whether the engine can store the requested attempts in addition to the open ones."""
        if not self._tokens:
            return True
        expected = fmean(self._recent or [0])
        lengths = sorted(
            max(one.length, expected) for one in (*self._open, requested) for _ in range(one.attempts)
        )

        # It is unknown which attempts have a row. Assume the shortest, so that the estimate is never too low.
        return sum(lengths[self._rows :]) <= self._tokens
