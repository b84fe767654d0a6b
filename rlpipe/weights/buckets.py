"""Tensors as SGLang reads them: in the body of `/update_weights_from_tensor`, in pieces.

SGLang unpickles the body with an allow-list of globals. Tensors are pickled by value, which that list
permits, so nothing depends on shared memory, on both sides having the same torch, or on one host.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator, Mapping

import torch

from rlpipe.models.latent import travels_with

Bucket = list[tuple[str, torch.Tensor]]

_MEGABYTE = 2**20


def buckets(weights: Mapping[str, torch.Tensor], megabytes: int) -> Iterator[Bucket]:
    """Consecutive pieces of at most `megabytes`, a larger tensor alone; what travels together is one.

    >>> tensors = {"a": torch.zeros(2**18), "b": torch.zeros(2**17), "c": torch.zeros(1)}
    >>> [[name for name, _ in piece] for piece in buckets(tensors, megabytes=1)]
    [['a'], ['b', 'c']]
    """
    piece: Bucket = []
    size = 0
    units: dict[str, Bucket] = {}
    for name, tensor in weights.items():
        units.setdefault(travels_with(name), []).append((name, tensor))
    for unit in units.values():
        num_bytes = sum(tensor.nbytes for _, tensor in unit)
        if piece and size + num_bytes > megabytes * _MEGABYTE:
            yield piece
            piece, size = [], 0
        piece += unit
        size += num_bytes
    if piece:
        yield piece


def serialize(piece: Bucket) -> str:
    """One piece in base64; each tensor with a storage of its own, so that views cost what they show."""
    own = [(name, tensor.detach().cpu().contiguous().clone()) for name, tensor in piece]
    return base64.b64encode(pickle.dumps(own)).decode()
