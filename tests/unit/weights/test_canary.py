"""Fingerprints: what the server should hold for given weights, and how a difference is told."""

import pytest
import torch

from rlpipe.models.checkpoint import read_weights
from rlpipe.weights.canary import (
    Shard,
    compare,
    server_parts,
)
from rlpipe.weights.fingerprint import fingerprints
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return read_weights(write_random_checkpoint(tmp_path_factory.mktemp("model"), vocab=100, layers=1))


def tensors(weights, shard=None, **options):
    options = {"tied": False, "draft": True} | options
    parts = server_parts(weights, torch.float32, shard or Shard(kv_heads=2), **options)
    return {name: torch.cat(tuple(pieces)) for name, pieces in parts.items()}


def hashes(weights):
    return fingerprints({name: [one] for name, one in tensors(weights).items()}, on_gpu=False)


def test_projections_are_fused_in_the_order_of_the_server(weights):
    found = tensors(weights)
    layer = "model.layers.0.self_attn."
    parts = [weights[f"{layer}{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(found[f"{layer}qkv_proj.weight"], torch.cat(parts))
    mlp = "model.mtp_layers.0.mlp."
    parts = [weights[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(found["draft.model.mtp_block.mlp.gate_up_proj.weight"], torch.cat(parts))


def test_the_draft_has_the_targets_embedding_and_head(weights):
    found = tensors(weights)
    assert torch.equal(found["draft.lm_head.weight"], found["lm_head.weight"])
    assert found["lm_head.weight"].shape[0] == 128 and not found["lm_head.weight"][100:].any()


def test_without_a_draft_only_the_target_is_expected(weights):
    assert not [name for name in tensors(weights, draft=False) if "draft" in name or "mtp" in name]


def test_a_tied_head_is_not_expected(weights):
    assert "lm_head.weight" not in tensors(weights, tied=True)


@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_all_ranks_make_up_the_whole(weights, size):
    """Each rank's part of each projection, put together again; kv heads beyond their number repeat."""
    whole = tensors(weights)
    ranks = [tensors(weights, Shard(rank=rank, size=size, kv_heads=2)) for rank in range(size)]
    for name, dim in (("mlp.down_proj", 1), ("self_attn.o_proj", 1)):
        name = f"model.layers.0.{name}.weight"
        assert torch.equal(torch.cat([rank[name] for rank in ranks], dim), whole[name])
    assert torch.equal(torch.cat([rank["lm_head.weight"] for rank in ranks]), whole["lm_head.weight"])
    q, k, v = (weights[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    for rank, found in enumerate(ranks):
        head = rank * 2 // size
        expected = [q.chunk(size)[rank], k.chunk(2)[head], v.chunk(2)[head]]
        assert torch.equal(found["model.layers.0.self_attn.qkv_proj.weight"], torch.cat(expected))


def test_one_changed_number_changes_one_fingerprint(weights):
    served = hashes(weights)
    changed = dict(weights)
    name = "model.mtp_layers.0.input_proj.weight"
    changed[name] = changed[name].clone()
    changed[name][0, 0] += 1e-6
    report = compare(hashes(changed), served)
    assert report.draft == ["draft.model.input_proj.weight"] and not report.target and not report.passed
    assert "1 of the draft (first draft.model.input_proj.weight)" in report.summary()


def test_a_tensor_only_one_side_has_counts_as_different():
    assert compare({"a": "1", "b": "2"}, {"b": "2", "draft.c": "3"}).target == ["a"]
    assert compare({"b": "2"}, {"b": "2", "draft.c": "3"}).draft == ["draft.c"]
