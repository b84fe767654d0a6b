"""Placement with cluster.share_gpus, on a Ray that is told of GPUs which the machine does not have."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

SCRIPT = """
import asyncio, json, os
import ray
from rlpipe.actors.ray_cluster import RayCluster
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import ClusterConfig, Config
from rlpipe.config.trainer import TrainerConfig

ray.init(address="local", num_cpus=4, num_gpus=2, include_dashboard=False, logging_level="ERROR")
config = Config(
    cluster=ClusterConfig(share_gpus=True),
    rollout=RolloutConfig(workers=2, device="cpu"),
    trainer=TrainerConfig(dp=2),
)

def rollouts():
    return [worker.actor for worker in cluster._workers.members]

def gpus(actors):
    return ray.get([a.__ray_call__.remote(lambda _: os.environ["CUDA_VISIBLE_DEVICES"]) for a in actors])

order = []
start, spawn = RayCluster._start_trainers, RayCluster._spawn_rollout
RayCluster._start_trainers = lambda self: (start(self), order.append("trainer started"))
RayCluster._spawn_rollout = lambda self, number: (order.append("server"), spawn(self, number))[1]
cluster = RayCluster(config, lambda *_, **__: None)
told = {"workers": gpus(rollouts()), "ranks": gpus(cluster._trainers), "order": list(order)}
ray.kill(rollouts()[0])
asyncio.run(cluster.rollout_metrics())  # it is replaced
told["replaced"] = gpus(rollouts())
asyncio.run(cluster.close())
config.rollout.workers = 3
try:
    RayCluster(config, None)
except ValueError as error:
    told["too many"] = str(error)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told():
    """What a process of its own, with a Ray of its own, tells."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_worker_and_rank_of_one_number_share_a_gpu_and_different_numbers_do_not(told):
    assert told["workers"] == told["ranks"]
    assert sorted(told["workers"]) == ["0", "1"]


def test_servers_measure_the_memory_of_a_gpu_once_the_trainer_has_its_own(told):
    """SGLang dies where memory that it saw as free is taken by the trainer before its weights are loaded."""
    assert told["order"] == ["trainer started", "server", "server"]


def test_a_replaced_worker_returns_to_its_gpu(told):
    assert told["replaced"] == told["ranks"]


def test_more_pairs_than_gpus_are_refused_with_the_numbers(told):
    assert "3 workers needs {'GPU': 3, 'CPU': 6}" in told["too many"]
    assert "'GPU': 2.0" in told["too many"]
