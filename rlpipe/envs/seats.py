"""Games in which players take turns: the policy on one side (`OneSide`), or on all of them (`Seats`).

    seat 0   messages -> step: move, then wait for the next turn -> step ...
    seat 1   messages: wait for the first turn --------------------> step: move, then wait ...

A seat waits until `game.player` is its index or `game.done` is true; every move wakes all seats. All seats
run in one event loop, so a game needs no lock. If a limit ends the trajectory of one seat, the game ends for
all seats, without a winner.
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
    """State of a game between two moves.

    player: index of the player who moves next. text: events that are new to that player. done: the game is
    over.
    """

    player: int
    text: str
    done: bool

    def move(self, action: str) -> None:
        """Move for the player whose turn it is."""
        ...

    def result(self, player: int) -> StepResult:
        """Return the final result of a player after the game has ended."""
        ...


class OneSide:
    """An episode for one side of a game, alone or against an opponent.

    seed: its parity decides who begins.
    """

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
        self.unfinished = False  # whether a limit ended the game
        self.seats = [_Seat(self, number) for number in range(players)]


class _Seat:
    """One player. Its turn begins when the others have moved and ends with its move."""

    def __init__(self, table: Seats, number: int) -> None:
        self._table, self._number = table, number

    async def messages(self) -> list[dict[str, str]] | StepResult:
        """Return the opening messages; if the game ends before the player's first turn, return the result."""
        end = await self._next_turn()
        return end or self._table.opening(self._table.game.text)

    async def step(self, action: str) -> StepResult:
        """Move, wait for the next turn, and return the events since the move."""
        self._table.game.move(action)
        await self._wake_all()
        return await self._next_turn() or StepResult(observation=self._table.game.text)

    async def finish(self) -> StepResult:
        """End the game: this player gets no further turn."""
        self._table.unfinished = True
        await self._wake_all()
        return StepResult(done=True, reward=0.0)

    async def _next_turn(self) -> StepResult | None:
        """Wait for this player's turn and return None; return the result if the game ends first."""
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
