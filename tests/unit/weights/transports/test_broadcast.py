"""A broadcast to one server or several: every rank gets the same bits, or all are told that they did not."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from rlpipe.config.drafters import Drafter
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.weights import sender
from rlpipe.weights.canary import Shard, server_parts
from rlpipe.weights.fingerprint import fingerprints
from rlpipe.weights.payload import pack_weights, unpack_weights
from rlpipe.weights.process_group import GroupBroken, Root, describe_bucket, describe_join
from rlpipe.weights.protocols import ServerError, ServerUnreachable
from rlpipe.weights.sync import WeightSync
from rlpipe.weights.transports.base import WeightUpdate
from tests.helpers.broadcasts import Receiver, Trainer, Weights
from tests.helpers.cli import ROOT
from tests.helpers.sglang import perturbed

pytestmark = pytest.mark.unit
TINY = ROOT / "models" / "tiny"


@pytest.fixture(scope="module")
def weights():
    return read_weights(TINY)


@pytest.fixture
def config():
    config = RolloutConfig(engine="sglang", device="cpu")
    config.sglang.weight_transfer = "collective"
    config.sglang.bucket_mb, config.sglang.update_timeout = 1, 20.0
    config.sglang.__post_init__()
    return config


@pytest.fixture
def trainer(config):
    trainer = Trainer.of(config, read_config(TINY))
    yield trainer
    trainer.close()


def syncs(config, tmp_path, count):
    return [WeightSync(config, SpecConfig(), TINY, on_gpu=False, folder=tmp_path) for _ in range(count)]


def receive(offer, parties):
    """What each server's worker is told at the end."""

    async def run():
        asked = (
            sync.receive(receiver, offer, str(n), flush=False) for n, (sync, receiver) in enumerate(parties)
        )
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(run())


def assert_holds(receiver, weights):
    assert receiver.weights.keys() == weights.keys()
    assert all(torch.equal(receiver.weights[name], tensor) for name, tensor in weights.items())


def test_one_broadcast_brings_the_same_weights_to_all_servers(config, trainer, weights, tmp_path):
    receivers = [Receiver(), Receiver()]
    parties = list(zip(syncs(config, tmp_path, 2), receivers, strict=True))
    for version in (4, 5):
        new = perturbed(weights, 0.02, seed=version)
        sent, again = receive(trainer.offer(new, version, ["0", "1"], again=version == 5), parties)
        assert sent == again and not sent.failure and sent.num_bytes == sum(t.nbytes for t in new.values())
        for receiver in receivers:
            assert_holds(receiver, new)
    for receiver in receivers:
        buckets = (len(receiver.versions)) // 2
        update = [
            "/begin_weight_update",
            *["/update_weights_from_distributed"] * buckets,
            "/end_weight_update",
        ]
        assert receiver.asked == ["/init_weights_update_group", *update, *update] and buckets > 5
        assert receiver.versions == [None] * (buckets - 1) + ["4"] + [None] * (buckets - 1) + ["5"]


def test_a_server_that_dies_is_said_to_all_and_they_leave_the_group(config, trainer, weights, tmp_path):
    living, dying = Receiver(), Receiver(die_at=3)
    (stays, _), (lost, _) = parties = list(zip(syncs(config, tmp_path, 2), (living, dying), strict=True))
    started = time.monotonic()
    offer = trainer.offer(weights, 1, ["0", "1"])
    told, died = receive(offer, parties)
    assert time.monotonic() - started < config.sglang.update_timeout
    assert isinstance(died, ServerUnreachable) and isinstance(told, ServerError)
    assert "/destroy_weights_update_group" in living.asked and stays.transport.group_of(living) == ""
    kept = asyncio.run(offer.weights())  # what came after the break as well
    assert kept.keys() == weights.keys() and all(torch.equal(kept[n], weights[n]) for n in weights)
    assert lost.transport.group_of(dying) == ""


def test_the_newest_weights_are_given_out_once_their_copy_is_complete(config, trainer, weights, monkeypatch):
    """A worker that asks while the next version is copied gets that one, whole."""
    trainer.sender._trainer.weights = weights
    trainer.sender.copy(1)
    started, goes_on = threading.Event(), threading.Event()
    buckets = Weights.weight_buckets

    def slowly(*args, **options):
        for bucket in buckets(*args, **options):
            started.set()
            assert goes_on.wait(60)
            yield [(name, tensor + 1) for name, tensor in bucket]

    monkeypatch.setattr(Weights, "weight_buckets", slowly)
    with ThreadPoolExecutor(2) as threads:
        copying = threads.submit(trainer.sender.copy, 2)
        assert started.wait(60)
        asked = threads.submit(trainer.sender.newest)
        assert wait([asked], timeout=0.2).not_done
        goes_on.set()
        copying.result()
        given = asked.result()

    assert given.version == 2
    assert all(torch.equal(tensor, weights[name] + 1) for name, tensor in unpack_weights(given).items())


def test_a_copy_that_never_completes_is_an_error(config, trainer):
    config.sglang.update_timeout = 0.1
    with pytest.raises(RuntimeError, match=r"no complete copy of its weights after 0\.1 s"):
        trainer.sender.newest()


def addresses(sender):
    return {name: tensor.data_ptr() for name, tensor in sender._copy.tensors.items()}


def test_every_version_is_copied_into_the_memory_of_the_one_before(config, trainer, weights, tmp_path):
    """New memory is several times as slow to write to."""
    parties = list(zip(syncs(config, tmp_path, 1), [Receiver()], strict=True))
    receive(trainer.offer(weights, 1, ["0"]), parties)
    made = addresses(trainer.sender)
    for version in (2, 3):
        sent = {name: tensor + version for name, tensor in weights.items()}
        offer = trainer.offer(sent, version, ["0"], again=True)
        receive(offer, parties)
        kept = asyncio.run(offer.weights())
        assert all(torch.equal(kept[name], sent[name]) for name in sent)
        assert addresses(trainer.sender) == made
    trainer.sender.open("127.0.0.1", 1)
    assert addresses(trainer.sender) == made, "another group, the same weights"


def test_a_version_that_is_being_read_is_not_written_over(config, trainer, weights, tmp_path, monkeypatch):
    parties = list(zip(syncs(config, tmp_path, 1), [Receiver()], strict=True))
    receive(trainer.offer(weights, 1, ["0"]), parties)
    reading, may_read = threading.Event(), threading.Event()

    def pack(tensors, version):
        reading.set()
        may_read.wait(10)
        return pack_weights(tensors, version)

    monkeypatch.setattr(sender, "pack_weights", pack)
    changed = {name: tensor + 1 for name, tensor in weights.items()}
    with ThreadPoolExecutor(2) as threads:
        packed = threads.submit(trainer.sender.newest)
        reading.wait(10)
        trainer.sender._trainer.weights = changed
        copied = threads.submit(trainer.sender.copy, 2)
        may_read.set()
        given = unpack_weights(packed.result())
        copied.result()
    assert all(torch.equal(given[name], weights[name]) for name in weights)


def test_a_training_step_does_not_change_the_version_on_its_way(config, trainer, weights, tmp_path):
    """The optimizer writes over each weight in place as soon as the version is copied."""
    trained = {name: tensor.clone() for name, tensor in weights.items()}
    receiver = Receiver()
    offer = trainer.offer(trained, 1, ["0"])
    for tensor in trained.values():
        tensor.add_(1)
    (sent,) = receive(offer, list(zip(syncs(config, tmp_path, 1), [receiver], strict=True)))
    assert_holds(receiver, weights)
    parts = server_parts(
        weights,
        Shard(kv_heads=read_config(TINY)["num_key_value_heads"]),
        read_config(TINY),
        dtype=torch.float32,
        drafter=Drafter.MTP,
    )
    assert sent.checksums.ranks == [fingerprints(parts, on_gpu=False)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_checksums_made_by_buckets_are_those_of_whole_weights(config, trainer, weights, ranks):
    config.sglang.tp = ranks
    trainer.sender._trainer.weights = weights
    trainer.sender.copy(1)
    sent = trainer.sender.send(1)
    assert "no group" in sent.failure and len(sent.checksums.ranks) == ranks
    for rank in range(ranks):
        shard = Shard(rank=rank, size=ranks, kv_heads=read_config(TINY)["num_key_value_heads"])
        for draft in (Drafter.MTP, None):
            whole = server_parts(weights, shard, read_config(TINY), dtype=torch.float32, drafter=draft)
            assert sent.checksums.for_rank(rank, draft=draft is not None) == fingerprints(whole, on_gpu=False)


def test_a_worker_broadcasts_to_its_own_server_in_the_same_way(config, weights, tmp_path):
    (sync,), receiver = syncs(config, tmp_path, 1), Receiver()
    try:
        for version in (1, 2):
            asyncio.run(sync.send(receiver, WeightUpdate(weights=weights, version=version, flush=False)))
            assert_holds(receiver, weights)
    finally:
        sync.close()
    assert receiver.asked.count("/init_weights_update_group") == 1


def test_a_worker_whose_broadcast_broke_off_makes_another_group(config, weights, tmp_path):
    (sync,), receiver = syncs(config, tmp_path, 1), Receiver(die_at=2)
    try:
        with pytest.raises(ServerUnreachable):
            asyncio.run(sync.send(receiver, WeightUpdate(weights=weights, version=1, flush=False)))
        asyncio.run(sync.send(receiver, WeightUpdate(weights=weights, version=1, flush=False)))
    finally:
        sync.close()
    assert_holds(receiver, weights)


def test_a_worker_whose_group_was_ended_with_a_trainer_makes_another(config, weights, tmp_path):
    (sync,), receiver = syncs(config, tmp_path, 1), Receiver()
    try:
        asyncio.run(sync.send(receiver, WeightUpdate(weights=weights, version=1, flush=False)))
        for group in list(c10d._world.pg_map):  # as a trainer in this process does when it stops
            torch.distributed.destroy_process_group(group)
        asyncio.run(sync.send(receiver, WeightUpdate(weights=weights, version=2, flush=False)))
    finally:
        sync.close()
    assert_holds(receiver, weights)
    assert receiver.asked.count("/init_weights_update_group") == 2


def test_a_broadcast_that_fails_does_not_wait_for_the_server(config, weights, tmp_path, monkeypatch):
    class Waiting:
        async def post(self, path, body, timeout=None):
            if path == "/update_weights_from_distributed":
                await asyncio.Event().wait()

    def fails(root, buckets):
        raise GroupBroken("a rank was lost")

    monkeypatch.setattr(Root, "send", fails)
    (sync,) = syncs(config, tmp_path, 1)
    with pytest.raises(ServerUnreachable, match="a rank was lost"):
        asyncio.run(
            asyncio.wait_for(sync.send(Waiting(), WeightUpdate(weights=weights, version=1, flush=False)), 60)
        )


def test_a_rank_that_does_not_join_is_missed():
    root = Root("127.0.0.1", ranks=2, timeout=1.0)
    asked = describe_join(root.rendezvous, first_rank=1)
    assert asked["backend"] == "gloo" and asked["rank_offset"] == 1 and asked["world_size"] == 3
    with pytest.raises(GroupBroken, match="the group of 3 ranks broke off"):
        root.send([[("a", torch.ones(3))]])
    root.close()


def test_who_waits_for_a_rank_to_join_stops_when_the_group_is_closed():
    """Else a worker whose server died while joining could not end for `update_timeout`."""
    root = Root("127.0.0.1", ranks=1, timeout=300.0)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(root.send, [])
        while not sending.running():
            time.sleep(0.01)
        time.sleep(0.1)
        root.close()
        with pytest.raises(GroupBroken, match="it was left"):
            sending.result(30)


def test_a_piece_is_described_as_it_is_laid_out():
    bucket = [("half", torch.ones(3, dtype=torch.float16)), ("wide", torch.ones(2, 2).to("meta"))]
    told = describe_bucket(bucket, "g")
    assert told["names"] == ["wide", "half"] and told["dtypes"] == ["float32", "float16"]
    assert told["shapes"] == [[2, 2], [3]] and told["group_name"] == "g"
