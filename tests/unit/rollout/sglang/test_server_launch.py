"""What can be known to be wrong before a server runs, and the command line it gets."""

import json
import random
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rlpipe.actors.engines import check_engine
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import ClusterConfig, ClusterMode, Config
from rlpipe.config.sglang import SglangConfig, WeightTransfer
from rlpipe.config.spec import SpecConfig
from rlpipe.convert.mtp_layer import add_layer
from rlpipe.drafts.kinds import DRAFTERS
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import check_weights, is_mtp_weight, read_config, read_weights
from rlpipe.preflight.settings import check_sglang
from rlpipe.rollout.sglang import environment, server
from rlpipe.rollout.sglang.arguments import (
    check_server_info,
    check_supported,
    command,
    server_environment,
)
from rlpipe.rollout.sglang.environment import CPU_SUPPORT_VERSION, SGLANG_VERSION, find_environment
from rlpipe.rollout.sglang.server import pick_port
from rlpipe.rollout.sglang.target import served_target
from rlpipe.weights.shared_memory import SERVED
from tests.helpers.cli import ROOT
from tests.helpers.eagle3_drafts import write_random_draft
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit


def interpreter(path, sglang=SGLANG_VERSION, support=CPU_SUPPORT_VERSION, torch="2.14.1", nccl="2.30.7"):
    """An executable that answers like SGLang's Python when asked for versions."""
    versions = {"sglang": sglang, "rlpipe-sglang-cpu": support, "torch": torch, "nvidia-nccl-cu13": nccl}
    path.write_text(f"#!/bin/sh\necho '{json.dumps(versions)}'\n")
    path.chmod(0o755)
    return SglangConfig(python=str(path))


def test_a_checked_interpreter_is_used_as_given(tmp_path):
    found = find_environment(interpreter(tmp_path / "python"), on_gpu=False)
    assert found.python == tmp_path / "python" and not found.on_gpu


def test_an_interpreter_that_is_not_there_names_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.* is not a Python interpreter.*install_sglang"):
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
    with pytest.raises(ValueError, match=rf"has sglang 0\.5\.19, .* {SGLANG_VERSION}"):
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


def test_two_versions_of_nccl_refuse_a_broadcast_between_them_by_name(tmp_path, monkeypatch):
    """NCCL fails in such a group, at the first update: "Mismatched NCCL version detected"."""
    monkeypatch.setattr(environment, "local_nccl", lambda: "2.29.7")
    config = replace(interpreter(tmp_path / "python"), weight_transfer=WeightTransfer.COLLECTIVE)
    with pytest.raises(ValueError, match=r"=collective: the trainer has NCCL 2\.29\.7, .* 2\.30\.7.*shared"):
        find_environment(config, on_gpu=True)

    # gloo carries the weights of servers without GPUs, and other transports have no group.
    assert find_environment(config, on_gpu=False)
    assert find_environment(replace(config, weight_transfer=WeightTransfer.SHARED), on_gpu=True)

    monkeypatch.setattr(environment, "local_nccl", lambda: "2.30.7")
    assert find_environment(config, on_gpu=True)
    assert environment.served_nccl(config) == "2.30.7"


def test_auto_is_refused_at_the_launch_where_it_would_become_that_broadcast(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "local_nccl", lambda: "2.29.7")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    sglang = interpreter(tmp_path / "python")
    settings = RolloutConfig(engine="sglang", device="cuda", dtype="bfloat16", sglang=sglang)
    config = Config(rollout=settings, cluster=ClusterConfig(mode=ClusterMode.RAY))
    config.model.path = str(ROOT / "models" / "tiny")
    with pytest.raises(ValueError, match="=collective: the trainer has NCCL"):
        check_engine(config)


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
    monkeypatch.setattr(server, "_OUTGOING_PORTS", told)
    random.seed(0)
    ports = {pick_port("127.0.0.1", 0) for _ in range(3)}
    random.seed(0)
    ports |= {pick_port("127.0.0.1", 0) for _ in range(3)}  # workers with one seed choose alike otherwise
    assert len(ports) > 3
    assert first == "1024\t65535\n" or all(20000 <= port < 32768 for port in ports)


def supported(path, on_gpu=False, plugin=True, **spec):
    sglang = SglangConfig(plugin=plugin)
    check_supported(RolloutConfig(sglang=sglang), SpecConfig(**spec), path, on_gpu=on_gpu)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mimo"}, r"type 'mimo'.*model_type to \"qwen2\""),
        ({"model_type": "mimo", "attention_bias": False, "auto_map": {"AutoConfig": "x.y"}}, "no biases"),
        ({"attention_bias": False}, "no biases"),
    ],
)
def test_a_mimo_that_the_server_cannot_load_is_refused_before_its_start(tmp_path, changes, message):
    model = write_random_checkpoint(tmp_path / "model", "mimo")
    file = model / "config.json"
    shipped = file.read_text()
    supported(model)
    file.write_text(json.dumps(json.loads(shipped) | changes))
    with pytest.raises(ValueError, match=message):
        supported(model)


def test_a_released_mimo_brings_the_code_for_its_type(tmp_path):
    model = write_random_checkpoint(tmp_path / "model", "mimo")
    file = model / "config.json"
    released = {"model_type": "mimo", "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | released))
    supported(model)


def test_modes_sglang_does_not_have_are_refused(tmp_path):
    model = write_random_checkpoint(tmp_path / "model")
    for mode in ("none", "rejection", "target_only", "greedy"):
        supported(model, mode=mode)
        check_sglang(Config(spec=SpecConfig(mode=mode)))
    with pytest.raises(ValueError, match=r"spec.mode=tree.*rejection"):
        check_sglang(Config(spec=SpecConfig(mode="tree")))
    check_sglang(Config(spec=SpecConfig(adaptive=True)))
    for sglang in (SglangConfig(tp=2), SglangConfig(plugin=False)):
        with pytest.raises(ValueError, match=r"spec.adaptive=true.*tp=1 and plugin=true"):
            check_sglang(Config(spec=SpecConfig(adaptive=True), rollout=RolloutConfig(sglang=sglang)))
    with pytest.raises(ValueError, match=r"spec.drafter=suffix.*mtp or eagle3"):
        check_sglang(Config(spec=SpecConfig(drafter="suffix")))
    with pytest.raises(ValueError, match=r"spec.mode=block.*no GPU.*rejection"):
        supported(model, mode="block")
    supported(model, mode="block", on_gpu=True)


def test_a_model_without_an_mtp_layer_is_refused(tmp_path):
    model = write_random_checkpoint(tmp_path / "model", "qwen2")
    with pytest.raises(ValueError, match="has none"):
        supported(model)
    supported(model, mode="none")


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_draft_that_waits_for_cuda_needs_the_plugin_on_a_cpu_and_shared_experts_are_not_fused(
    tmp_path, family
):
    model = write_random_checkpoint(tmp_path / "model", family)
    with pytest.raises(ValueError, match=rf"'{family}'.* on a CPU .*rlpipe's plugin.* Set rollout"):
        supported(model, plugin=False)
    supported(model)
    supported(model, plugin=False, on_gpu=True)
    if family == "glm4_moe":
        supported(model, plugin=False, mode="none")
    else:
        with pytest.raises(ValueError, match="whose latent attention"):
            supported(model, plugin=False, mode="none")
    words = command(RolloutConfig(), SpecConfig(), model, port=1, on_gpu=True, version=0)
    assert "--disable-shared-experts-fusion" in words


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_delta_nets_are_refused_on_a_cpu_and_their_shared_expert_is_not_fused(tmp_path, family):
    model = write_random_checkpoint(tmp_path / "model", family)
    for mode in ("none", "rejection"):
        with pytest.raises(ValueError, match=rf"'{family}', whose gated delta nets .* on a GPU only"):
            supported(model, mode=mode)
        supported(model, mode=mode, on_gpu=True)
    words = command(RolloutConfig(), SpecConfig(), model, port=1, on_gpu=True, version=0)
    assert "--disable-shared-experts-fusion" in words


def test_text_without_its_vision_tower_is_refused_with_the_checkpoint_that_works(tmp_path):
    model = write_random_checkpoint(tmp_path / "model", "qwen3_5_text")
    with pytest.raises(ValueError, match=r"'qwen3_5_text', for which SGLang has no class.* 'qwen3_5'"):
        supported(model, mode="none", on_gpu=True)
    supported(write_random_checkpoint(tmp_path / "whole", "qwen3_5"), mode="none", on_gpu=True)


@pytest.fixture
def eagle3(tmp_path):
    """Check a new EAGLE-3 draft for a target of four layers; settings are of the draft, then of others."""
    model = write_random_checkpoint(tmp_path / "model", layers=4)

    def checked(mode="rejection", sglang=None, **draft):
        path = write_random_draft(tmp_path / "draft", model, **{"layers": [0, 1, 2]} | draft)
        spec = SpecConfig(mode=mode, drafter="eagle3", draft_path=str(path))
        check_supported(RolloutConfig(sglang=SglangConfig(**sglang or {})), spec, model, on_gpu=False)
        return command(RolloutConfig(), spec, model, port=1, on_gpu=False, version=4), path

    return checked


def test_an_eagle3_draft_is_served_from_its_own_directory_by_its_own_algorithm(eagle3):
    words, path = eagle3()
    line = " ".join(words)
    assert f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {path} " in line
    assert "--speculative-num-steps 3" in line and "--speculative-use-rejection-sampling" in line


def test_eagle3_drafts_that_sglang_would_compute_otherwise_are_refused(eagle3):
    for mode in ("rejection", "target_only"):  # by the plugin, and by SGLang
        eagle3(mode, ids=[3, 4, 9])
    eagle3("target_only", ids=[3, 4, 9], sglang={"plugin": False})
    with pytest.raises(ValueError, match=r"spec.mode=rejection and .*plugin=false: .* 3 of 64 "):
        eagle3(ids=[3, 4, 9], sglang={"plugin": False})
    with pytest.raises(ValueError, match=r"spec.mode=block: .*no GPU"):
        eagle3("block", ids=[3, 4, 9])
    for layers in ([1], [0, 3], [2, 1, 0]):
        with pytest.raises(ValueError, match=r"reads layers .* two or more in ascending order up to 2"):
            eagle3(layers=layers)
    with pytest.raises(ValueError, match=r"weight_transfer=disk .*auto, shared or collective"):
        eagle3(sglang={"weight_transfer": "disk"})


def test_a_mimo_is_served_to_an_eagle3_draft_as_its_qwen2_backbone(tmp_path):
    model = write_random_checkpoint(tmp_path / "model")
    spec = SpecConfig(drafter="eagle3", draft_path="somewhere")
    with served_target(model, spec) as folder:
        config = read_config(folder)
        assert config["architectures"] == ["Qwen2ForCausalLM"] and "num_nextn_predict_layers" not in config
        assert (folder / "model.safetensors").samefile(model / "model.safetensors")
    assert not folder.exists() and read_config(model)["architectures"] == ["MiMoForCausalLM"]
    with served_target(model, SpecConfig()) as folder:
        assert folder == model
    qwen2 = write_random_checkpoint(tmp_path / "qwen2", "qwen2")
    with served_target(qwen2, spec) as folder:
        assert folder == qwen2


def test_an_mtp_layer_without_biases_is_served_as_mimo_with_zeros(tmp_path):
    model = write_random_checkpoint(tmp_path / "model", "llama")
    layer = load_file(write_random_checkpoint(tmp_path / "mimo") / "model.safetensors")
    add_layer(model, {k: v for k, v in layer.items() if is_mtp_weight(k) and not k.endswith("bias")})
    check_supported(RolloutConfig(), SpecConfig(), model, on_gpu=False)
    with served_target(model, SpecConfig()) as folder:
        config, weights = read_config(folder), read_weights(folder)
        assert config["model_type"] == "qwen2" and config["architectures"] == ["MiMoForCausalLM"]
        check_weights(weights, read_architecture(config).weight_shapes(mtp=True), frozenset())
        biases = [weight for name, weight in weights.items() if name.endswith("bias")]
        assert biases and not any(bias.any() for bias in biases)
    assert not any(name.endswith("bias") for name in read_weights(model))


def test_a_grafted_layer_that_sglang_cannot_compute_is_refused(tmp_path):
    model = write_random_checkpoint(tmp_path / "model", "qwen3")
    stated = read_config(model) | {"num_nextn_predict_layers": 1}
    (model / "config.json").write_text(json.dumps(stated))
    with pytest.raises(ValueError, match="norms of queries and keys"):
        check_supported(RolloutConfig(), SpecConfig(), model, on_gpu=False)
    check_supported(RolloutConfig(), SpecConfig(mode="none"), model, on_gpu=False)


def words(mode="rejection", on_gpu=False, **rollout):
    config = RolloutConfig(**rollout)
    return command(config, SpecConfig(mode=mode, gamma=3), "m", port=1, on_gpu=on_gpu, version=4)


def test_turns_join_several_at_a_time_where_sglang_is_told_to():
    assert "--enable-metrics" not in words() and "--prefill-decode-interval" not in words()
    joining = words(sglang=SglangConfig(extra_arguments=["--prefill-decode-interval", "3"]))
    assert joining[joining.index("--prefill-decode-interval") + 1] == "3"


@pytest.mark.parametrize("given", [["--tokenizer-worker-num", "4"], ["--tokenizer-worker-num=4"]])
def test_several_tokenizer_processes_are_refused(given):
    config = RolloutConfig(sglang=SglangConfig(extra_arguments=given))
    with pytest.raises(ValueError, match=r"--tokenizer-worker-num.*rollout\.workers"):
        check_supported(config, SpecConfig(mode="none"), ROOT / "models" / "tiny", on_gpu=False)


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
    plugin = ROOT / "sglang_env" / "plugin"
    assert variables["PYTHONPATH"] == f"{SERVED}:{plugin}" and variables["KEPT"] == "yes"
    off = server_environment(RolloutConfig(sglang=SglangConfig(plugin=False)), on_gpu=False)
    assert off["PYTHONPATH"] == str(SERVED)
    assert variables["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in server_environment(RolloutConfig(), on_gpu=True)
    assert "RLPIPE_DRAFT_VOCAB" not in variables
    table = server_environment(RolloutConfig(), on_gpu=False, draft_vocab=Path("table.json"))
    assert table["RLPIPE_DRAFT_VOCAB"] == "table.json"


def test_a_draft_over_a_part_of_the_vocabulary_needs_the_plugin_on_one_device():
    spec = SpecConfig(draft_vocab="checkpoint")
    for sglang in (SglangConfig(plugin=False), SglangConfig(tp=2)):
        with pytest.raises(ValueError, match=r"spec.draft_vocab='checkpoint'.*tp=1 and plugin=true"):
            DRAFTERS[spec.drafter].check_sglang(spec, {}, sglang)
    with pytest.raises(RuntimeError, match="drafts among all tokens"):
        check_server_info(GOOD, RolloutConfig(), spec)
    state = {"rlpipe_plugin": GOOD["internal_states"][0]["rlpipe_plugin"] | {"draft_vocab": [4]}}
    check_server_info(GOOD | {"internal_states": [state]}, RolloutConfig(), spec)


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
    "speculative_adaptive": False,
    "internal_states": [{"rlpipe_plugin": {"scheduler": "ok", "http": "ok"}}],
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
    [{"port": 70000}, {"tp": 0}, {"start_timeout": 0}, {"memory_fraction": 1.5}, {"max_restarts": -1}],
)
def test_impossible_settings_are_refused(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=rf"rollout.sglang.{name}="):
        SglangConfig(**bad)
