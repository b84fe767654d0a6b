"""Pieces of weights: complete, bounded, and by value."""

import base64
import pickle

import pytest
import torch

from rlpipe.weights.buckets import buckets, serialize

pytestmark = pytest.mark.unit
DOWN = "kv_a_proj_with_mqa"


def test_pieces_hold_every_tensor_once_and_stay_below_the_limit():
    weights = {str(i): torch.full((50_000 * i,), float(i)) for i in range(1, 8)}
    pieces = list(buckets(weights, megabytes=1))
    assert [name for piece in pieces for name, _ in piece] == list(weights)
    for piece in pieces:
        assert len(piece) == 1 or sum(tensor.nbytes for _, tensor in piece) <= 2**20
    assert len(pieces) > 3


def test_what_a_server_fuses_as_it_comes_is_never_parted():
    """SGLang drops the one of DeepSeek's two products that comes without the other, and says nothing."""
    names = [
        f"model.layers.{i}.self_attn.{n}.weight" for i in range(3) for n in ("q_a_proj", "q_b_proj", DOWN)
    ]
    weights = {name: torch.full((100_000 + i,), float(i)) for i, name in enumerate(names)}
    pieces = [dict(piece) for piece in buckets(weights, megabytes=1)]
    assert {n: t for piece in pieces for n, t in piece.items()}.keys() == weights.keys() and len(pieces) > 3
    for piece in pieces:
        for name in piece:
            if DOWN in name:
                assert name.replace(DOWN, "q_a_proj") in piece


def test_tensors_arrive_by_value_and_bit_for_bit():
    weights = [("a", torch.randn(3, 4)), ("b", torch.randn(5).bfloat16()), ("c", torch.randn(4, 4).t()[1:])]
    found = pickle.loads(base64.b64decode(serialize(weights)))
    for (name, sent), (got_name, got) in zip(weights, found, strict=True):
        assert name == got_name and got.dtype == sent.dtype and torch.equal(got, sent)


def test_a_view_costs_what_it_shows():
    large = torch.zeros(1_000_000)
    assert len(serialize([("view", large[:10])])) < 2000
