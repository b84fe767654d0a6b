"""Actors of a Ray cluster use the interface of their node's address, unless the user chose one."""

import psutil
import pytest

from rlpipe.actors import network
from rlpipe.config.run import ClusterConfig, Config

pytestmark = pytest.mark.unit


@pytest.fixture
def environment(monkeypatch):
    """The variables, none set, on a machine whose node address is on loopback."""
    for name in network.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    return network.os.environ


def test_both_libraries_get_the_interface_of_the_nodes_address(environment):
    network.choose_interface(Config(cluster=ClusterConfig(address="10.0.0.1:6379")))
    name = environment["GLOO_SOCKET_IFNAME"]
    assert "127.0.0.1" in [each.address for each in psutil.net_if_addrs()[name]]
    assert environment["NCCL_SOCKET_IFNAME"] == name
    for variable in network.VARIABLES:
        del environment[variable]


def test_a_choice_of_the_user_stays_and_one_machine_needs_none(environment, monkeypatch):
    network.choose_interface(Config())
    assert not set(network.VARIABLES) & set(environment)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib1")
    network.choose_interface(Config(cluster=ClusterConfig(address="10.0.0.1:6379")))
    assert [environment[name] for name in network.VARIABLES] == ["ib0", "ib1"]


def test_an_address_that_no_interface_has_chooses_none():
    assert network.interface_of("203.0.113.9") == ""
