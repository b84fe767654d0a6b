"""Buckets of weights, and their encoding for the body of SGLang's `/update_weights_from_tensor`.

SGLang unpickles the body with an allow-list of globals. Tensors are pickled by value, which this list
permits. So the two sides may have different versions of torch and run on different hosts.
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
    """Split weights into consecutive buckets of at most `megabytes`; a larger tensor gets its own bucket.

    Tensors that must be sent together (`travels_with`) are never separated.

    >>> tensors = {"a": torch.zeros(2**18), "b": torch.zeros(2**17), "c": torch.zeros(1)}
    >>> [[name for name, _ in bucket] for bucket in buckets(tensors, megabytes=1)]
    [['a'], ['b', 'c']]
    """
    together: dict[str, Bucket] = {}
    for name, tensor in weights.items():
        together.setdefault(travels_with(name), []).append((name, tensor))

    bucket: Bucket = []
    size = 0
    for pairs in together.values():
        num_bytes = sum(tensor.nbytes for _, tensor in pairs)
        # A bucket is never empty: a tensor that is too large has a bucket of its own.
        if bucket and size + num_bytes > megabytes * _MEGABYTE:
            yield bucket
            bucket, size = [], 0
        bucket += pairs
        size += num_bytes
    if bucket:
        yield bucket


def serialize(bucket: Bucket) -> str:
    """Pickle a bucket and encode it in base64; views are cloned, to pickle only their own bytes."""
    cloned = [(name, tensor.detach().cpu().contiguous().clone()) for name, tensor in bucket]
    return base64.b64encode(pickle.dumps(cloned)).decode()
