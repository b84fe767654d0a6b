"""The sampler's pure functions: streams, inverse CDF, temperatures."""

from __future__ import annotations

import pytest
import torch

from rlpipe.spec.sampling import Stream, greedy_rows, log_probs, request_uniforms, sample_cdf

pytestmark = pytest.mark.unit


def test_uniforms_depend_on_seed_position_and_stream_alone():
    long, short = request_uniforms(5, 64), request_uniforms(5, 3)
    assert (long[:3] == short).all()
    assert (request_uniforms(6, 3) != short).all()
    assert len(set(long.flatten().tolist())) == long.size
    assert long.shape == (64, len(Stream))


def test_uniforms_have_more_than_32_bits():
    scaled = request_uniforms(0, 1000) * 2**32
    assert (scaled != scaled.round()).mean() > 0.99


def test_inverse_cdf_hits_exactly_the_interval_of_each_token():
    weights = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0], dtype=torch.float64)
    uniforms = torch.tensor(
        [0.0, 0.2 - 1e-12, 0.2 + 1e-12, 0.7 - 1e-12, 0.7 + 1e-12, 1.0], dtype=torch.float64
    )
    tokens = sample_cdf(weights.expand(6, -1), uniforms)
    assert tokens.tolist() == [1, 1, 3, 3, 4, 4]


def test_the_cdf_fallback_is_the_last_positive_token_and_not_the_last_of_the_vocabulary():
    weights = torch.zeros(2, 7)
    weights[:, 2] = 1e-30
    assert sample_cdf(weights, torch.tensor([1.0, 0.999999999], dtype=torch.float64)).tolist() == [2, 2]


def test_tokens_beyond_24_bits_of_a_large_vocabulary_can_be_drawn():
    """With float32 sums and uniforms, most of these targets cannot be hit."""
    vocab = 150_000
    weights = torch.full((1, vocab), 1.0 / vocab)
    wanted = torch.randint(0, vocab, (64,), generator=torch.Generator().manual_seed(0))
    uniforms = (wanted.double() + 0.5) / vocab
    assert sample_cdf(weights.expand(64, -1), uniforms).tolist() == wanted.tolist()


def test_log_probs_divide_each_row_by_its_own_temperature():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    ours = log_probs(logits, torch.tensor([0.5, 2.0]))
    assert torch.allclose(ours[0], (logits[0] * 2).log_softmax(-1))
    assert torch.allclose(ours[1], (logits[1] / 2).log_softmax(-1))
    assert torch.equal(log_probs(logits, None), logits.log_softmax(-1))


def test_greedy_rows_become_one_hot_and_others_stay():
    probs = torch.tensor([[[0.2, 0.5, 0.3]], [[0.2, 0.5, 0.3]]])
    out = greedy_rows(probs, torch.tensor([True, False]))
    assert out[0].tolist() == [[0.0, 1.0, 0.0]]
    assert torch.equal(out[1], probs[1])
