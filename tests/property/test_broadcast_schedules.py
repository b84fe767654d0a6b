"""Refits by broadcast in which servers die, hang, refuse and do not join, and groups hang instead of raising.

The real cluster, sender, sync, replica and updates over a simulated group and simulated servers, in virtual
time: 200 seeds of two disturbed refits with three servers, then two to servers that are well but for one that
has just hung. No trainer dies, no server serves the weights of two versions, each refit ends within its
deadline with every server on the newest, and servers that are well get theirs by the broadcast.
"""

from __future__ import annotations

import asyncio

import pytest

from rlpipe.config.run import Config
from rlpipe.config.sglang import WeightTransfer
from tests.helpers.broadcast_world import World

pytestmark = pytest.mark.property
SEEDS, REFITS = 200, 2


@pytest.fixture
def config():
    config = Config()
    config.rollout.sglang.weight_transfer = WeightTransfer.COLLECTIVE
    for name, seconds in {"update": 60.0, "health": 5.0, "start": 30.0, "request": 600.0}.items():
        setattr(config.rollout.sglang, f"{name}_timeout", seconds)
    config.rollout.sglang.max_restarts = 50
    return config


def deadline(sglang):
    """The broadcast, four questions that a server does not answer, and the start of its successor."""
    return sglang.update_timeout + 4 * sglang.health_timeout + sglang.start_timeout


def test_refits_end_in_time_and_no_server_serves_two_versions(config, monkeypatch):
    limit, kinds, longest = deadline(config.rollout.sglang), [], 0.0
    for seed in range(SEEDS):
        world = World(seed, config)
        with monkeypatch.context() as patch:
            world.patch(patch)
            asyncio.set_event_loop(world.loop)
            try:
                took = world.loop.run_until_complete(world.play(REFITS, limit))
            except Exception as error:
                raise AssertionError(f"seed {seed} at {world.loop.now:.0f} s") from error
            finally:
                asyncio.set_event_loop(None)
                world.loop.close()
        assert not world.violations, f"seed {seed}: {world.violations}"
        longest = max(longest, *took)
        kinds += world.told
    told = {kind: kinds.count(kind) for kind in sorted(set(kinds))}
    print(f"longest refit {longest:.0f} of {limit:.0f} s; {told}")
    assert min(told[kind] for kind in ("broadcast_failed", "server_died", "server_hung")) > SEEDS / 4
