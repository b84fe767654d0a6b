"""The shipped checkpoint is what transformers and the MTP layer load."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.tiny_model.layer import MtpLayer
from rlpipe.config.paths import shipped
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import MTP_PREFIX, check_weights, is_mtp_weight, read_config, read_weights

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", ["tiny", "tiny_actor"])
def test_the_shipped_checkpoints_hold_a_backbone_and_one_mtp_layer_and_nothing_else(name):
    path = shipped(f"models/{name}")
    config, weights = read_config(path), read_weights(path)
    assert config["architectures"] == ["MiMoForCausalLM"] and config["num_nextn_predict_layers"] == 1
    assert config["vocab_size"] % 16 == 0 and not config["tie_word_embeddings"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert set(model.state_dict()) == {name for name in weights if not is_mtp_weight(name)}
    layer = MtpLayer(model.config)
    layer.load_state_dict({k.removeprefix(MTP_PREFIX): v for k, v in weights.items() if is_mtp_weight(k)})
    assert tokenizer.eos_token_id == config["eos_token_id"] and len(tokenizer) <= config["vocab_size"]


def test_the_shipped_mixture_is_read_whole_and_speaks_the_tokens_of_the_dense_model():
    tiny, path = shipped("models/tiny"), shipped("models/tiny_moe")
    arch, weights = read_architecture(read_config(path)), read_weights(path)
    check_weights(weights, arch.weight_shapes(mtp=True), frozenset())
    assert (arch.experts.count, arch.experts.per_token, arch.mtp_layers) == (8, 2, 1)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tiny / name).read_bytes() == (path / name).read_bytes()
    assert (path / "model.safetensors").stat().st_size < 9_000_000  # wheels carry it


def test_the_shipped_actor_is_smaller_and_speaks_the_same_tokens():
    tiny, actor = shipped("models/tiny"), shipped("models/tiny_actor")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tiny / name).read_bytes() == (actor / name).read_bytes()
    sizes = [sum(weight.numel() for weight in read_weights(path).values()) for path in (tiny, actor)]
    assert sizes[1] < sizes[0] / 2 and (actor / "model.safetensors").stat().st_size < 2_000_000
