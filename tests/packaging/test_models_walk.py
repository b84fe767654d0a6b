"""The estimates that docs/models.md quotes are what the tool says of those models."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import rlpipe.run  # noqa: F401  (registers the schema)
from rlpipe.memory import estimate
from tests.helpers.cli import ROOT

pytestmark = pytest.mark.packaging
QWEN = {"vocab_size": 151936, "head_dim": 128, "num_attention_heads": 32, "max_position_embeddings": 40960}
MODELS = {  # what the estimate reads of the released config.json
    "Qwen3-8B": QWEN
    | {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    | {"num_key_value_heads": 8},
    "MiMo-7B-RL": {"model_type": "mimo", "vocab_size": 151680, "hidden_size": 4096, "head_dim": 128}
    | {"intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "num_nextn_predict_layers": 1, "attention_bias": True},
    "Qwen3-30B-A3B": QWEN
    | {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48}
    | {"num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "GLM-4.5-Air": {"model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "head_dim": 128}
    | {"intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 46}
    | {"num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    | {"n_routed_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "n_shared_experts": 1}
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0}
    | {"attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.5}
    | {"num_nextn_predict_layers": 1},
}
TEXT = (ROOT / "docs" / "models.md").read_text().partition("## From a model to the first step")[2]
WALKS = re.findall(r"^scripts/doctor ([^\n]+)$.*?^> ([^\n]+)$", TEXT, re.M | re.S)


@pytest.mark.parametrize(("command", "quoted"), WALKS, ids=[str(i) for i in range(len(WALKS))])
def test_the_estimate_is_the_one_that_is_quoted(tmp_path, monkeypatch, command, quoted):
    assert len(WALKS) == 5
    monkeypatch.chdir(tmp_path)
    for name, config in MODELS.items():
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
    with initialize_config_dir(config_dir=str(ROOT / "configs"), version_base="1.3"):
        config = OmegaConf.to_object(compose(config_name="config", overrides=shlex.split(command)))
    assert "; ".join(map(str, estimate(config, config.cluster.gpu_gb * 2**30))) == quoted
