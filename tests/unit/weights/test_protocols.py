"""Which engines take broadcasts, and what a worker says of one that does not."""

import asyncio

import pytest

from rlpipe.actors.rollout_worker import RolloutWorker
from rlpipe.rollout.embedded import EmbeddedEngine
from rlpipe.rollout.injection import InjectedEngine
from rlpipe.rollout.sglang import SglangEngine
from rlpipe.weights.protocols import ReceivesBroadcasts


def test_only_an_engine_with_a_server_receives_broadcasts() -> None:
    def receives(engine: type) -> bool:
        return isinstance(object.__new__(engine), ReceivesBroadcasts)

    assert receives(SglangEngine)
    assert not receives(EmbeddedEngine) and not receives(InjectedEngine)


def test_a_worker_names_the_remedy_for_an_engine_without_broadcasts() -> None:
    worker = object.__new__(RolloutWorker)
    worker._engine, worker._member = object.__new__(EmbeddedEngine), None
    with pytest.raises(ValueError, match=r"EmbeddedEngine receives no broadcasts.*weight_transfer"):
        asyncio.run(worker.membership())
