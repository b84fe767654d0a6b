"""Files of Qwen3-Next and Qwen3.5: what is read of them, and that an export has the same tensors."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import has_mtp, read_config, read_weights, weight_shapes, write_checkpoint
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_has_the_tensors_of_the_files_it_comes_from_bit_for_bit(tmp_path, family):
    path = write_random_checkpoint(tmp_path / "model", family, layers=3)
    write_checkpoint(tmp_path / "export", read_weights(path), like=path)
    before, after = (load_file(p / "model.safetensors") for p in (path, tmp_path / "export"))
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    assert (tmp_path / "export/config.json").read_text() == (path / "config.json").read_text()


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_that_the_architecture_expects(tmp_path, family):
    path = write_random_checkpoint(tmp_path / "model", family, layers=3, head_dim=12)
    arch = read_architecture(read_config(path))
    assert weight_shapes(path) == arch.weight_shapes(mtp=True)
    assert arch.delta.linear == (True, False, True)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_files_say_whether_there_is_an_mtp_layer(tmp_path, family):
    """Qwen3-Next's config.json never does, and a checkpoint saved by transformers has lost it."""
    path = write_random_checkpoint(tmp_path / "model", family)
    assert has_mtp(read_config(path))
    weights = load_file(path / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if not name.startswith("mtp.")}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    assert not has_mtp(read_config(path)) and read_architecture(read_config(path)).mtp_layers == 0


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"layer_types": ["linear_attention", "sliding_attention"]}, r"layer_types=\['sliding_attention'\]"),
        ({"layer_types": ["linear_attention"]}, "1 layer_types with num_hidden_layers=2"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3 with linear_num_key_heads=2"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim=0"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"attn_output_gate": False}, "attn_output_gate=false"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        ({"num_nextn_predict_layers": 2}, "2 MTP layers"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 of num_experts=8"),
        ({"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size=None"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(tmp_path, change, what):
    config = read_config(write_random_checkpoint(tmp_path / "model", "qwen3_next"))
    with pytest.raises(ValueError, match=what):
        read_architecture(config | change)
