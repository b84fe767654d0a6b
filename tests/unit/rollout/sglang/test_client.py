"""HTTP: what is repeated, what is not, and what an error says. The server is a function."""

import asyncio

import httpx
import pytest

from rlpipe.rollout.sglang.client import SglangClient
from rlpipe.weights.protocols import ServerError, ServerUnreachable

pytestmark = pytest.mark.unit


def talk(handler, conversation):
    """Run `conversation(client)` against a handler of requests."""

    async def run():
        client = SglangClient("http://server", timeout=5, transport=httpx.MockTransport(handler))
        try:
            return await conversation(client)
        finally:
            await client.close()

    return asyncio.run(run())


def unreachable_until(attempt):
    """A handler that refuses connections before the given attempt, and how often it was asked."""
    calls = []

    def handler(request):
        calls.append(request.url.path)
        if len(calls) < attempt:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(200, json={"ok": True})

    return handler, calls


def test_reading_is_repeated_while_the_server_is_unreachable():
    handler, calls = unreachable_until(3)
    assert talk(handler, lambda client: client.read("/server_info")) == {"ok": True}
    assert calls == ["/server_info"] * 3


def test_reading_gives_up():
    handler, calls = unreachable_until(100)
    with pytest.raises(ServerUnreachable, match="did not answer"):
        talk(handler, lambda client: client.read("/server_info"))
    assert len(calls) == 4


def test_a_change_is_never_sent_twice():
    handler, calls = unreachable_until(2)
    with pytest.raises(ServerUnreachable):
        talk(handler, lambda client: client.post("/update_weights_from_tensor", {}))
    assert len(calls) == 1


def test_a_refusal_is_not_repeated_and_says_what_the_server_said():
    calls = []

    def handler(request):
        calls.append(request)
        return httpx.Response(400, json={"message": "no session is open"})

    with pytest.raises(ServerError, match=r"/x answered 400: .*no session is open"):
        talk(handler, lambda client: client.read("/x", {"a": 1}))
    assert len(calls) == 1
