"""Trainer and servers on a GPU machine: their pins fit together, and both have the same torch and NCCL.

Nothing is downloaded but metadata; the tests marked `network` ask the package registry for it.
"""

import re
import runpy
from concurrent.futures import ThreadPoolExecutor

import pytest
from packaging.version import Version

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.packaging
LOCK = runpy.run_path(str(ROOT / "scripts" / "lock"))
CPU, TRAINER, SERVERS = (LOCK["read_pins"](LOCK[name]) for name in ("CPU", "TRAINER", "SERVERS"))


def cuda(pins):
    return {name: version for name, version in pins.items() if LOCK["CUDA"].fullmatch(name)}


def test_trainer_and_servers_have_one_torch_one_triton_and_one_nccl():
    different = {name: (v, SERVERS.get(name)) for name, v in cuda(TRAINER).items() if SERVERS.get(name) != v}
    assert not different
    assert {"torch", "triton", "nvidia-nccl-cu13"} <= set(cuda(TRAINER))


def test_only_cuda_and_the_kernels_of_delta_nets_differ_from_the_pins_that_ci_runs():
    different = {name for name, version in TRAINER.items() if CPU.get(name) != version}
    assert different - set(cuda(TRAINER)) == {"flash-linear-attention", "fla-core", "einops"}
    assert set(CPU) <= set(TRAINER)


def test_the_image_takes_both_environments_from_the_pins():
    image = (ROOT / "docker" / "Dockerfile.gpu").read_text()
    assert "-c constraints_gpu.txt" in image and "scripts/install_sglang gpu" in image
    assert not re.search(r"torch==", image)


@pytest.mark.network
def test_the_pins_of_trainer_and_servers_resolve_and_are_complete():
    """On the Python of the image; they were locked for the oldest. Both at once: pages are slow."""
    wanted = (LOCK["trainer_requirements"](), TRAINER), ([LOCK["sglang_requirement"]()], SERVERS)
    with ThreadPoolExecutor() as both:
        trainer, servers = both.map(lambda each: LOCK["resolve"](*each, python="3.12"), wanted)
    assert trainer == TRAINER
    assert servers == SERVERS


@pytest.mark.network
def test_the_torch_of_the_cpu_pins_would_not_do_for_the_servers():
    """The check can fail: these were the trainer's pins on GPU machines before, with another NCCL."""
    assert Version(CPU["torch"]) != Version(SERVERS["torch"])
    with pytest.raises(ValueError, match="torch"):
        LOCK["resolve"]([LOCK["sglang_requirement"]()], {"torch": CPU["torch"]}, python="3.11")
