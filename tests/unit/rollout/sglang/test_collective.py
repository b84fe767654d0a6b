"""The group with a server: what is said when the server does not join it. (Weights: tests/integration.)"""

import asyncio

import pytest

from rlpipe.rollout.sglang.client import ServerError, ServerUnreachable
from rlpipe.rollout.sglang.collective import Broadcast

pytestmark = pytest.mark.unit


class Client:
    """Answers as told, and keeps what it was asked."""

    def __init__(self, error=None):
        self.error, self.asked = error, []

    async def post(self, path, body, timeout=None):
        self.asked.append((path, body))
        if self.error:
            raise self.error


def join(client, ranks=2):
    group = Broadcast(client, "127.0.0.1", ranks, timeout=1.0)
    asyncio.run(group.join())


def test_a_server_is_asked_to_join_as_the_ranks_after_ours():
    client = Client()
    with pytest.raises(ServerUnreachable, match="init_weights_update_group: the group with the server broke"):
        join(client)  # it says yes, and does not come
    ((path, body),) = client.asked
    assert path == "/init_weights_update_group" and body["backend"] == "gloo"
    assert body["rank_offset"] == 1 and body["world_size"] == 3 and body["master_port"] > 0


def test_a_server_that_refuses_is_quoted():
    with pytest.raises(ServerError, match="no such group"):
        join(Client(ServerError("no such group")))
