"""Scaled rotary embeddings are those of transformers, in every spelling of a config.json."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlpipe.models.rope import SCALINGS, Rope, read_rope
from tests.helpers.tiny_checkpoint import SCALED

pytestmark = pytest.mark.unit

RELEASED = {
    "Llama-3.1-8B": {
        "rope_theta": 5e5,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "Qwen2.5-7B at 128k": {
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "mscale": {
        "max_position_embeddings": 163840,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 4096,
        },
    },
    "attention factor": {
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4,
            "attention_factor": 1.5,
            "truncate": False,
        },
    },
    **{kind: {"max_position_embeddings": 64, "rope_parameters": s} for kind, s in SCALED.items()},
}


@pytest.mark.parametrize("name", RELEASED)
@pytest.mark.parametrize("dim", [16, 128])
def test_frequencies_and_magnitude_are_those_of_transformers(name, dim):
    config = RELEASED[name]
    theirs = LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, **config)
    kind = theirs.rope_parameters["rope_type"]
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    ours = read_rope(config)
    assert ours.scaling == kind
    torch.testing.assert_close(torch.tensor(ours.frequencies(dim)), frequencies, rtol=2e-6, atol=0)
    assert ours.magnitude == pytest.approx(magnitude)
    assert read_rope({"max_position_embeddings": 64, "rope_parameters": ours.parameters}) == ours


def test_every_scaling_is_compared():
    assert {read_rope(config).scaling for config in RELEASED.values()} == set(SCALINGS)


def test_the_longest_context_is_that_after_scaling():
    longest = {name: read_rope(c).reach(c["max_position_embeddings"]) for name, c in RELEASED.items()}
    assert longest["Llama-3.1-8B"] == longest["Qwen2.5-7B at 128k"] == 131072
    assert longest["mscale"] == 163840 and Rope(theta=1e4).reach(77) == 77
