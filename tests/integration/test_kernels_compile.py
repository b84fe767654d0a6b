"""Every Triton kernel compiles for GPUs that are not here, specialised on what its launcher passes.

The interpreter that runs the kernels on a CPU never specialises, so a kernel can pass every other test and
not compile. Each case is one child process: TRITON_INTERPRET is read when triton is imported.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.integration


def compile_kernels(root, *capabilities):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "tests.helpers.compile_kernels", *map(str, capabilities)],
        cwd=root,
        env=environment | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_kernel_compiles_for_ampere_hopper_and_blackwell():
    done = compile_kernels(ROOT, 80, 90, 100)
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    for name, architectures in compiled.items():
        assert set(architectures) == {"80", "90", "100"}, name
        for ptx in architectures["90"]["151936"]:  # 16 bytes at once: directly, or copied ahead
            assert name == "pick_token" or "ld.global.v4" in ptx or "cp.async.cg.shared.global" in ptx, name
        if name.endswith("_kernel"):  # verification: a fused w * p - q would round once, the reference twice
            for ptx in (text for vocabs in architectures.values() for v in vocabs.values() for text in v):
                assert "fma.rn" not in ptx, name


@pytest.mark.parametrize(
    ("module", "old", "new", "message"),
    [
        # right in the interpreter; a stride of 1 is a constexpr once it is specialised, and has no dtype
        (
            "drafts/kernels/tv.py",
            "v.to(tl.int64) * stride_v",
            "v * stride_v.to(tl.int64)",
            "CompilationError",
        ),
        ("spec/kernels/launch.py", '"TILE": min(TILE, _power_of_two(vocab))', '"TILE": 1000', "power of 2"),
        (
            "spec/kernels/launch.py",
            "*probs,\n            uniforms",
            "probs,\n            uniforms",
            "a tuple",
        ),
        (
            "../sglang_env/plugin/rlpipe_sglang/kernels.py",
            "start",  # two pointers of different types under one name
            "place",
            "Mismatched type",
        ),
        (
            "weights/fingerprint_kernel.py",
            "tl.full((), num_words, tl.uint32)",
            "num_words.to(tl.uint32)",
            "CompilationError",
        ),
    ],
)
def test_a_planted_bug_that_the_interpreter_does_not_show_is_caught(module, old, new, message, tmp_path):
    for folder in ("rlpipe", "tests", "sglang_env/plugin"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "rlpipe" / module
    source = file.read_text()
    assert old in source
    file.write_text(source.replace(old, new))
    done = compile_kernels(tmp_path, 90)
    assert done.returncode != 0
    assert message in done.stderr
