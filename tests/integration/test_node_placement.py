"""Placement over nodes with made-up GPUs: each node is a Ray process of its own on this machine."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

SCRIPT = """
import json
import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table
from rlpipe.actors import placement
from rlpipe.actors.placement import Placement
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import ClusterConfig, Config
from rlpipe.config.sglang import SglangConfig
from rlpipe.config.trainer import TrainerConfig

def config(workers, server, tp, dp, share=False):
    rollout = RolloutConfig(engine="sglang", workers=workers, sglang=SglangConfig(tp=server))
    cluster = ClusterConfig(share_gpus=share)
    return Config(rollout=rollout, trainer=TrainerConfig(tp=tp, dp=dp), cluster=cluster)

@ray.remote(num_cpus=1)
class Actor:
    def where(self):
        return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()

def actors(options, gpus):
    return [Actor.options(num_gpus=gpus, **each).remote() for each in options]

def where(found):
    return ray.get([actor.where.remote() for actor in found])

def nodes_of(*options):
    strategies = [[each["scheduling_strategy"] for each in some] for some in options]
    table = placement_group_table(strategies[0][0].placement_group)["bundles_to_node_id"]
    return [[table[s.placement_group_bundle_index] for s in some] for some in strategies]

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
nodes = [cluster.add_node(num_cpus=8, num_gpus=gpus) for gpus in (4, 3, 4)]
ray.init(address=cluster.address, logging_level="ERROR")
cluster.wait_for_nodes()
told = {}

# All 11 GPUs are used: by four servers of 2 and a trainer group of 3.
places = Placement(config(4, 2, 3, 1), gpus=True)
told["filled"] = nodes_of([places.of_worker(n) for n in range(4)], [places.of_rank(n) for n in range(3)])
places.close()

# Four groups of two ranks, and a server of 3: neighbouring groups share a node.
places = Placement(config(1, 3, 2, 4), gpus=True)
told["neighbours"] = nodes_of([places.of_rank(n) for n in range(8)])[0]
places.close()

# Pairs of worker and rank, of groups of two.
places = Placement(config(4, 1, 2, 2, share=True), gpus=True)
workers = actors([places.of_worker(n) for n in range(4)], 0.5)
ranks = actors([places.of_rank(n) for n in range(4)], 0.5)
told["shared"] = [where(workers), where(ranks)]
for actor in workers + ranks:
    ray.kill(actor)
places.close()

placement.PLACED_S = 1.0
fits = Placement(config(1, 3, 4, 2), gpus=True)  # two groups of 4, and a server of 3
fits.close()
try:
    Placement(config(1, 4, 4, 2), gpus=True)
except ValueError as error:
    told["missing"] = str(error)
print(json.dumps(told))
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def told():
    """What a process of its own tells about a Ray cluster of three nodes, of 4, 3 and 4 GPUs."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_servers_and_a_tensor_parallel_group_fill_the_nodes_undivided(told):
    """Four servers of 2 GPUs and a group of 3 ranks on 4 + 3 + 4: only one way leaves none waiting."""
    servers, ranks = told["filled"]
    assert len(set(ranks)) == 1 and ranks[0] not in servers
    assert sorted(servers.count(node) for node in set(servers)) == [2, 2]


def test_neighbouring_groups_of_the_trainer_are_on_one_node(told):
    nodes = told["neighbours"]
    assert all(nodes[n] == nodes[n + 1] for n in range(0, 8, 2))
    assert nodes == sorted(nodes)


def test_pairs_share_a_gpu_and_a_group_of_them_a_node(told):
    workers, ranks = told["shared"]
    assert workers == ranks
    assert workers[0][0] == workers[1][0] and workers[2][0] == workers[3][0]
    assert len({(node, *gpus) for node, gpus in workers}) == 4


def test_what_finds_no_place_is_named_after_a_deadline(told):
    assert "no place for 1 x (1 CPUs, 4 GPUs)" in told["missing"]
    assert "1 x (8 CPUs, 3 GPUs)" in told["missing"]
