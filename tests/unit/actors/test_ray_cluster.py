"""What counts as a dead or hung process, and how a dead one is replaced; the actors are played."""

import asyncio

import pytest
from ray.exceptions import RayActorError, RayTaskError

from rlpipe.actors import ray_cluster
from rlpipe.actors.ray_cluster import RayCluster
from rlpipe.config.run import ClusterConfig, Config

pytestmark = pytest.mark.unit


class Method:
    """A method of an actor: gives what is to be given, or raises it."""

    def __init__(self, outcome):
        self.outcome = outcome

    def remote(self, *args):
        async def answer():
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return self.outcome

        return answer()


class Actor:
    """collect: what it answers. update_weights: what becomes of it while it is given the newest weights."""

    def __init__(self, collect=None, update_weights=None):
        self.collect, self.update_weights, self.step = (
            Method(collect),
            Method(update_weights),
            Method(collect),
        )


def cluster_of(worker, replacements, **settings):
    """A cluster whose only worker, and only trainer rank, is `worker`; and the events it reports."""
    cluster, events = RayCluster.__new__(RayCluster), []
    cluster._config = Config(cluster=ClusterConfig(**settings))
    cluster._on_event = lambda kind, **fields: events.append(kind)
    cluster._rollouts, cluster._load, cluster._trainers = [worker], [0], [worker]
    cluster._restarts, cluster._newest = 0, ("update_weights", "version 3")
    cluster._respawning = asyncio.Lock()
    cluster._spawn_rollout = lambda n: replacements.pop(0)
    return cluster, events


TIMED_OUT = RayTaskError("collect", "the store did not answer", TimeoutError()).as_instanceof_cause()


@pytest.mark.parametrize("hang_s", [0, 60])
@pytest.mark.parametrize("call", ["_on_some_worker", "_on_trainers"])
def test_a_timeout_raised_inside_an_actor_is_its_error_and_not_a_hang(monkeypatch, hang_s, call):
    monkeypatch.setattr(
        ray_cluster.ray, "kill", lambda actor: pytest.fail("an actor that answers was killed")
    )
    cluster, events = cluster_of(Actor(TIMED_OUT), [], hang_s=hang_s)
    method = {"_on_some_worker": "collect", "_on_trainers": "step"}[call]
    with pytest.raises(RayTaskError, match="the store did not answer"):
        asyncio.run(getattr(cluster, call)(method))
    assert events == []


def test_a_replacement_that_dies_while_it_is_started_is_replaced_as_well():
    dies = Actor(update_weights=RayActorError())
    cluster, events = cluster_of(Actor(RayActorError()), [dies, dies, Actor("a group")], max_restarts=3)
    assert asyncio.run(cluster._on_some_worker("collect")) == "a group"
    assert events == ["rollout_worker_died"] * 3


def test_replacements_that_die_end_the_run_once_no_restart_is_left():
    dies = Actor(update_weights=RayActorError())
    cluster, events = cluster_of(Actor(RayActorError()), [dies] * 9, max_restarts=2)
    with pytest.raises(RuntimeError, match=r"died 3 times \(cluster.max_restarts=2\)"):
        asyncio.run(cluster._on_some_worker("collect"))
    assert events == ["rollout_worker_died"] * 3


def test_an_actor_that_does_not_close_is_reported_and_killed(monkeypatch):
    killed = []
    monkeypatch.setattr(ray_cluster.ray, "kill", killed.append)
    stuck, closes = Actor(), Actor()
    stuck.close, closes.close = Method(TimeoutError()), Method(None)  # a TimeoutError has no words
    cluster, _ = cluster_of(stuck, [])
    cluster._trainers, reported = [closes], []
    cluster._on_event = lambda kind, **fields: reported.append((kind, fields))
    asyncio.run(cluster.close())
    assert reported == [("close_failed", {"error": "TimeoutError"})] and killed == [stuck, closes]
