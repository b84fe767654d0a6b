"""Recipes for CPUs compute in bfloat16 only where that is not slower."""

import pytest

from rlpipe.api.runs import compose
from rlpipe.config import machine as this_machine
from rlpipe.config import number_format
from rlpipe.config.rollout import Dtype
from rlpipe.config.trainer import Precision

FLAGS = {
    "Zen 3": ("x86_64", "flags\t\t: fpu sse2 avx avx2 fma\n"),
    "Zen 4": ("x86_64", "flags\t\t: fpu avx2 avx512f avx512bw avx512_bf16\n"),
    "Ice Lake": ("x86_64", "flags\t\t: fpu avx2 avx512f avx512bw avx512_vnni\n"),
    "Graviton 2": ("aarch64", "Features\t: fp asimd asimddp\n"),
    "Graviton 3": ("aarch64", "Features\t: fp asimd sve bf16\n"),
    "PowerPC": ("ppc64le", "cpu\t\t: POWER9\n"),
}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that makes this machine another one, without a GPU."""

    def become(name, gpu=False):
        processor, text = FLAGS[name]
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{text}")
        monkeypatch.setattr(this_machine, "_CPU_INFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(this_machine.platform, "machine", lambda: processor)
        monkeypatch.setattr(this_machine.shutil, "which", lambda name: "/bin/nvidia-smi" if gpu else None)
        this_machine._instructions.cache_clear()

    yield become
    this_machine._instructions.cache_clear()


@pytest.mark.parametrize(
    ("name", "fast"),
    [
        ("Zen 3", False),
        ("Zen 4", True),
        ("Ice Lake", False),
        ("Graviton 2", False),
        ("Graviton 3", True),
        ("PowerPC", False),
    ],
)
def test_instructions_of_the_cpu_decide(machine, name, fast):
    machine(name)
    assert number_format.fast_bfloat16() is fast


def test_a_system_without_that_list_computes_in_float32(machine, monkeypatch, tmp_path):
    machine("Zen 4")
    monkeypatch.setattr(this_machine, "_CPU_INFO", tmp_path / "none")
    assert not number_format.fast_bfloat16()


def test_a_gpu_computes_in_bfloat16(machine):
    machine("Zen 3", gpu=True)
    assert number_format.fast_bfloat16()


@pytest.mark.parametrize(
    ("name", "dtype", "precision"),
    [
        ("Zen 3", Dtype.FLOAT32, Precision.FP32),
        ("Ice Lake", Dtype.FLOAT32, Precision.FP32),
        ("Zen 4", Dtype.BFLOAT16, Precision.BF16),
    ],
)
@pytest.mark.parametrize("recipe", ["smollm_rl", "smollm_adapt", "walk", "two_tasks"])
def test_recipes_take_the_format_that_the_machine_computes_fast_in(machine, recipe, name, dtype, precision):
    machine(name)
    config = compose([f"+recipe={recipe}", "model.path=shipped:models/tiny"])
    assert (config.rollout.dtype, config.trainer.precision) == (dtype, precision)
    assert number_format.number_format_advice(config) == []


@pytest.mark.parametrize(("name", "slow_to_decode"), [("Zen 3", True), ("Ice Lake", False)])
def test_a_launch_names_the_settings_that_are_slow_on_its_cpu(machine, name, slow_to_decode):
    config = compose(["+recipe=swe_rl", "rollout.dtype=bfloat16", "trainer.precision=bf16"])
    machine(name)
    [advice] = number_format.number_format_advice(config)
    assert "trainer.precision=fp32" in advice
    assert ("rollout.dtype=float32" in advice) is slow_to_decode
    config.cluster.address = "10.0.0.1:6379"
    assert number_format.number_format_advice(config) == []


def test_a_launch_names_engines_that_round_what_the_trainer_does_not(machine):
    config = compose(["+recipe=swe_rl", "rollout.dtype=bfloat16"])
    machine("Zen 4")
    [advice] = number_format.number_format_advice(config)
    assert "rollout.dtype" in advice and "trainer.precision" in advice
    config.trainer.precision = Precision.BF16
    assert number_format.number_format_advice(config) == []


def test_a_machine_with_fast_bfloat16_says_nothing(machine):
    machine("Zen 4")
    config = compose(["+recipe=swe_rl", "rollout.dtype=bfloat16", "trainer.precision=bf16"])
    assert number_format.number_format_advice(config) == []
