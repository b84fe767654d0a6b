"""Which trainer rank sends weights to which server: real senders and transports on a CPU, played actors."""

import asyncio
from dataclasses import replace

import pytest
import torch

from rlpipe.actors.ray_cluster import RayCluster
from rlpipe.actors.workers import Workers
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import ClusterConfig, Config
from rlpipe.config.spec import SpecConfig
from rlpipe.config.trainer import TrainerConfig
from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.weights.offer import Member
from rlpipe.weights.payload import unpack_weights
from rlpipe.weights.sender import WeightSender
from rlpipe.weights.sync import WeightSync
from rlpipe.weights.transports.base import WeightUpdate
from tests.helpers.broadcasts import Weights
from tests.helpers.cli import ROOT
from tests.helpers.mapped import Server, open_files
from tests.helpers.played_actors import Actor

pytestmark = pytest.mark.unit
TINY = ROOT / "models" / "tiny"
RANKS = 2


class OneRank(Weights):
    """Gathers full weights on the first rank, or everywhere, as a trainer does."""

    first: bool

    def __init__(self, weights, *, first):
        super().__init__(hf_config=read_config(TINY), weights=weights)
        self.first = first

    def weight_buckets(self, megabytes, dtype, *, everywhere=False):
        return super().weight_buckets(megabytes, dtype) if everywhere or self.first else ()


class Rank:
    """A trainer rank with weights that tell its number: rank r has those of the model plus r."""

    def __init__(self, config, number, order):
        weights = {name: tensor + number for name, tensor in read_weights(TINY).items()}
        self.weights = OneRank(weights, first=number == 0)
        everywhere = config.sends_from_every_rank
        self.sender = WeightSender(
            config.rollout,
            self.weights,
            on_gpu=False,
            root=everywhere or number == 0,
            everywhere=everywhere,
        )
        self.number, self.order, self.opened = number, order, []

    async def copy_weights(self, version):
        self.sender.copy(version)
        self.order.append("copied")

    async def step(self):
        for tensor in self.weights.weights.values():
            tensor.add_(100)
        self.order.append("trained")

    async def open_group(self, host, servers):
        self.opened.append(servers)
        return self.sender.open(host, servers)

    async def broadcast(self, version):
        sent = await asyncio.to_thread(self.sender.send, version)
        self.order.append("sent")
        return sent

    async def newest(self):
        return await asyncio.to_thread(self.sender.newest)


class Worker:
    """A rollout worker and its server, which maps what it is told to."""

    def __init__(self, config, number, folder):
        self.number, self.server = number, Server()
        self.sync = WeightSync(config.rollout, SpecConfig(), TINY, on_gpu=False, folder=folder)

    async def membership(self):
        group = self.sync.transport.group_of(self.server)
        return Member(server=f"server {self.number}", group=group, worker=self.number)

    async def receive_weights(self, offers):
        offer = offers[self.number] if len(offers) > 1 else offers[0]
        await self.sync.receive(self.server, offer, f"server {self.number}", flush=False)
        return {}

    async def update_weights(self, payload):
        newest = await payload  # Ray resolves it
        update = WeightUpdate(weights=unpack_weights(newest), version=newest.version, flush=False)
        await self.sync.send(self.server, update)

    async def take_events(self):
        return []


@pytest.fixture
def played(tmp_path):
    """A cluster of two ranks and two servers on two GPUs, as far as its settings go."""

    def made(**settings):
        rollout = RolloutConfig(engine="sglang", device="cpu", workers=RANKS)
        config = Config(cluster=ClusterConfig(**settings), rollout=rollout, trainer=TrainerConfig(dp=RANKS))
        rollout.sglang.weight_transfer = "ipc"
        rollout.sglang.__post_init__()

        cluster, order = RayCluster.__new__(RayCluster), []
        cluster._config, cluster._on_event = config, lambda *_, **__: None
        cluster._groups, cluster._trainer_host = {}, "127.0.0.1"
        ranks = [Rank(config, number, order) for number in range(RANKS)]
        workers = [Worker(config, number, tmp_path) for number in range(RANKS)]
        cluster._trainers = [Actor(rank, serial=True) for rank in ranks]
        actors = [Actor(worker, serial=False) for worker in workers]
        cluster._workers = Workers(
            config.cluster, actors.__getitem__, count=RANKS, on_event=cluster._on_event
        )
        cluster.ranks, cluster.served, cluster.order = ranks, [w.server for w in workers], order
        return cluster

    yield made
    assert open_files() == []


def publish(cluster, versions, *, trains=False):
    async def run():
        for version in versions:
            send = await cluster.publish_weights(version)
            if trains:
                await asyncio.gather(*(rank.step.remote() for rank in cluster._trainers))
            await send()

    asyncio.run(run())
    for rank in cluster.ranks:
        rank.sender.close()


def holds(server, number):
    """Whether a server has exactly the weights of this rank."""
    wanted = {name: tensor + number for name, tensor in read_weights(TINY).items()}
    return server.weights.keys() == wanted.keys() and all(
        torch.equal(server.weights[name], tensor) for name, tensor in wanted.items()
    )


def test_on_shared_gpus_each_rank_sends_what_it_has_to_the_server_of_its_gpu(played):
    cluster = played(share_gpus=True)
    publish(cluster, (1, 2))
    assert [holds(server, number) for number, server in enumerate(cluster.served)] == [True, True]
    assert [rank.opened for rank in cluster.ranks] == [[1], [1]], "one group each, for both versions"


def test_elsewhere_the_first_rank_sends_to_all_servers(played):
    cluster = played()
    publish(cluster, (1, 2))
    assert [holds(server, 0) for server in cluster.served] == [True, True]
    assert [rank.opened for rank in cluster.ranks] == [[2], []]


@pytest.mark.parametrize("shared", [True, False])
def test_a_step_after_the_copy_changes_nothing_that_is_sent(played, shared):
    cluster = played(share_gpus=shared)
    publish(cluster, (1,), trains=True)
    assert cluster.order[: 2 * RANKS] == ["copied"] * RANKS + ["trained"] * RANKS
    assert [holds(server, shared * number) for number, server in enumerate(cluster.served)] == [True, True]


def test_a_server_that_is_down_keeps_no_rank_waiting(played):
    cluster = played(share_gpus=True)
    down = cluster._workers.members[1].actor.target

    async def nobody():
        return replace(Member(server="", group=""), worker=1)

    async def later(offers):
        assert (await offers[1].weights()).keys() == read_weights(TINY).keys()
        return {}

    down.membership, down.receive_weights = nobody, later
    publish(cluster, (1,))
    assert holds(cluster.served[0], 0) and cluster.served[1].weights == {}


@pytest.mark.parametrize("shared", [True, False])
def test_a_worker_that_joins_after_the_next_copy_gets_the_weights_of_that_copy(played, tmp_path, shared):
    """The version that was sent last is in no process any more; the run must not end for it."""
    cluster = played(share_gpus=shared)
    joins = Worker(cluster._config, 0, tmp_path)

    async def run():
        await (await cluster.publish_weights(1))()
        for tensor in cluster.ranks[0].weights.weights.values():
            tensor.add_(100)
        await cluster.publish_weights(2)  # copied, and not sent yet
        assert cluster._workers.newest is not None
        await cluster._workers.newest(Actor(joins, serial=False))

    asyncio.run(run())
    for rank in cluster.ranks:
        rank.sender.close()
    joins.sync.close()
    assert holds(joins.server, 100)
