"""Games in which players take turns: the policy on one side (`OneSide`), or on all of them (`Seats`).

    seat 0   messages -> step: move, then wait for the next turn -> step ...
    seat 1   messages: wait for the first turn --------------------> step: move, then wait ...

A seat waits until `game.player` is its number or `game.done` is true; every move wakes all seats. Seats run
in one event loop, so a game needs no lock. A limit that ends the trajectory of one seat ends the game for
all, without a winner.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Protocol

from rlpipe.envs.base import StepResult
from rlpipe.envs.opponents import Opponent

MakeOpening = Callable[[str], list[dict[str, str]]]


class TurnGame(Protocol):
    """A game between two moves. player: who is next. text: what is new to that player. done: it is over."""

    player: int
    text: str
    done: bool

    def move(self, action: str) -> None:
        """Move for the player whose turn it is."""
        ...

    def result(self, player: int) -> StepResult:
        """Return the last result for a player of a finished game."""
        ...


class OneSide:
    """One side of a game, alone or against an opponent: an episode. seed: its parity decides who begins."""

    def __init__(self, game: TurnGame, opening: MakeOpening, opponent: Opponent | None, seed: int) -> None:
        self._game, self._opening, self._opponent = game, opening, opponent
        self._side, self._rng = seed % 2 if opponent else 0, random.Random(seed)

    def messages(self) -> list[dict[str, str]]:
        """Return the rules and the game so far."""
        self._let_the_opponent_move()
        return self._opening(self._game.text)

    def step(self, action: str) -> StepResult:
        """Move, and let the opponent answer."""
        self._game.move(action)
        self._let_the_opponent_move()
        return self._game.result(self._side) if self._game.done else StepResult(observation=self._game.text)

    def _let_the_opponent_move(self) -> None:
        while self._opponent and not self._game.done and self._game.player != self._side:
            self._game.move(self._opponent(self._game.text, self._rng))


class Seats:
    """A game and an episode for each of its players; a `rlpipe.envs.base.Game`.

    opening: makes the opening messages of a seat from the first text that it reads.
    """

    def __init__(self, game: TurnGame, players: int, opening: MakeOpening) -> None:
        self.game, self.opening, self.moved = game, opening, asyncio.Condition()
        self.unfinished = False  # a limit ended it
        self.seats = [_Seat(self, number) for number in range(players)]


class _Seat:
    """One player. Its turn ends with a move and begins when the others have moved."""

    def __init__(self, table: Seats, number: int) -> None:
        self._table, self._number = table, number

    async def messages(self) -> list[dict[str, str]] | StepResult:
        """Return what the player reads first, or the end of a game that is over before its first turn."""
        end = await self._next_turn()
        return end or self._table.opening(self._table.game.text)

    async def step(self, action: str) -> StepResult:
        """Move, and return what is new at the next turn."""
        self._table.game.move(action)
        await self._wake_all()
        return await self._next_turn() or StepResult(observation=self._table.game.text)

    async def finish(self) -> StepResult:
        """End the game: this player gets no further turn."""
        self._table.unfinished = True
        await self._wake_all()
        return StepResult(done=True, reward=0.0)

    async def _next_turn(self) -> StepResult | None:
        """Wait for a turn; return the end of the game when there is none."""
        table = self._table
        async with table.moved:
            await table.moved.wait_for(
                lambda: table.unfinished or table.game.done or table.game.player == self._number
            )
        if table.game.done:
            return table.game.result(self._number)
        return StepResult(done=True, reward=0.0, truncated=True) if table.unfinished else None

    async def _wake_all(self) -> Any:
        async with self._table.moved:
            self._table.moved.notify_all()
