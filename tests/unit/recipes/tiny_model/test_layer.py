"""The reference MTP layer: names of the layout, what each depth may read, rotary positions."""

import pytest
import torch
from transformers import Qwen2Config

from recipes.tiny_model.layer import MtpLayer, unroll

pytestmark = pytest.mark.unit


@pytest.fixture
def parts():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2
    )
    return MtpLayer(config), torch.nn.Embedding(50, 32)


def test_state_dict_has_the_names_of_the_layout(parts):
    names = set(parts[0].state_dict())
    assert {
        "token_layernorm.weight",
        "hidden_layernorm.weight",
        "input_proj.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "final_layernorm.weight",
        "self_attn.q_proj.bias",
        "self_attn.o_proj.weight",
        "mlp.down_proj.weight",
    } <= names
    assert not any("rotary" in name for name in names)


def test_depth_k_at_anchor_t_reads_token_t_plus_k_and_none_later(parts):
    layer, embed = parts
    hidden, tokens = torch.randn(1, 9, 32), torch.randint(0, 50, (1, 9))
    before = unroll(layer, embed, hidden, tokens, 3)
    for place in range(9):
        changed = tokens.clone()
        changed[0, place] = (changed[0, place] + 7) % 50
        after = unroll(layer, embed, hidden, changed, 3)
        for depth in (1, 2, 3):
            moved = (before[depth - 1] - after[depth - 1]).abs().amax(-1)[0] > 1e-6
            assert not moved[: max(0, place - depth)].any()
            if place >= depth:
                assert moved[place - depth]


def test_hidden_state_of_the_anchor_is_read_and_later_ones_are_not(parts):
    layer, embed = parts
    hidden, tokens = torch.randn(1, 9, 32), torch.randint(0, 50, (1, 9))
    before = unroll(layer, embed, hidden, tokens, 2)
    hidden[0, 4] += 1.0
    for state, changed in zip(before, unroll(layer, embed, hidden, tokens, 2), strict=True):
        moved = (state - changed).abs().amax(-1)[0] > 1e-6
        assert not moved[:4].any() and moved[4]


def test_a_depth_equals_single_steps_at_rope_position_t_plus_k_minus_1(parts):
    layer, embed = parts
    hidden, tokens = torch.randn(1, 7, 32), torch.randint(0, 50, (1, 7))
    first, second = unroll(layer, embed, hidden, tokens, 2)
    for anchor in range(5):  # depth 2, one anchor at a time over its own prefix
        positions = torch.arange(1, anchor + 2)[None]
        alone = layer(first[:, : anchor + 1], embed(tokens[:, 2 : anchor + 3]), positions)
        torch.testing.assert_close(alone[:, -1], second[:, anchor])
    shifted = layer(first[:, :5], embed(tokens[:, 2:7]), torch.arange(1, 6)[None] * 2)
    assert (shifted - second).abs().max() > 1e-4  # a wrong position is seen


def test_a_sequence_without_an_anchor_is_refused(parts):
    layer, embed = parts
    with pytest.raises(ValueError, match="more than gamma=3 tokens, got a sequence of 3"):
        unroll(layer, embed, torch.randn(1, 3, 32), torch.zeros(1, 3, dtype=torch.long), 3)
