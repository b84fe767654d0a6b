"""Weights that servers map in the trainer's memory: bit for bit, and all are told when one server fails."""

import asyncio
import time

import pytest
import torch

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.weights.protocols import ServerError
from rlpipe.weights.shared_memory import LOADER
from rlpipe.weights.sync import WeightSync
from tests.helpers.broadcasts import Trainer
from tests.helpers.cli import ROOT
from tests.helpers.mapped import Server, open_files
from tests.helpers.sglang import perturbed

pytestmark = pytest.mark.unit
TINY = ROOT / "models" / "tiny"


@pytest.fixture(scope="module")
def weights():
    return read_weights(TINY)


@pytest.fixture
def config():
    config = RolloutConfig(engine="sglang", device="cpu")
    config.sglang.weight_transfer = "ipc"
    config.sglang.bucket_mb, config.sglang.update_timeout = 1, 60.0
    config.sglang.__post_init__()
    return config


@pytest.fixture
def trainer(config):
    trainer = Trainer.of(config, read_config(TINY))
    yield trainer
    trainer.close()
    assert open_files() == []


def receive(offer, parties):
    """What each server's worker is told at the end."""

    async def run():
        asked = (sync.receive(server, offer, str(n), flush=False) for n, (sync, server) in enumerate(parties))
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(run())


def parties(config, tmp_path, servers):
    return [
        (WeightSync(config, SpecConfig(), TINY, on_gpu=False, folder=tmp_path), server) for server in servers
    ]


def assert_holds(server, weights):
    assert server.weights.keys() == weights.keys()
    assert all(torch.equal(server.weights[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_servers_map_the_same_weights_update_after_update(config, trainer, weights, tmp_path, ranks):
    config.sglang.tp = ranks
    pairs = parties(config, tmp_path, [Server(), Server()])
    for version in (4, 5):
        new = perturbed(weights, 0.02, seed=version)
        sent, again = receive(trainer.offer(new, version, ["0", "1"], again=version == 5), pairs)
        assert sent == again and not sent.failure and sent.num_bytes == sum(t.nbytes for t in new.values())
        for _, server in pairs:
            assert_holds(server, new)
    for sync, server in pairs:
        asked = [path for path, _, _ in server.asked]
        buckets = asked.count("/update_weights_from_tensor") // 2
        update = ["/begin_weight_update", *["/update_weights_from_tensor"] * buckets, "/end_weight_update"]
        assert asked == [*update, *update] and buckets > 5
        assert {kind for path, _, kind in server.asked if path == update[1]} == {LOADER}
        assert sync.transport.group_of(server) == trainer.plan[0].name


def test_a_server_that_refuses_ends_the_update_for_all_at_once(config, trainer, weights, tmp_path):
    """And the weights are still there, and the next group takes everybody."""
    pairs = parties(config, tmp_path, [Server(), Server(fails=4)])
    started = time.monotonic()
    offer = trainer.offer(weights, 1, ["0", "1"])
    told, refused = receive(offer, pairs)
    assert time.monotonic() - started < config.sglang.update_timeout  # nobody waited for the deadline
    assert isinstance(told, ServerError) and "a server did not take it" in str(told)
    assert isinstance(refused, ServerError) and "refused" in str(refused)
    assert [sync.transport.group_of(server) for sync, server in pairs] == ["", ""] and open_files() == []
    kept = asyncio.run(offer.weights())
    assert kept.keys() == weights.keys() and all(torch.equal(kept[n], weights[n]) for n in weights)
    for told in receive(trainer.offer(weights, 2, ["0", "1"]), pairs):
        assert not told.failure
    for _, server in pairs:
        assert_holds(server, weights)


def test_a_server_that_hangs_keeps_the_trainer_until_the_deadline(config, trainer, weights):
    config.sglang.update_timeout = 0.3
    offer = trainer.offer(weights, 1, ["0"])
    sent = asyncio.run(offer.result())
    assert "broke off" in sent.failure and sent.num_bytes == sum(t.nbytes for t in weights.values())


def test_a_trainer_that_is_gone_is_said(config, trainer, weights, tmp_path):
    ((sync, server),) = parties(config, tmp_path, [Server()])
    receive(trainer.offer(weights, 1, ["0"]), [(sync, server)])
    offer = trainer.offer(weights, 2, ["0"], again=True)
    trainer.sender.close()
    trainer.sender._root = None

    async def never():
        await asyncio.Event().wait()

    asyncio.run(offer.result())
    offer.result = never
    (told,) = receive(offer, [(sync, server)])
    assert isinstance(told, ServerError) and "store" in str(told)
