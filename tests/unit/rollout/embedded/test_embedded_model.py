"""The engine's forward passes against transformers and against the reference MTP module."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.rollout.embedded.attention import attend, attend_products, expand_mask, pieces_of
from rlpipe.rollout.embedded.linear import Linear
from rlpipe.rollout.embedded.model import Model
from tests.helpers.draft_oracle import read_layers
from tests.helpers.engines import transformers_logits
from tests.helpers.tiny_checkpoint import DEEPSEEK_YARN, SCALED, write_random_checkpoint

pytestmark = pytest.mark.unit
TOLERANCE = 1e-4


def _model(path, *, mtp: bool = False, dtype: torch.dtype = torch.float32) -> Model:
    return Model(
        read_architecture(read_config(path)),
        read_weights(path),
        mtp=mtp,
        rows=4,
        slots=48,
        device=torch.device("cpu"),
        dtype=dtype,
    )


def _tokens(batch: int, length: int, vocab: int = 64) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(0))


VARIANTS = {
    "qwen2": {"family": "qwen2"},
    "qwen3 with head_dim != hidden / heads": {"family": "qwen3", "head_dim": 16},
    "experts": {"family": "qwen3_moe"},
    "experts whose weights sum to less than 1": {"family": "qwen3_moe", "normed": False},
    "experts by sigmoids": {"family": "glm4_moe", "head_dim": 12},
    "latent attention": {"family": "deepseek_v3"},
    "latent attention without a latent query": {"family": "deepseek_v3", "query_rank": None, "groups": 1},
    "latent attention in halves": {"family": "deepseek_v3", "interleaved": False},
    "latent attention, yarn": {"family": "deepseek_v3", "rope_parameters": DEEPSEEK_YARN},
    "llama": {"family": "llama"},
    "mistral": {"family": "mistral"},
    "mimo backbone": {"family": "mimo"},
    "tied embeddings": {"family": "qwen2", "tie": True},
    "one kv head": {"family": "llama", "kv_heads": 1},
    "no grouping": {"family": "qwen3", "kv_heads": 4},
    "large enough for the packed product": {"family": "qwen2", "hidden": 128, "head_dim": 32},
    "rope linear": {"family": "mistral", "rope_parameters": SCALED["linear"]},
    "rope llama3": {"family": "llama", "rope_parameters": SCALED["llama3"]},
    "rope yarn": {"family": "qwen3", "head_dim": 16, "rope_parameters": SCALED["yarn"]},
}


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_logits_equal_transformers_over_two_ragged_passes(tmp_path, variant):
    path = write_random_checkpoint(tmp_path, **VARIANTS[variant])
    model, reference = _model(path), transformers_logits(path)
    tokens = _tokens(3, 32)
    lengths = torch.tensor([20, 9, 14])  # first pass; the second one continues each row from there
    first = torch.arange(20).expand(3, 20)
    model.forward(tokens[:, :20].flatten(), [model.span(1, first, 20)])
    positions = lengths.unsqueeze(1) + torch.arange(12)
    hidden = model.forward(tokens.gather(1, positions).flatten(), [model.span(1, positions, 32)])
    ours = model.logits(hidden).view(3, 12, -1)
    for row in range(3):
        expected = reference(tokens[row].tolist())[positions[row]]
        assert (ours[row] - expected).abs().max() < TOLERANCE


@torch.inference_mode()
def test_bfloat16_stays_close_to_float32(tmp_path):
    path = write_random_checkpoint(tmp_path, hidden=64, dtype=torch.bfloat16)
    model, reference = _model(path, dtype=torch.bfloat16), transformers_logits(path)
    tokens = _tokens(1, 16)
    ours = model.logits(model.forward(tokens[0], [model.span(0, torch.arange(16)[None], 16)])).float()
    expected = reference(tokens[0].tolist())
    assert (ours.log_softmax(-1) - expected.log_softmax(-1)).abs().max() < 0.1


@pytest.mark.parametrize("family", ["mimo", "glm4_moe", "deepseek_v3"])
@torch.inference_mode()
def test_draft_depths_equal_the_reference_module_attending_to_the_prefix(tmp_path, family):
    """Depth k sees depth-1 keys of the prefix plus its own draft keys, RoPE position t + k - 1."""
    path = write_random_checkpoint(tmp_path, family)
    model, weights = _model(path, mtp=True), read_weights(path)
    [reference] = read_layers(path)
    length, gamma = 12, 3
    tokens = _tokens(2, length + gamma)
    span = model.span(0, torch.arange(length).expand(2, length), length)
    hidden = model.forward(tokens[:, :length].flatten(), [span])
    last = torch.full((2,), length - 1)
    ours = [model.draft(tokens[:, 1 : length + 1].flatten(), hidden, [span], [last])]
    for depth in range(2, gamma + 1):
        position = torch.full((2, 1), length + depth - 2)
        span = model.span(0, position, length + gamma)
        ours.append(model.draft(tokens[:, length + depth - 1], ours[-1], [span]))

    # The module sees the same thing as one growing sequence of (hidden, next token) pairs.
    states = hidden.view(2, length, -1)
    embedded = weights["model.embed_tokens.weight"][tokens]
    for depth in range(1, gamma + 1):
        count = states.shape[1]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        out = reference(states, embedded[:, 1 : count + 1], torch.arange(count)[None], mask)
        assert (out[:, -1] - ours[depth - 1]).abs().max() < TOLERANCE
        states = torch.cat((states, out[:, -1:]), 1)


@torch.inference_mode()
def test_selecting_a_token_changes_nothing_but_what_is_computed(tmp_path):
    model = _model(write_random_checkpoint(tmp_path), mtp=True)
    tokens, hidden = _tokens(2, 6), torch.randn(12, 32, generator=torch.Generator().manual_seed(1))
    span = model.span(0, torch.arange(6).expand(2, 6), 6)
    every = model.draft(tokens.flatten(), hidden, [span]).view(2, 6, -1)
    keys = model.cache[-1].clone()
    model.cache.zero_()
    chosen = model.draft(tokens.flatten(), hidden, [span], [torch.tensor([4, 1])])
    assert torch.allclose(chosen, every[[0, 1], [4, 1]], atol=1e-6)
    assert torch.equal(keys, model.cache[-1])


@torch.inference_mode()
def test_spans_of_one_pass_do_not_see_each_other(tmp_path):
    """Joined or alone, a span gives the same hidden states and keys, also where it selects tokens."""
    model = _model(write_random_checkpoint(tmp_path), mtp=True)
    tokens, following = _tokens(3, 12), _tokens(3, 13)[:, 1:]
    selects = [torch.tensor([2, 0]), torch.tensor([7])]

    def spans():
        return [model.span(0, torch.arange(4).expand(2, 4), 4), model.span(2, torch.arange(12)[None], 12)]

    pieces = [(tokens[:2, :4], following[:2, :4]), (tokens[2:], following[2:])]
    joined = model.forward(torch.cat([t.flatten() for t, _ in pieces]), spans())
    drafted = model.draft(torch.cat([f.flatten() for _, f in pieces]), joined, spans(), selects)
    keys = model.cache.clone()
    model.cache.zero_()
    alone, drafts = [], []
    for (piece, after), span, select in zip(pieces, spans(), selects, strict=True):
        alone.append(model.forward(piece.flatten(), [span]))
        drafts.append(model.draft(after.flatten(), alone[-1], [span], [select]))
    assert torch.allclose(torch.cat(alone), joined, atol=1e-5)
    assert torch.allclose(torch.cat(drafts), drafted, atol=1e-5)
    assert torch.allclose(model.cache, keys, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("pieces", [((0, 3, 17),), ((0, 1, 17), (1, 3, 9))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_groups_of_rows_equals_attention_over_all(kv_heads, pieces, dtype):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 5, 4, 8, generator=generator)
    keys, values = torch.randn(2, 3, kv_heads, 20, 8, generator=generator)[:, :, :, :17]
    mask = torch.zeros(3, 5, 17).masked_fill_(torch.rand(3, 5, 17, generator=generator) < 0.5, float("-inf"))
    mask[:, :, 0] = 0
    for start, stop, seen in pieces:
        mask[start:stop, :, seen:] = float("-inf")
    whole = expand_mask(mask, kv_heads, 4 // kv_heads)

    inputs = (x.to(dtype) for x in (query, keys.flatten(0, 1), values.flatten(0, 1), whole))
    products = attend_products(*inputs, pieces).float()

    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    assert torch.allclose(products, attend(query, keys, values, mask), atol=tolerance)


@pytest.mark.parametrize("rows", [1, 4, 5, 64, 191])
def test_pieces_cover_every_row_and_all_it_needs(rows):
    contexts = np.random.default_rng(rows).choice([40, 300, 1500], rows, p=[0.7, 0.2, 0.1])
    pieces = pieces_of(contexts)
    assert [start for start, _, _ in pieces] == [0, *(stop for _, stop, _ in pieces[:-1])]
    assert pieces[-1][1] == rows
    assert all((contexts[start:stop] <= seen).all() for start, stop, seen in pieces)
    assert all(seen in contexts[start:stop] for start, stop, seen in pieces)


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)])
def test_packed_and_plain_products_agree(rows, bias, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 128, generator=generator).to(dtype)
    offset = torch.randn(256, generator=generator).to(dtype) if bias else None
    x = torch.randn(rows, 128, generator=generator).to(dtype)

    product = Linear(weight, offset)(x).float()

    exact = torch.nn.functional.linear(*(t if t is None else t.float() for t in (x, weight, offset)))
    assert torch.allclose(product, exact, atol=tolerance)


def test_a_weight_is_in_memory_once_unless_small_products_need_the_plain_one():
    # 2**20 weights reach the packed kernel with one row, 2**15 need more.
    assert Linear(torch.zeros(1024, 1024)).weight is None
    assert Linear(torch.zeros(256, 128)).weight is not None


@torch.inference_mode()
def test_a_tied_head_follows_the_embedding_of_an_update_that_repeats_neither(tmp_path):
    model = _model(write_random_checkpoint(tmp_path, family="qwen2", tie=True))
    weights = read_weights(tmp_path)
    moved = weights["model.embed_tokens.weight"] + 1
    del weights["lm_head.weight"]

    model.load(weights | {"model.embed_tokens.weight": moved})

    hidden = torch.randn(3, moved.shape[1])
    assert torch.allclose(model.logits(hidden), hidden @ moved.T, atol=1e-4)


def test_attention_never_takes_cudnns_kernel(tmp_path):
    torch.backends.cuda.enable_cudnn_sdp(True)
    _model(write_random_checkpoint(tmp_path, family="qwen2"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
