"""200 sessions at one endpoint at once, over HTTP: clients leave, engines fail and change their version."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx
import pytest

from rlpipe.config.env import ToolParser
from rlpipe.rollout.chat import ChatFormat
from rlpipe.serve.server import AgentServer
from tests.helpers.agents import Sampler, assert_recorded, attempt_at, templates, tokenizer_for

pytestmark = pytest.mark.chaos
SESSIONS, TURNS = 200, 4


class Engine(Sampler):
    """Is on a new version with every turn, and fails for good in some sessions; a held turn never ends."""

    def __init__(self, chat, vocab, number):
        super().__init__(chat, vocab, number)
        self.fails, self.begun, self.left = number % 20 == 7, asyncio.Event(), asyncio.Event()

    async def __call__(self, turn):
        await asyncio.sleep(0)
        self.begun.set()
        if self.fails and self.sampled:
            raise ConnectionError("the worker was killed")
        self.version += 1
        try:
            return await super().__call__(turn)
        except asyncio.CancelledError:
            self.left.set()
            raise


async def client(http, session, engine, drawn, events):
    """Ask a few times, in one conversation; leave in the middle of some requests, and sometimes for good."""
    headers = {"Authorization": f"Bearer {session.address.api_key}"}
    url, messages = f"{session.address.root_url}/v1/chat/completions", [{"role": "user", "content": "begin"}]
    for turn in range(TURNS):
        leaves = drawn.random() < 0.25
        engine.hold = asyncio.Event() if leaves else None
        engine.begun.clear()
        asked = asyncio.ensure_future(http.post(url, json={"messages": messages}, headers=headers))
        await engine.begun.wait()
        if leaves and not (engine.fails and engine.sampled):
            asked.cancel()
            await engine.left.wait()
            engine.left.clear()
            events["left"] += 1
            if drawn.random() < 0.2:
                return
            continue
        answer = await asked
        if answer.status_code == 503:
            events["failed"] += 1
            return
        assert answer.status_code == 200, answer.text
        messages.append(answer.json()["choices"][0]["message"])
        messages.append({"role": "user", "content": f"{turn}"})


def test_200_sessions_at_once_record_what_was_sampled_for_them_and_nothing_else():
    tokenizer = tokenizer_for(templates()["qwen2_5"])
    chat, events = ChatFormat(tokenizer), Counter()

    async def play(number, server, http):
        engine = Engine(chat, len(tokenizer), number)
        attempt = attempt_at(chat, engine, name=f"t{number}", max_turns=2 * TURNS, max_new_tokens=32)
        session = await server.open(attempt)
        await client(http, session, engine, random.Random(number), events)
        await session.close()
        return session, attempt.trajectory, engine

    async def run():
        server = AgentServer("127.0.0.1", ToolParser.HERMES)
        try:
            async with httpx.AsyncClient(limits=httpx.Limits(max_connections=SESSIONS), timeout=60) as http:
                ended = await asyncio.gather(*(play(n, server, http) for n in range(SESSIONS)))
                stale = {"Authorization": f"Bearer {ended[0][0].address.api_key}"}
                url = f"{ended[0][0].address.root_url}/v1/models"
                assert (await http.get(url, headers=stale)).status_code == 401
            return ended
        finally:
            await server.close()

    ended = asyncio.run(run())
    for session, trajectory, engine in ended:
        assert_recorded(trajectory, engine.sampled)
        assert session.failure is None or engine.fails
        assert trajectory.trajectory_id == session._attempt.session_id
        events["abandoned"] += trajectory.info.get("abandoned", 0)

    assert len(ended) == SESSIONS and events["failed"] > 2
    assert events["abandoned"] == events["left"] > SESSIONS / 4, events
