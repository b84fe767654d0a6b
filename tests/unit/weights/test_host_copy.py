"""The trainer's copy of a version: one memory for all versions, locked for a trainer on a GPU."""

import pytest
import torch

from rlpipe.weights.host_copy import HostCopy

pytestmark = pytest.mark.unit
PLAN = [
    [("a", torch.empty(3, 5, device="meta"))],
    [("b", torch.empty(7, device="meta", dtype=torch.bfloat16))],
]


class Runtime:
    """CUDA's runtime; every call is noted and returns `code`."""

    def __init__(self, code):
        self.code, self.calls = code, []

    def cudaHostRegister(self, pointer, size, flags):
        self.calls.append((pointer, size, flags))
        return self.code

    def cudaHostUnregister(self, pointer):
        self.calls.append(pointer)


def test_what_was_written_is_read_and_other_weights_need_other_memory():
    copy, a, b = HostCopy(PLAN, torch.device("cpu")), torch.randn(3, 5), torch.randn(7).bfloat16()
    for bucket in ([("a", a)], [("b", b)]):
        copy.write(bucket)
    found = copy.read()
    assert torch.equal(found["a"], a) and torch.equal(found["b"], b)
    assert copy.fits(PLAN) and not copy.fits(PLAN[:1])


def test_memory_is_locked_once_for_a_gpu_and_unlocked_at_its_end(monkeypatch):
    runtime = Runtime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    copy = HostCopy(PLAN, torch.device("cuda"))
    address = copy.read()["a"].data_ptr()
    assert runtime.calls == [(address, 64 + 7 * 2, 0)]
    copy.close()
    copy.close()
    assert runtime.calls[1:] == [address]


def test_memory_that_cannot_be_locked_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(2))
    with pytest.raises(RuntimeError, match="cudaHostRegister of 78 bytes: CUDA error 2"):
        HostCopy(PLAN, torch.device("cuda"))
