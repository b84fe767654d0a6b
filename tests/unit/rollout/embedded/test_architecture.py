"""What the engine refuses to run, and what it says."""

from __future__ import annotations

import json

import pytest
import torch

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.rollout.embedded import EmbeddedEngine
from rlpipe.rollout.embedded.architecture import check_weights, read_architecture
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type='mamba' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "rope scaling of type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope scaling of type 'linear'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"use_sliding_window": True}, "sliding-window attention"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_models_it_would_compute_wrongly_are_refused(tmp_path, change, message):
    config = read_config(write_random_checkpoint(tmp_path)) | change
    with pytest.raises(ValueError, match=message):
        read_architecture(config)


@pytest.mark.parametrize("family", ["mimo", "qwen2", "qwen3", "llama"])
def test_expected_weights_are_those_of_the_checkpoint(tmp_path, family):
    path = write_random_checkpoint(tmp_path, family, head_dim=16)
    arch = read_architecture(read_config(path))
    shapes = {name: tuple(tensor.shape) for name, tensor in read_weights(path).items()}
    assert arch.weight_shapes(mtp=arch.mtp) == shapes


def test_missing_unknown_and_misshapen_weights_are_named():
    expected = {"a.weight": (2, 3), "b.weight": (4,), "c.weight": (1,)}
    weights = {"a.weight": torch.zeros(3, 2), "x.weight": torch.zeros(1), "c.weight": torch.zeros(1)}
    with pytest.raises(ValueError) as error:
        check_weights(weights, expected, frozenset())
    assert "missing b.weight" in str(error.value)
    assert "unknown x.weight" in str(error.value)
    assert "wrong shape a.weight (3, 2) instead of (2, 3)" in str(error.value)
    check_weights(
        {"a.weight": torch.zeros(2, 3), "c.weight": torch.zeros(1)}, expected, frozenset({"b.weight"})
    )


def test_speculation_without_an_mtp_layer_is_refused(tmp_path):
    path = write_random_checkpoint(tmp_path, "qwen2")
    with pytest.raises(ValueError, match=r"spec\.mode=rejection drafts with an MTP layer.*spec\.mode=none"):
        EmbeddedEngine(RolloutConfig(), SpecConfig(), path)


def test_a_context_beyond_the_models_is_refused(tmp_path):
    path = write_random_checkpoint(tmp_path, max_position=64)
    with pytest.raises(ValueError, match=r"rollout\.max_context=65 exceeds .*max_position_embeddings=64"):
        EmbeddedEngine(RolloutConfig(max_context=65), SpecConfig(), path)


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a Hugging Face checkpoint"):
        EmbeddedEngine(RolloutConfig(), SpecConfig(), tmp_path)


def test_a_checkpoint_whose_weights_contradict_its_config_is_refused(tmp_path):
    path = write_random_checkpoint(tmp_path, layers=2)
    (path / "config.json").write_text(json.dumps(read_config(path) | {"num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"missing model\.layers\.2\."):
        EmbeddedEngine(RolloutConfig(), SpecConfig(), path)


def test_gamma_zero_names_the_mode_without_drafts():
    with pytest.raises(ValueError, match=r"spec\.gamma=0 .* set spec\.mode=none"):
        SpecConfig(gamma=0)


@pytest.mark.parametrize(
    "change", [{"max_running": 0}, {"temperature": -1.0}, {"max_context": 1}, {"threads": 0}, {"workers": 0}]
)
def test_impossible_rollout_settings_are_named(change):
    (name,) = change
    with pytest.raises(ValueError, match=rf"rollout\.{name}="):
        RolloutConfig(**change)
