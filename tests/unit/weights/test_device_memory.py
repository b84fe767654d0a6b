"""Memory of a GPU in two processes, with a driver that is played on a CPU: who allocates, maps and closes."""

import contextlib
import ctypes
from types import SimpleNamespace

import pytest
import torch

from rlpipe.weights import device_memory
from rlpipe.weights.transports.base import Audience
from rlpipe.weights.transports.ipc import IpcRoot
from tests.helpers.mapped import served

pytestmark = pytest.mark.unit
GPU = torch.device("cuda:0")


class Driver:
    """CUDA's driver. Every allocation gets the same handle, as may happen once memory was freed."""

    def __init__(self):
        self.calls, self.memory = [], {}

    def cuMemAlloc_v2(self, pointer, size):
        made = torch.zeros(size.value, dtype=torch.uint8)
        self.memory[made.data_ptr()] = made
        pointer._obj.value = made.data_ptr()
        return self._note("alloc")

    def cuMemFree_v2(self, _):
        return self._note("free")

    def cuIpcGetMemHandle(self, *_):
        return 0

    def cuIpcOpenMemHandle_v2(self, pointer, *_):
        pointer._obj.value = list(self.memory)[-1]
        return self._note("open")

    def cuIpcCloseMemHandle(self, _):
        return self._note("close")

    def _note(self, call):
        self.calls.append(call)
        return 0


@pytest.fixture
def driver(monkeypatch):
    played = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: played)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="this GPU"))
    plain_empty = torch.empty

    def empty(*size, device=None, **more):
        return plain_empty(*size, device="meta" if device == "meta" else "cpu", **more)

    def as_tensor(made, device=None):
        return played.memory[made.__cuda_array_interface__["data"][0]]

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    device_memory.memory_of.cache_clear()
    served._on_gpu.clear()
    yield played
    device_memory.memory_of.cache_clear()
    served._on_gpu.clear()


def root(size):
    bucket = [("a", torch.empty(size, device="meta"))]
    audience = Audience(
        host="127.0.0.1", servers=1, ranks=1, on_gpu=True, timeout=5.0, device=GPU, buckets=[bucket]
    )
    return IpcRoot(audience)


def test_one_memory_serves_every_group_and_is_never_freed_under_a_server_that_maps_it(driver):
    first = root(100)
    served._map_gpu(first._memory.location())
    first.close()
    second = root(100)
    served._map_gpu(second._memory.location())
    assert driver.calls == ["alloc", "open"], "the server still maps what the first group had"


def test_other_memory_with_the_same_handle_is_mapped_anew_after_the_old_one_was_closed(driver):
    memory = device_memory.memory_of(GPU)
    memory.reserve(64)
    old = served._map_gpu(memory.location())
    memory.reserve(128)
    location = memory.location()
    new = served._map_gpu(location)
    memory.bytes.fill_(7)
    assert driver.calls == ["alloc", "open", "alloc", "close", "open"]
    assert (len(old), len(new), int(new.sum())) == (64, 128, 7 * 128)
    assert served._map_gpu(location) is new
