"""Attempts start when the engine can store their keys and values, in order, and one always does."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from rlpipe.rollout.kv_budget import KvBudget

pytestmark = pytest.mark.unit
ROWS, TOKENS, LENGTH = 2, 300, 100  # room for 2 + 3 attempts of 100 tokens


class Attempts:
    """Attempts of one budget; `open` lists those that were admitted and have not ended."""

    def __init__(self, budget):
        self.budget, self.open, self.tasks, self._ends = budget, [], {}, {}

    async def ask(self, *names, together=1):
        """Have attempts ask for admission, one after the other."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._attempt(name, together))
        await settled()

    async def _attempt(self, name, together):
        async with self.budget.admit(together) as admitted:
            self.open.append(name)
            admitted.tokens |= {f"{name}{seat}": LENGTH for seat in range(together)}
            await self._ends[name].wait()
            self.open.remove(name)

    async def end(self, name):
        self._ends[name].set()
        await settled()


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


async def experienced(budget):
    """A budget that has seen an attempt end, and so expects its length of the next ones."""
    attempts = Attempts(budget)
    await attempts.ask("first")
    await attempts.end("first")
    return attempts


def played(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 5))


def test_as_many_start_as_rows_and_memory_hold_and_the_others_in_their_order():
    async def scenario():
        attempts = await experienced(KvBudget(rows=ROWS, tokens=TOKENS))
        await attempts.ask(*"abcdefg")
        assert attempts.open == list("abcde") and attempts.budget.waiting == 2
        await attempts.end("b")
        assert attempts.open == list("acdef") and attempts.budget.waiting == 1

    played(scenario())


def test_before_any_attempt_has_ended_the_lengths_so_far_count():
    async def scenario():
        budget = KvBudget(rows=ROWS, tokens=TOKENS)
        later = Attempts(budget)
        async with AsyncExitStack() as stack:
            first = [await stack.enter_async_context(budget.admit(1)) for _ in range(20)]
            for number, admitted in enumerate(first):
                admitted.tokens[str(number)] = LENGTH
            await later.ask("a")
            assert not later.open
        await settled()
        assert later.open == ["a"]

    played(scenario())


def test_an_attempt_that_could_never_fit_starts_when_none_is_open():
    async def scenario():
        attempts = await experienced(KvBudget(rows=0, tokens=1))
        await attempts.ask(*"ab")
        assert attempts.open == ["a"]
        await attempts.end("a")
        assert attempts.open == ["b"]

    played(scenario())


def test_the_seats_of_a_game_start_together():
    async def scenario():
        attempts = await experienced(KvBudget(rows=ROWS, tokens=TOKENS))
        await attempts.ask(*"ab", together=2)
        await attempts.ask("c", together=2)
        assert attempts.open == list("ab") and attempts.budget.waiting == 2
        await attempts.ask("d")
        assert attempts.open == list("ab")  # it would fit, but does not overtake

    played(scenario())


def test_one_that_leaves_while_it_waits_lets_the_next_one_pass():
    async def scenario():
        attempts = await experienced(KvBudget(rows=ROWS, tokens=TOKENS))
        await attempts.ask(*"ab", together=2)
        await attempts.ask("c", together=2)
        await attempts.ask("d")
        attempts.tasks["c"].cancel()
        await settled()
        assert attempts.open == list("abd") and attempts.budget.waiting == 0

    played(scenario())


def test_an_engine_of_unknown_memory_starts_all():
    async def scenario():
        async with AsyncExitStack() as stack:
            budget = KvBudget(rows=0, tokens=0)
            for _ in range(1000):
                admitted = await stack.enter_async_context(budget.admit(1))
                admitted.tokens["s"] = 10**6

    played(scenario())
