"""Chooses the network interface for process groups between machines.

gloo binds the address that the host's name resolves to, which on Debian is 127.0.1.1; then ranks on two
machines wait for each other forever. NCCL takes the first interface that looks usable. Here both use the
interface through which Ray's nodes reach each other, unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set.
SGLang's servers inherit these variables from their workers.
"""

from __future__ import annotations

import os

import psutil

from rlpipe.config.run import Config

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def choose_interface(config: Config) -> None:
    """Set both variables in this actor, unless the Ray cluster has only this machine."""
    if not config.cluster.address:
        return
    import ray

    if name := interface_of(ray.util.get_node_ip_address()):
        for variable in VARIABLES:
            os.environ.setdefault(variable, name)


def interface_of(address: str) -> str:
    """Return the name of the interface that has an address; empty if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return name
    return ""
