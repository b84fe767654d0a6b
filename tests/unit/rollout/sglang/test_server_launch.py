"""What can be known to be wrong before a server runs, and the command line it gets."""

import json
import random
import socket

import pytest

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.sglang import SglangConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.rollout.sglang import server
from rlpipe.rollout.sglang.arguments import (
    check_server_info,
    check_supported,
    command,
    server_environment,
)
from rlpipe.rollout.sglang.environment import CPU_SUPPORT_VERSION, SGLANG_VERSION, find_environment
from rlpipe.rollout.sglang.server import pick_port
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit


def interpreter(path, sglang=SGLANG_VERSION, support=CPU_SUPPORT_VERSION, torch="2.14.1"):
    """An executable that answers like SGLang's Python when asked for versions."""
    versions = {"sglang": sglang, "rlpipe-sglang-cpu": support, "torch": torch}
    path.write_text(f"#!/bin/sh\necho '{json.dumps(versions)}'\n")
    path.chmod(0o755)
    return SglangConfig(python=str(path))


def test_a_checked_interpreter_is_used_as_given(tmp_path):
    found = find_environment(interpreter(tmp_path / "python"), on_gpu=False)
    assert found.python == tmp_path / "python" and not found.on_gpu


def test_an_interpreter_that_is_not_there_names_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.* is no Python interpreter.*install_sglang"):
        find_environment(SglangConfig(python=str(tmp_path / "nowhere")), on_gpu=False)


def test_the_environment_variable_is_named_when_it_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv("RLPIPE_SGLANG_VENV", str(tmp_path))
    with pytest.raises(ValueError, match="RLPIPE_SGLANG_VENV="):
        find_environment(SglangConfig(), on_gpu=False)


def test_a_program_that_is_no_python_is_refused(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no >&2; exit 3\n")
    broken.chmod(0o755)
    with pytest.raises(ValueError, match=r"does not run Python \(no\)"):
        find_environment(SglangConfig(python=str(broken)), on_gpu=False)


def test_an_interpreter_without_sglang_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no sglang"):
        find_environment(interpreter(tmp_path / "python", sglang=None), on_gpu=False)


def test_another_version_of_sglang_is_refused(tmp_path):
    with pytest.raises(ValueError, match=rf"has sglang 0\.5\.19, but this rlpipe speaks to {SGLANG_VERSION}"):
        find_environment(interpreter(tmp_path / "python", sglang="0.5.19"), on_gpu=False)


@pytest.mark.parametrize("support", [None, "0.5.23.0"])
def test_on_a_cpu_the_support_package_of_this_version_is_needed(tmp_path, support):
    config = interpreter(tmp_path / "python", support=support)
    with pytest.raises(ValueError, match=rf"rlpipe-sglang-cpu {support}.*install_sglang cpu"):
        find_environment(config, on_gpu=False)
    assert find_environment(config, on_gpu=True).on_gpu


def test_on_a_gpu_a_torch_without_cuda_is_refused(tmp_path):
    config = interpreter(tmp_path / "python", torch="2.13.0+cpu")
    with pytest.raises(ValueError, match=r"torch 2\.13\.0\+cpu, a build without CUDA.*rollout.device=cpu"):
        find_environment(config, on_gpu=True)


def test_a_taken_port_is_refused_and_zero_finds_a_free_one():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port={port}: cannot listen there .*port=0"):
            pick_port("127.0.0.1", port)
        assert pick_port("127.0.0.1", 0) not in (0, port)


@pytest.mark.parametrize("first", ["32768\t60999\n", "1024\t65535\n", None])
def test_a_chosen_port_is_none_that_an_outgoing_connection_may_get(first, monkeypatch, tmp_path):
    """Where the system gives away nearly all, any free one is chosen."""
    told = tmp_path / "ip_local_port_range"
    if first is not None:
        told.write_text(first)
    monkeypatch.setattr(server, "_PORTS_GIVEN_AWAY", told)
    random.seed(0)
    ports = {pick_port("127.0.0.1", 0) for _ in range(3)}
    random.seed(0)
    ports |= {pick_port("127.0.0.1", 0) for _ in range(3)}  # workers with one seed choose alike otherwise
    assert len(ports) > 3
    assert first == "1024\t65535\n" or all(20000 <= port < 32768 for port in ports)


def supported(path, on_gpu=False, draft="", **spec):
    check_supported(
        RolloutConfig(sglang=SglangConfig(draft_path=str(draft))), SpecConfig(**spec), path, on_gpu
    )


def test_modes_sglang_does_not_have_are_refused(tmp_path):
    model = write_random_checkpoint(tmp_path / "model")
    for mode in ("none", "rejection", "target_only", "greedy"):
        supported(model, mode=mode)
    with pytest.raises(ValueError, match=r"spec.mode=tree.*rejection"):
        supported(model, mode="tree")
    with pytest.raises(ValueError, match=r"spec.mode=block.*no GPU.*rejection"):
        supported(model, mode="block")
    supported(model, mode="block", on_gpu=True)
    with pytest.raises(ValueError, match=r"spec.adaptive=true.*spec.gamma \(now 3\)"):
        supported(model, adaptive=True)


def test_a_model_without_an_mtp_layer_is_refused(tmp_path):
    model = write_random_checkpoint(tmp_path / "model", "qwen2")
    with pytest.raises(ValueError, match="has none"):
        supported(model)
    supported(model, mode="none")


def test_a_draft_with_another_vocabulary_is_refused(tmp_path):
    model = write_random_checkpoint(tmp_path / "model", vocab=64)
    draft = write_random_checkpoint(tmp_path / "draft", vocab=128)
    with pytest.raises(ValueError, match=r"vocab_size=128 and the target .* has 64.*draft_path"):
        supported(model, draft=draft)


def words(mode="rejection", on_gpu=False, **rollout):
    config = RolloutConfig(**rollout)
    return command(config, SpecConfig(mode=mode, gamma=3), "m", port=1, on_gpu=on_gpu, version=4)


def test_gamma_becomes_steps_and_draft_tokens():
    line = " ".join(words())
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in line
    assert "--speculative-use-rejection-sampling" in line and "--weight-version 4" in line


def test_flags_follow_the_mode():
    assert "--speculative-use-rejection-sampling" not in words("target_only")
    assert "--speculative-use-block-verification" in words("block", on_gpu=True)
    assert not [word for word in words("none") if word.startswith("--speculative")]


def test_the_cpu_has_its_own_attention_and_the_gpu_sglangs_choice():
    assert "torch_native" in words() and "cpu" in words()
    assert "--attention-backend" not in words(on_gpu=True) and "cuda" in words(on_gpu=True)
    assert "--base-gpu-id 1" in " ".join(words(on_gpu=True, device="cuda:1"))


def test_the_servers_environment_leaves_our_interpreter_behind(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/rlpipe")
    monkeypatch.setenv("KEPT", "yes")
    variables = server_environment(RolloutConfig(), on_gpu=False)
    assert "PYTHONPATH" not in variables and variables["KEPT"] == "yes"
    assert variables["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in server_environment(RolloutConfig(), on_gpu=True)


GOOD = {
    "version": SGLANG_VERSION,
    "skip_tokenizer_init": True,
    "max_running_requests": 64,
    "dtype": "float32",
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
    "speculative_use_rejection_sampling": True,
    "speculative_use_block_verification": False,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_use_rejection_sampling", False),
        ("max_running_requests", 48),
        ("speculative_num_steps", 1),
        ("speculative_algorithm", None),
        ("version", "0.5.22"),
    ],
)
def test_a_server_that_runs_otherwise_than_told_is_refused(name, value):
    check_server_info(GOOD, RolloutConfig(), SpecConfig())
    with pytest.raises(RuntimeError, match=f"{name}={value!r} instead of {GOOD[name]!r}"):
        check_server_info(GOOD | {name: value}, RolloutConfig(), SpecConfig())


@pytest.mark.parametrize(
    "bad",
    [{"port": 70000}, {"tp": 0}, {"start_timeout": 0}, {"memory_fraction": 1.5}, {"canary_retries": -1}],
)
def test_impossible_settings_are_refused(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=rf"rollout.sglang.{name}="):
        SglangConfig(**bad)
