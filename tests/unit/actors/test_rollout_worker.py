"""What a rollout worker reports of its engine."""

import asyncio

import pytest

from rlpipe.actors.rollout_worker import RolloutWorker
from rlpipe.config.run import Config
from rlpipe.metrics.names import declared
from rlpipe.rollout.engine import EngineStats

pytestmark = pytest.mark.unit


def test_the_figures_of_a_server_are_reported_under_the_number_of_its_worker(monkeypatch):
    worker = RolloutWorker(Config(), number=3)
    figures = {"rollout/server/{k}/running": 2, "rollout/server/{k}/restarts": 1}
    sync = {"weights/sync_seconds": 0.5}
    monkeypatch.setattr(worker._engine, "stats", lambda: EngineStats(server=figures, sync=sync))
    metrics = asyncio.run(worker.metrics())
    asyncio.run(worker.close())
    found = {
        name: metrics[name].value() for name in metrics if name.startswith(("rollout/server", "weights/s"))
    }
    assert found == {
        "rollout/server/3/running": 2.0,
        "rollout/server/3/restarts": 1.0,
        "weights/sync_seconds": 0.5,
    }
    assert all(declared(name).kind.accepts(value) for name, value in metrics.items())
