"""A machine of a Ray cluster disappears during a run: what ran on it is started on another one."""

from contextlib import contextmanager, suppress

import psutil
import pytest

from tests.helpers.cli import start
from tests.helpers.disturbed_runs import LONG, check_the_end, events, wait_for

pytestmark = pytest.mark.chaos

# Ray finds a dead machine by asking it: twice within a second here, five times within 15 s by default
WATCHFUL = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 2,
}


@contextmanager
def ray_nodes(count):
    """A Ray cluster: a head that runs no actor, and machines with room for one actor each."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": WATCHFUL}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        nodes = [cluster.add_node(num_cpus=1, include_dashboard=False) for _ in range(count)]
        yield cluster, nodes
    finally:
        cluster.shutdown()


def processes_of(node):
    """A machine's: the one that speaks for it, then its actors."""
    (raylet,) = (info.process.pid for info in node.all_processes["raylet"])
    return [psutil.Process(raylet), *psutil.Process(raylet).children(recursive=True)]


def lose(nodes, actor):
    """Kill everything on the machine of an actor at once, as a power cut does; return the machine."""
    (lost,) = (n for n in nodes if any(actor in command_of(p) for p in processes_of(n)))
    for process in processes_of(lost):
        with suppress(psutil.NoSuchProcess):  # it ended with the one that speaks for the machine
            process.kill()
    return lost


def command_of(process):
    """Its command line; empty once it has ended."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def test_what_ran_on_a_lost_machine_is_started_on_another(tmp_path):
    """Two machines for the actors, and one in place of each that is lost."""
    with ray_nodes(4) as (cluster, nodes):
        process, _ = start(*LONG, f"cluster.address={cluster.address}", cwd=tmp_path, lines=2)
        nodes.remove(lose(nodes, "RolloutWorker"))
        wait_for(process, tmp_path, "rollout_worker_died", lines=5)
        lose(nodes, "TrainerWorker")
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert len(events(tmp_path, "rollout_worker_died")) == len(events(tmp_path, "trainer_died")) == 1
    check_the_end(tmp_path)
