"""The estimates that docs/first_step.md quotes are those of the tool for these models."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import rlpipe.cli.run  # noqa: F401  (registers the schema)
from rlpipe.preflight.memory_check import excess
from rlpipe.preflight.memory_estimate import GIB, estimate
from tests.helpers.cli import ROOT

pytestmark = pytest.mark.packaging
# What the estimate reads of the released config.json, each value compared with the source named beside it.
QWEN = {"vocab_size": 151936, "head_dim": 128, "num_attention_heads": 32, "max_position_embeddings": 40960}
DELTA = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4}
DELTA |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "full_attention_interval": 4}
DELTA |= {"num_attention_heads": 16, "head_dim": 256, "max_position_embeddings": 262144}
QWEN35 = DELTA | {"vocab_size": 248320, "attn_output_gate": True, "mtp_num_hidden_layers": 1}
MODELS = {
    "Qwen3-8B": QWEN  # slime, scripts/models/qwen3-8B.sh
    | {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    | {"num_key_value_heads": 8},
    "Qwen3-32B": QWEN  # slime, scripts/models/qwen3-32B.sh
    | {"model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64}
    | {"num_attention_heads": 64, "num_key_value_heads": 8},
    # slime, scripts/models/mimo-7B-rl.sh
    "MiMo-7B-RL": {"model_type": "mimo", "vocab_size": 151680, "hidden_size": 4096, "head_dim": 128}
    | {"intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "num_nextn_predict_layers": 1, "attention_bias": True}
    | {"max_position_embeddings": 32768, "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}},
    "Qwen3-30B-A3B": QWEN  # a test of an estimator that quotes the file of huggingface.co
    | {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
    | {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    # ms-swift's print of transformers' Glm4MoeConfig, read from the released file
    "GLM-4.5-Air": {"model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "head_dim": 128}
    | {"intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 46}
    | {"num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    | {"n_routed_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "n_shared_experts": 1}
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
    | {"attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.5}
    | {"num_nextn_predict_layers": 1},
    "Qwen3.5-9B": {  # a fixture "recovered from the checkpoint itself", of 9.65e9 parameters
        "model_type": "qwen3_5",
        "text_config": QWEN35
        | {"model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288}
        | {"num_hidden_layers": 32, "num_key_value_heads": 4},
    },
    "Qwen3.5-35B-A3B": {  # transformers, defaults of Qwen3_5MoeTextConfig; slime, qwen3.5-35B-A3B.sh
        "model_type": "qwen3_5_moe",
        "text_config": QWEN35
        | {"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40}
        | {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8}
        | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512},
    },
    # Megatron-Bridge, test_qwen3_next_bridge.py; slime, qwen3-next-80B-A3B.sh
    "Qwen3-Next-80B-A3B-Instruct": DELTA
    | {"model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120}
    | {"num_hidden_layers": 48, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10}
    | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True}
    | {"decoder_sparse_step": 1, "mlp_only_layers": [], "partial_rotary_factor": 0.25},
    # Megatron-Bridge, test_deepseek_bridges.py
    "DeepSeek-V3-bf16": {"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168}
    | {"intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61}
    | {"num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 163840}
    | {"n_routed_experts": 256, "num_experts_per_tok": 8, "norm_topk_prob": True, "n_shared_experts": 1}
    | {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
    | {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_bias": False}
    | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    | {"v_head_dim": 128, "num_nextn_predict_layers": 1, "rope_theta": 10000}
    | {
        "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
        | {"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
    },
}
TEXT = (ROOT / "docs" / "first_step.md").read_text()
DEEPSEEK = (
    "+recipe=swe_rl model.path=models/DeepSeek-V3-bf16 draft.train=online cluster=many_nodes "
    "cluster.gpu_gb=268 rollout=sglang rollout.sglang.tp=8 trainer.tp=8 trainer.sp=true trainer.dp=8 "
    "trainer.ep=8 "
)
SAID = {  # of a trainer rank, in the text
    "+recipe=swe_rl model.path=models/Qwen3-32B spec.mode=none cluster=many_nodes rollout=sglang": 83.3,
    f"{DEEPSEEK} trainer.pp=2": 118.1,
    f"{DEEPSEEK} trainer.dp=16 trainer.ep=16": 119.5,
}
WALKS = re.findall(r"^scripts/doctor ([^\n]+)$.*?^> ([^\n]+)$", TEXT, re.M | re.S)


@pytest.fixture
def composed(tmp_path, monkeypatch):
    """The configuration of a command line, in a folder that has the models' config.json."""
    monkeypatch.chdir(tmp_path)
    for name, config in MODELS.items():
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))

    def compose_one(command: str):
        with initialize_config_dir(config_dir=str(ROOT / "configs"), version_base="1.3"):
            return OmegaConf.to_object(compose(config_name="config", overrides=shlex.split(command)))

    return compose_one


@pytest.mark.parametrize(("command", "quoted"), WALKS, ids=[str(i) for i in range(len(WALKS))])
def test_the_estimate_is_the_one_that_is_quoted_and_the_run_fits(composed, command, quoted):
    assert len(WALKS) == 10
    config = composed(command)
    card = int(config.cluster.gpu_gb * GIB)
    assert "; ".join(map(str, estimate(config, card))) == quoted
    assert not excess(config, card, 0)


@pytest.mark.parametrize(("command", "said"), SAID.items(), ids=["pp", "deepseek pp", "deepseek dp"])
def test_what_the_text_says_of_other_layouts_is_the_estimate(composed, command, said):
    config = composed(command)
    (trainer, _) = estimate(config, int(config.cluster.gpu_gb * GIB))
    assert f"{trainer.total / GIB:.1f}" == f"{said:.1f}" and f"{said:.1f} GiB" in TEXT
