"""The Triton kernels under Triton's interpreter, in a process of their own: equal to the torch backend.

TRITON_INTERPRET must be set before triton is imported, so each group of cases is one child process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("group", ["vocabularies", "kinds", "strides", "fused", "planted"])
def test_kernels_under_the_interpreter_equal_the_torch_backend(group):
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.mtp_kernel_cases", group, "cpu"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{group}: equal" in done.stdout


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from rlpipe.drafts.kernels import tv

class Hopper:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)

compiled, run = {}, triton.runtime.jit.JITFunction.run
def compile_only(self, *arguments, **options):
    name = self.fn.__name__
    compiled.setdefault(name, []).append(run(self, *arguments, **{**options, "warmup": True}).asm["ptx"])
triton.runtime.jit.JITFunction.run = compile_only
triton.runtime.driver.set_active(Hopper())

logits = torch.zeros(1, 1, 151_936, dtype=torch.bfloat16)
mask, tokens = torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.long)
lse, sums, factors = torch.zeros(1, 1), torch.zeros(8, 1, 1), torch.zeros(4, 1, 1)
tv.normalizers(logits, 0.7)
_, bits = tv.overlaps(logits, logits, (lse, lse), (lse, lse), 0.7, keep_bits=True)
call = logits, lse, sums, factors, mask, 0.7
tv.gradient(*call, tokens=tokens, bits=bits)
tv.gradient(*call, tokens=None, bits=None, target=logits, target_lse=lse)
assert {name: len(found) for name, found in compiled.items()} == {
    "_normalizers": 1, "_overlaps": 1, "_gradient": 2
}
for name, found in compiled.items():
    for ptx in found:  # 16 bytes at once: directly, or copied ahead into shared memory
        assert "ld.global.v4.b32" in ptx or "cp.async.cg.shared.global" in ptx, name
print("compiled")
"""


def test_the_kernels_compile_for_hopper_with_wide_loads_and_no_device():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "compiled\n", done.stderr
