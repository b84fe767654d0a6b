"""Fingerprints for the canary, computed from buckets that arrive one after the other.

Most tensors that a server fuses are in one bucket and are hashed with it, on its device. The experts of a
layer form one tensor on the server, w13 or w2, but may be in several buckets, depending on `bucket_mb`.
SGLang's mix is a sum over tiles of 32 KiB, so on a GPU each bucket adds the tiles of its experts:

    buckets of a layer:  experts 0, 1   | experts 2, 3   | ...
    tiles of w13:        0 .. 383       | 384 .. 767     | ...       added up, and mixed with the last one

The layer's other tensors are then on the meta device and only define positions. SHA-256, the hash of a CPU
server, is not such a sum, and an expert that ends within a tile cannot be added separately. In these cases a
layer is hashed when it is complete, from the trainer's copy of the version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import torch

from rlpipe.weights.buckets import Bucket
from rlpipe.weights.fingerprint import Parts, ends_with_tiles, fingerprints, mix, tile_sums
from rlpipe.weights.offer import Checksums

_EXPERTS = ".experts."  # part of the Hugging Face names of expert weights

RankParts = Callable[[Mapping[str, torch.Tensor]], list[dict[str, Parts]]]


class BucketChecksums:
    """Checksums of all ranks of a server, from the buckets of one version.

    plan: all buckets, on the meta device. rank_parts: returns the tensors that each rank of a server makes
    from some weights, by their names on the server. on_gpu: whether the server hashes on a GPU. copied:
    returns the version's tensors in host memory, by name; a layer's tensors are complete when its last bucket
    is added.
    """

    def __init__(
        self,
        plan: Sequence[Bucket],
        rank_parts: RankParts,
        *,
        ranks: int,
        on_gpu: bool,
        copied: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        self._rank_parts, self._on_gpu, self._copied = rank_parts, on_gpu, copied
        self._ranks: list[dict[str, str]] = [{} for _ in range(ranks)]

        # Layers with experts in several buckets, with the buckets that are still missing.
        by_layer: dict[str, list[Bucket]] = {}
        for bucket in plan:
            for layer, tensors in groupby(bucket, lambda pair: layer_of(pair[0])):
                by_layer.setdefault(layer, []).append(list(tensors))
        self._layers = {
            layer: dict(pair for bucket in buckets for pair in bucket)
            for layer, buckets in by_layer.items()
            if layer and len(buckets) > 1
        }
        self._missing = {layer: set(tensors) for layer, tensors in self._layers.items()}
        self._sums: dict[str, list[dict[str, torch.Tensor]]] = {}

    def add(self, bucket: Bucket) -> None:
        """Hash the bucket's tensors as far as possible; they are read before this returns."""
        whole: dict[str, torch.Tensor] = {}
        experts: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in bucket:
            split = layer_of(name) in self._layers
            (experts.setdefault(layer_of(name), {}) if split else whole)[name] = tensor

        self._hash(whole)
        for layer, tensors in experts.items():
            self._missing[layer] -= tensors.keys()
            self._add_experts(layer, tensors, complete=not self._missing[layer])

    def result(self) -> Checksums:
        """Return the checksums; call it after all buckets were added."""
        return Checksums(ranks=self._ranks)

    def _hash(self, weights: Mapping[str, torch.Tensor]) -> None:
        for sums, parts in zip(self._ranks, self._rank_parts(weights), strict=True):
            sums |= fingerprints(parts, on_gpu=self._on_gpu)

    def _add_experts(self, layer: str, tensors: dict[str, torch.Tensor], *, complete: bool) -> None:
        """Add the experts of one bucket. complete: whether they are the last experts of their layer."""
        parts_of_ranks = self._rank_parts(self._layers[layer] | tensors)
        fused = [parts for rank in parts_of_ranks for parts in rank.values()]
        if not (self._on_gpu and all(map(ends_with_tiles, fused))):
            if complete:
                copies = self._copied()
                self._hash({name: copies[name] for name in self._layers[layer]})
            return

        device = next(iter(tensors.values())).device
        zero = torch.zeros(2, dtype=torch.int64, device=device)
        known = self._sums.setdefault(layer, [dict.fromkeys(parts, zero) for parts in parts_of_ranks])
        for sums, parts in zip(known, parts_of_ranks, strict=True):
            for name, of_tensor in parts.items():
                sums[name] = sums[name] + tile_sums(of_tensor, device)

        if complete:
            for hashes, sums in zip(self._ranks, self._sums.pop(layer), strict=True):
                hashes |= dict(zip(sums, mix(list(sums.values())), strict=True))


def layer_of(name: str) -> str:
    """Return the layer that an expert's weight belongs to; empty for other weights.

    >>> layer_of("model.layers.3.mlp.experts.7.up_proj.weight"), layer_of("model.norm.weight")
    ('model.layers.3.mlp', '')
    """
    layer, mark, _ = name.partition(_EXPERTS)
    return layer if mark else ""
