"""A server's share of a GPU that a trainer uses already; nvidia-smi is played."""

import pytest

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.sglang import SglangConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.rollout.sglang.arguments import command
from rlpipe.rollout.sglang.gpu_share import server_fraction
from tests.helpers.cli import ROOT

pytestmark = pytest.mark.unit


@pytest.fixture
def card(tmp_path, monkeypatch):
    """Plays a GPU with so many MiB free of 81,920; the asked-for GPU stands in `asked`."""

    def play(free):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho "{free}, 81920"\n')
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return tmp_path / "asked"

    return play


def test_the_fraction_is_of_what_the_trainer_left(card):
    """0.4 of 80 GiB are 32 GiB; SGLang keeps free (1 - fraction) of the 50 GiB it finds."""
    card(51_200)
    fraction = server_fraction(0.4, "cuda")
    assert fraction == 0.64
    assert abs(51_200 - 51_200 * (1 - fraction) - 0.4 * 81_920) < 1


def test_an_empty_gpu_gives_the_share_itself(card):
    card(81_920)
    assert server_fraction(0.4, "cuda") == 0.4


def test_the_command_of_a_server_has_the_fraction(card):
    card(51_200)
    rollout = RolloutConfig(device="cuda", dtype="bfloat16", sglang=SglangConfig(memory_fraction=0.4))
    path = ROOT / "models" / "tiny"
    arguments = command(rollout, SpecConfig(mode="none"), path, port=1, on_gpu=True, version=0)
    assert arguments[arguments.index("--mem-fraction-static") + 1] == "0.64"


def test_the_gpu_that_ray_gave_is_asked_for(card, monkeypatch):
    asked = card(81_920)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7f")
    server_fraction(0.4, "cuda")
    assert "--id=5" in asked.read_text()
    server_fraction(0.4, "cuda:1")
    assert "--id=GPU-7f" in asked.read_text()


def test_a_share_that_is_not_free_is_refused_with_both_sizes(card):
    card(30_720)
    with pytest.raises(
        ValueError, match=r"memory_fraction=0\.4 of a GPU of 80 GiB, and 30 GiB are free: lower"
    ):
        server_fraction(0.4, "cuda")


def test_without_nvidia_smi_the_share_is_used(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert server_fraction(0.4, "cuda") == 0.4
