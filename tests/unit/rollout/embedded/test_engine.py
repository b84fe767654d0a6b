"""What the engine refuses to run, and what it says."""

from __future__ import annotations

import json

import pytest

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import read_config
from rlpipe.rollout.embedded import EmbeddedEngine
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit


def test_speculation_without_an_mtp_layer_is_refused(tmp_path):
    path = write_random_checkpoint(tmp_path, "qwen2")
    with pytest.raises(ValueError, match=r"spec\.mode=rejection drafts with an MTP layer.*spec\.mode=none"):
        EmbeddedEngine(RolloutConfig(), SpecConfig(), path)


def test_a_context_beyond_the_models_is_refused(tmp_path):
    path = write_random_checkpoint(tmp_path, max_position=64)
    with pytest.raises(ValueError, match=r"rollout\.max_context=65 exceeds .*longest context of 64"):
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


def test_a_mode_assigned_as_a_string_is_the_mode(tmp_path):
    path = write_random_checkpoint(tmp_path, "qwen2")  # which has no MTP layer
    spec = SpecConfig()
    spec.mode = "none"  # type: ignore[assignment]
    EmbeddedEngine(RolloutConfig(max_context=64), spec, path).close()

    spec.mode = "nothing"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="nothing"):
        EmbeddedEngine(RolloutConfig(max_context=64), spec, path)
