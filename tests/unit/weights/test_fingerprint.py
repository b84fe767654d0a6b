"""Hashes equal those of SGLang's checker, by an oracle in plain integers, and cost no copy."""

import hashlib
import threading

import numpy as np
import pytest
import torch

from rlpipe.config.drafters import Drafter
from rlpipe.models.checkpoint import read_config
from rlpipe.weights import fingerprint
from rlpipe.weights.canary import Shard, server_parts
from rlpipe.weights.fingerprint import _CHUNK, _sums, cpu_hash, fingerprints, gpu_hash
from rlpipe.weights.fingerprint_kernel import add_mixed
from tests.helpers.cli import ROOT

pytestmark = pytest.mark.unit
TINY = ROOT / "models" / "tiny"


def mixed_by_numpy(data: bytes) -> int:
    """SGLang's mix, tile by tile in uint32, as its Triton kernel says it."""

    def fmix(x):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return x ^ (x >> np.uint32(16))

    words = np.frombuffer(data + bytes(-len(data) % 4), np.uint32)
    seed, total, size = 0x243F6A88, 0, np.uint32(4 * len(words))
    seeds = (seed, ((seed * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
    with np.errstate(over="ignore"):
        for start in range(0, len(words), 8192):
            value = words[start : start + 8192]
            place = np.arange(start, start + len(value), dtype=np.uint32)
            for seed_word, factor, turn, up in zip(
                seeds, (0x27D4EB2D, 0x165667B1), (15, 13), (32, 0), strict=True
            ):
                key = place * np.uint32(factor) + np.uint32(seed_word)
                key ^= (place << np.uint32(turn)) | (place >> np.uint32(32 - turn))
                summed = fmix(value ^ key).sum(dtype=np.uint32) ^ size
                total += int(fmix(np.asarray([summed], np.uint32))[0]) << up
    mask = 2**64 - 1
    x = total & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_the_cpu_hash_is_the_start_of_sha256_over_all_parts():
    parts = [torch.arange(60, dtype=torch.uint8), torch.arange(60, 100, dtype=torch.uint8)]
    assert f"{cpu_hash(parts):016x}" == hashlib.sha256(bytes(range(100))).hexdigest()[:16]


def test_the_gpu_hash_is_sglangs():
    """Values from SGLang 0.5.23's Triton kernel (hash_tiles32_kernel_blocked), run in the interpreter."""
    torch.manual_seed(0)
    sizes = (torch.randn(100), torch.randn(30000), torch.randn(7, 3).bfloat16(), torch.randn(16384))
    found = [f"{gpu_hash([tensor]):016x}" for tensor in sizes]
    assert found == ["6429891496f5d53e", "e2be0195db945207", "94e3baabd3ce1502", "c231bcaac5bc090a"]


@pytest.mark.parametrize("count", [1, 3, 4, 4 * 8192, 4 * 8192 + 6, 4 * _CHUNK, 8 * _CHUNK + 40_003])
def test_the_gpu_hash_equals_the_oracle_at_every_edge_of_tiles_and_chunks(count):
    data = torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    assert gpu_hash([data]) == mixed_by_numpy(data.numpy().tobytes())
    assert gpu_hash([data[:1], data[1:]]) == gpu_hash([data]) == gpu_hash([torch.cat([data[:1], data])[1:]])


@pytest.mark.parametrize("count", [4, 4 * 8192, 4 * 8192 + 8, 12 * 8192 + 404])
def test_the_triton_kernel_adds_up_what_torch_does_whole_or_in_parts(count):
    data = torch.randint(256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    words, tile = data.view(torch.int32), 8192
    found = torch.zeros(2, 2, dtype=torch.int64)
    add_mixed(words, 0, len(words), found[0])
    for first, part in enumerate(words.split(tile)):
        add_mixed(part, first * tile, len(words), found[1])
    assert found[0].tolist() == found[1].tolist() == _sums([data]).tolist()


def test_parts_that_end_with_a_tile_are_hashed_where_they_lie(monkeypatch):
    data = torch.arange(4 * 8192 * 3, dtype=torch.int32).view(torch.uint8)
    whole = gpu_hash([data])
    monkeypatch.setattr(torch, "cat", None)
    assert gpu_hash([data[: 4 * 8192], data[4 * 8192 :]]) == whole


def test_nothing_hashes_to_zero_on_a_gpu():
    assert gpu_hash([torch.empty(0)]) == 0


@pytest.mark.parametrize("on_gpu", [False, True])
def test_every_single_flipped_bit_changes_its_fingerprint_alone(on_gpu):
    tensors = {name: [torch.randn(64, 33)] for name in "abc"}
    sent = fingerprints(tensors, on_gpu=on_gpu)
    for byte in (0, 4097, 64 * 33 * 4 - 1):
        raw = tensors["b"][0].view(-1).view(torch.uint8)
        raw[byte] ^= 1
        served = fingerprints(tensors, on_gpu=on_gpu)
        raw[byte] ^= 1
        assert [name for name in sent if sent[name] != served[name]] == ["b"]


def test_names_of_one_tensor_are_hashed_once(monkeypatch):
    """The draft's embedding and head are the target's: the two largest tensors."""
    hashed = []
    monkeypatch.setattr(fingerprint, "cpu_hash", lambda parts: hashed.append(parts) or len(hashed))
    weights = {"model.embed_tokens.weight": torch.zeros(64, 2), "lm_head.weight": torch.ones(64, 2)}
    parts = server_parts(weights, Shard(), read_config(TINY), dtype=torch.float32, drafter=Drafter.MTP)
    found = fingerprints(parts, on_gpu=False)
    assert len(found) == 4 and len(hashed) == 2
    assert found["lm_head.weight"] == found["draft.lm_head.weight"]


def test_fused_and_padded_tensors_are_hashed_where_they_lie():
    """One rank and a vocabulary that is a multiple of 64: no part of a tensor is a copy."""
    layer = "model.layers.0.self_attn."
    weights = {f"{layer}{part}_proj.weight": torch.randn(4, 4) for part in "qkvo"}
    weights["lm_head.weight"] = torch.randn(64, 4)
    parts = server_parts(weights, Shard(), read_config(TINY), dtype=torch.float32, drafter=None)
    lie = {tensor.data_ptr() for tensor in weights.values()}
    assert {part.data_ptr() for pieces in parts.values() for part in pieces} == lie
    fused = torch.cat([weights[f"{layer}{part}_proj.weight"] for part in "qkv"])
    found = fingerprints(parts, on_gpu=False)
    assert found[f"{layer}qkv_proj.weight"] == f"{cpu_hash([fused]):016x}"


def test_tensors_on_a_cpu_are_mixed_by_all_cores_at_once(monkeypatch):
    """A rollout worker has one thread of torch, and hashes all weights for a server on a GPU."""
    both, summed = threading.Barrier(2, timeout=10), fingerprint._sums
    monkeypatch.setattr(fingerprint, "_cores", lambda: 2)
    monkeypatch.setattr(fingerprint, "_sums", lambda parts: (both.wait(), summed(parts))[1])
    tensors = [torch.randn(40), torch.randn(20000)]
    found = fingerprints({"a": tensors[:1], "b": tensors[1:]}, on_gpu=True)
    assert found == {
        name: f"{mixed_by_numpy(t.numpy().tobytes()):016x}" for name, t in zip("ab", tensors, strict=True)
    }
