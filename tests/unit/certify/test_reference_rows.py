"""The reference pass of certificates, over a random model of transformers."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3NextConfig

from rlpipe.certify.reference import TransformersModel

pytestmark = pytest.mark.unit
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "sliding window": MistralConfig(**SIZES, sliding_window=8),
    "linear attention": Qwen3NextConfig(
        **SIZES,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        head_dim=8,
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_the_logits_of_sequences_with_one_prompt_are_those_of_each_sequence(family, tmp_path):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[family]).save_pretrained(tmp_path)
    model = TransformersModel(tmp_path, "float32")

    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 61, 12)
    ids = np.stack([np.concatenate((prompt, rng.integers(0, 61, 3))) for _ in range(5)])
    each = np.concatenate([model.logits(row[None], 4) for row in ids])
    np.testing.assert_allclose(model.logits(ids, 4), each, atol=1e-5)
