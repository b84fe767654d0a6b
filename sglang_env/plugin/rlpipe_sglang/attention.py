"""Attention of SGLang's `torch_native` backend, which serves CPUs, from the queries of a step alone.

SGLang takes one request at a time, pads its queries to the whole context and attends from all positions, of
which a verify step reads the last gamma + 1. Here queries meet keys of their own request's context up to
their own position, as there, and requests that bring equally many are attended to together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

PADDED = 2.0  # contexts are padded to the longest while that reads at most so many times their keys


def extended(
    original: Callable,
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    before: torch.Tensor,
    new: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    *,
    causal: bool = False,
    sliding_window_size: int | None = None,
    **how: Any,
) -> torch.Tensor:
    """AROUND `_run_sdpa_forward_extend`: `new` queries of each request behind the `before` cached ones.

    query, output: [tokens, heads, size]; keys, values: [slots, heads, size]; slots: [requests, context].
    """
    if encoder_lens is not None or not causal or sliding_window_size is not None:
        given = query, output, keys, values, slots, requests, lengths, before, new, encoder_lens
        return original(backend, *given, causal=causal, sliding_window_size=sliding_window_size, **how)
    return _attend(query, output, keys, values, slots, requests, before.tolist(), new.tolist(), **how)


def decoded(
    original: Callable,
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    *,
    sliding_window_size: int | None = None,
    **how: Any,
) -> torch.Tensor:
    """AROUND `_run_sdpa_forward_decode`: one query of each request, at the end of its context."""
    if encoder_lens is not None or sliding_window_size is not None:
        given = query, output, keys, values, slots, requests, lengths, encoder_lens
        return original(backend, *given, sliding_window_size=sliding_window_size, **how)
    how.pop("causal", None)
    before = [length - 1 for length in lengths.tolist()]
    return _attend(query, output, keys, values, slots, requests, before, [1] * len(before), **how)


def _attend(
    query, output, keys, values, slots, requests, before, new, *, scaling=None, enable_gqa=False, **_
) -> torch.Tensor:
    """Requests together where that wastes little, else each alone; the rest are arguments of `extended`."""
    ends = [old + more for old, more in zip(before, new, strict=True)]
    together = len(set(new)) == 1 and len(ends) * max(ends) <= PADDED * sum(ends)
    groups = [range(len(ends))] if together else [range(i, i + 1) for i in range(len(ends))]
    start = 0
    for group in groups:
        count, longest = new[group[0]], max(ends[i] for i in group)
        stop = start + count * len(group)
        old = torch.tensor([before[i] for i in group], device=query.device)
        at = torch.arange(longest, device=query.device)
        inside = at < (old + count)[:, None]
        places = slots[requests[group[0] : group[-1] + 1], :longest]
        places = torch.where(inside, places, places[:, :1])  # behind a context stand other requests' slots
        seen = at <= (old[:, None] + torch.arange(count, device=query.device))[..., None]
        asked = query[start:stop].unflatten(0, (len(group), count)).transpose(1, 2)
        known, held = (cache[places].to(query.dtype).transpose(1, 2) for cache in (keys, values))
        found = scaled_dot_product_attention(
            asked, known, held, attn_mask=seen[:, None], scale=scaling, enable_gqa=enable_gqa
        )
        output[start:stop] = found.transpose(1, 2).flatten(0, 1)
        start = stop
    return output
