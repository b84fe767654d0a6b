"""Weights for rollout workers: one flat buffer with one version of target and draft together.

Owns the payload format and its exact round trip, but not the transfer: a cluster passes the payload to
engines (a Ray object-store reference, or the object itself if inline). Target and draft are never sent
separately, so the versions of a draft and its target always match.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(slots=True, kw_only=True)
class WeightPayload:
    """Full HF-named weights of one policy version.

    version: number of optimizer steps. index: name -> (dtype, shape, first byte).
    buffer: [num_bytes] uint8, shared zero-copy by the object store.
    policy: the policy's weights, if a decoupled actor generates and a validation follows.
    """

    version: int
    index: dict[str, tuple[str, tuple[int, ...], int]]
    buffer: np.ndarray
    policy: WeightPayload | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the weights in bytes."""
        return int(self.buffer.nbytes) + (self.policy.num_bytes if self.policy else 0)


def pack_weights(
    weights: Mapping[str, torch.Tensor], version: int, policy: WeightPayload | None = None
) -> WeightPayload:
    """Copy tensors (any dtype, any device) into one CPU buffer."""
    index: dict[str, tuple[str, tuple[int, ...], int]] = {}
    offset = 0
    for name, tensor in weights.items():
        offset = -(-offset // 16) * 16
        index[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)
        offset += tensor.numel() * tensor.element_size()

    buffer = torch.empty(offset, dtype=torch.uint8)
    for name, tensor in weights.items():
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        start = index[name][2]
        buffer[start : start + raw.numel()].copy_(raw)
    return WeightPayload(version=version, index=index, buffer=buffer.numpy(), policy=policy)


def unpack_weights(payload: WeightPayload) -> dict[str, torch.Tensor]:
    """Return views into the buffer by HF name; copy before writing to them.

    >>> w = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    >>> out = unpack_weights(pack_weights(w, version=1))
    >>> all(torch.equal(w[k], out[k]) for k in w)
    True
    """
    weights: dict[str, torch.Tensor] = {}
    for name, (dtype_name, shape, start) in payload.index.items():
        dtype = getattr(torch, dtype_name)
        count = int(np.prod(shape, dtype=np.int64))
        raw = payload.buffer[start : start + count * dtype.itemsize]

        # A buffer of the object store is read-only, and torch warns about that.
        if not raw.flags.writeable:
            raw = raw.copy()
        weights[name] = torch.from_numpy(raw).view(dtype).view(shape)
    return weights
