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
