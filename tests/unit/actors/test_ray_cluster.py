"""What counts as a dead or hung process, and how a dead one is replaced; the actors are played."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError

from rlpipe.actors import workers
from rlpipe.actors.ray_cluster import RayCluster, check_capacity
from rlpipe.actors.workers import Workers
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import ClusterConfig, Config
from rlpipe.types import RunStopped

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
    actors = [worker, *replacements]
    cluster._workers = Workers(
        cluster._config.cluster, lambda n: actors.pop(0), count=1, on_event=cluster._on_event
    )
    cluster._workers.newest = lambda worker: worker.update_weights.remote("version 3")
    cluster._trainers = [worker]
    cluster._places = SimpleNamespace(close=lambda: None)
    return cluster, events


def collect(cluster):
    return cluster._workers.call_least_loaded(lambda worker: worker.collect.remote())


TIMED_OUT = RayTaskError("collect", "the store did not answer", TimeoutError()).as_instanceof_cause()


@pytest.mark.parametrize("hang_s", [0, 60])
@pytest.mark.parametrize("call", ["rollout", "trainer"])
def test_a_timeout_raised_inside_an_actor_is_its_error_and_not_a_hang(monkeypatch, hang_s, call):
    monkeypatch.setattr(workers.ray, "kill", lambda actor: pytest.fail("an actor that answers was killed"))
    cluster, events = cluster_of(Actor(TIMED_OUT), [], hang_s=hang_s)
    calling = (
        collect(cluster)
        if call == "rollout"
        else cluster._call_ranks("step", lambda rank: rank.step.remote())
    )
    with pytest.raises(RayTaskError, match="the store did not answer"):
        asyncio.run(calling)
    assert events == []


def test_a_replacement_that_dies_while_it_is_started_is_replaced_as_well():
    dies = Actor(update_weights=RayActorError())
    cluster, events = cluster_of(Actor(RayActorError()), [dies, dies, Actor("a group")], max_restarts=3)
    assert asyncio.run(collect(cluster)) == "a group"
    assert events == ["rollout_worker_died"] * 3


def test_replacements_that_die_end_the_run_once_no_restart_is_left():
    dies = Actor(update_weights=RayActorError())
    cluster, events = cluster_of(Actor(RayActorError()), [dies] * 9, max_restarts=2)
    with pytest.raises(RuntimeError, match=r"died 3 times \(cluster.max_restarts=2\)"):
        asyncio.run(collect(cluster))
    assert events == ["rollout_worker_died"] * 3


def test_an_actor_that_does_not_close_is_reported_and_killed(monkeypatch):
    killed = []
    monkeypatch.setattr(workers.ray, "kill", killed.append)
    stuck, closes = Actor(), Actor()
    stuck.close, closes.close = Method(TimeoutError()), Method(None)  # a TimeoutError has no words
    cluster, _ = cluster_of(stuck, [])
    cluster._trainers, reported = [closes], []
    cluster._on_event = lambda kind, **fields: reported.append((kind, fields))
    asyncio.run(cluster.close())
    assert reported == [("close_failed", {"error": "TimeoutError"})] and killed == [stuck, closes]


def test_a_cluster_with_too_few_cpus_or_gpus_is_refused_with_need_and_supply():
    nine = Config(rollout=RolloutConfig(workers=9))
    check_capacity(nine, {"CPU": 10.0})
    check_capacity(nine, {"CPU": 10.0, "GPU": 10.0})
    with pytest.raises(ValueError, match=r"rollout.workers=9 and 1 trainer ranks need 10 CPUs .* has 4:"):
        check_capacity(nine, {"CPU": 4.0})
    with pytest.raises(ValueError, match=r"need 10 GPUs \(1 for a worker, 1 for a rank\).* has 8:"):
        check_capacity(nine, {"CPU": 64.0, "GPU": 8.0})


def test_a_worker_that_does_not_answer_is_named_among_what_is_waited_for(monkeypatch):
    monkeypatch.setattr(workers, "_ACTIVITY_S", 0.01)
    busy, dead, silent = (Actor() for _ in range(3))
    busy.activity, dead.activity = Method("3 turns generate"), Method(RayActorError())
    silent.activity = type("Silent", (), {"remote": lambda self: asyncio.sleep(60)})()
    actors = [busy, dead, silent]
    pool = Workers(ClusterConfig(), lambda n: actors[n], count=3, on_event=lambda *_, **__: None)
    first, second, third = asyncio.run(pool.activity())
    assert first == "worker 0: 3 turns generate"
    assert (
        second.startswith("worker 1 does not answer") and third == "worker 2 does not answer (TimeoutError)"
    )


def test_a_rule_that_a_worker_ends_the_run_by_comes_without_the_traceback_of_ray():
    stopped = RayTaskError("collect", "a traceback", RunStopped("33 threads are stuck")).as_instanceof_cause()
    cluster, _ = cluster_of(Actor(stopped), [])
    with pytest.raises(RunStopped) as ended:
        asyncio.run(collect(cluster))
    assert str(ended.value) == "33 threads are stuck"
