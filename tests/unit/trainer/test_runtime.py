"""Where the ranks of a trainer meet."""

from __future__ import annotations

import errno
import socket

import pytest
import torch.distributed as dist

from rlpipe.trainer import runtime

pytestmark = pytest.mark.unit


def test_the_port_of_rank_0_is_taken_before_it_is_told(monkeypatch):
    """So no other process can have it by the time the ranks join, however long they take to start."""
    monkeypatch.setattr(runtime, "_listening", {})
    first, second = (runtime.open_address(world_size=2) for _ in range(2))
    assert first != second
    host, port = first.split(":")
    with socket.socket() as other, pytest.raises(OSError, match="in use") as refused:
        other.bind((host, int(port)))
    assert refused.value.errno == errno.EADDRINUSE
    dist.TCPStore(host, int(port), 2, False, wait_for_workers=False).set("rank 1", "here")
    assert runtime._listening[first].get("rank 1") == b"here"
