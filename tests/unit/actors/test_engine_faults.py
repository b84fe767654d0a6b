"""Faults an engine tells of reach the run's events, also when the update that found them fails."""

import asyncio

import pytest

from rlpipe.actors import inline_cluster
from rlpipe.actors.inline_cluster import InlineCluster
from rlpipe.config.run import Config

pytestmark = pytest.mark.unit


class Trainer:
    """A trainer that has nothing to send."""

    def __init__(self, config):
        pass

    def start(self):
        pass

    def export(self, version):
        return version


class Worker:
    """A worker whose engine holds wrong weights from version 2 on."""

    def __init__(self, config):
        self.events = []

    async def update_weights(self, payload):
        self.events = [("canary_failed", {"version": payload, "what": "13 of the draft"})]
        if payload > 1:
            raise RuntimeError("does not hold version 2")
        return {}

    async def take_events(self):
        return self.events


def test_events_of_an_engine_are_passed_on_whether_its_update_succeeds_or_not(monkeypatch):
    monkeypatch.setattr(inline_cluster, "TrainerWorker", Trainer)
    monkeypatch.setattr(inline_cluster, "RolloutWorker", Worker)
    told = []
    cluster = InlineCluster(Config(), lambda kind, **fields: told.append((kind, fields["version"])))

    async def publish(version):
        return await (await cluster.publish_weights(version))()

    assert "timing_s/update_weights" in asyncio.run(publish(1))
    with pytest.raises(RuntimeError, match="version 2"):
        asyncio.run(publish(2))
    assert told == [("canary_failed", 1), ("canary_failed", 2)]
