"""The shipped checkpoint is what transformers and the MTP layer load."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpipe.config.paths import shipped
from rlpipe.hf_layout import MTP_PREFIX, is_mtp_weight, read_config, read_weights
from rlpipe.mtp.layer import MtpLayer

pytestmark = pytest.mark.unit


def test_the_shipped_checkpoint_holds_a_backbone_and_one_mtp_layer_and_nothing_else():
    path = shipped("models/tiny")
    config, weights = read_config(path), read_weights(path)
    assert config["architectures"] == ["MiMoForCausalLM"] and config["num_nextn_predict_layers"] == 1
    assert config["vocab_size"] % 16 == 0 and not config["tie_word_embeddings"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert set(model.state_dict()) == {name for name in weights if not is_mtp_weight(name)}
    layer = MtpLayer(model.config)
    layer.load_state_dict({k.removeprefix(MTP_PREFIX): v for k, v in weights.items() if is_mtp_weight(k)})
    assert tokenizer.eos_token_id == config["eos_token_id"] and len(tokenizer) <= config["vocab_size"]
