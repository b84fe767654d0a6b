"""Attention of SGLang's `torch_native` backend, which serves CPUs, from the queries of a step alone.

SGLang takes one request at a time, pads its queries to the whole context and attends from all positions, of
which a verify step reads the last gamma + 1. Here queries meet keys of their own request's context up to
their own position, as there, and requests of like lengths are attended to together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

KEYS = 1 << 16  # of one call with more than one request, at most: they are copied
_PLAN = "rlpipe_plan"


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
    return _attend(
        backend, query, output, keys, values, slots, requests, before.tolist(), new.tolist(), **how
    )


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
    return _attend(backend, query, output, keys, values, slots, requests, before, [1] * len(before), **how)


def _attend(
    backend, query, output, keys, values, slots, requests, before, new, *, scaling=None, **_
) -> torch.Tensor:
    """Calls of a pass are found for its first layer; the rest are arguments of `extended`."""
    plan = backend.__dict__.get(_PLAN)
    # a layer that comes again begins another pass, in which a request's slots may be others
    if plan is None or keys.data_ptr() in plan.layers or plan.asked != (before, new):
        plan = backend.__dict__[_PLAN] = Plan((before, new), set(), together(slots, requests, before, new))
    plan.layers.add(keys.data_ptr())
    shared = query.shape[1] // keys.shape[1]  # heads of queries to one of keys
    for rows, places, seen, real in plan.calls:
        (size, count), heads = rows.shape, keys.shape[1]
        asked = query[rows].view(size, count, heads, shared, -1).permute(0, 2, 3, 1, 4)
        known = _rows(keys, places).to(query.dtype).transpose(1, 2)
        # with latent attention the first numbers of a key are the value
        latent = values.data_ptr() == keys.data_ptr()
        held = known[..., : values.shape[-1]] if latent else _rows(values, places).to(known).transpose(1, 2)
        found = scaled_dot_product_attention(
            asked.reshape(size, heads, shared * count, -1),
            known,
            held,
            attn_mask=seen.repeat(1, 1, shared, 1),
            scale=scaling,
        )
        found = found.view(size, heads, shared, count, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)
        if real is None:
            output[rows] = found
        else:
            output[rows[real]] = found[real]
    return output


def _rows(cache: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[requests, keys, heads, size]; whole rows are copied, ten times as fast as `cache[places]`."""
    copied = cache.reshape(len(cache), -1).index_select(0, places.reshape(-1))
    return copied.view(*places.shape, *cache.shape[1:])


class Call(NamedTuple):
    """R requests attended to together, of at most n queries and L keys each.

    rows [R, n]: of the queries in the pass. places [R, L]: slots of the keys. seen [R, 1, n, L]: which a
    query sees. real [R, n]: queries that are no padding; None where all are.
    """

    rows: torch.Tensor
    places: torch.Tensor
    seen: torch.Tensor
    real: torch.Tensor | None


@dataclass
class Plan:
    """Calls of one pass, for which lengths, and the layers that used them."""

    asked: tuple[list[int], list[int]]
    layers: set[int]
    calls: list[Call]


def together(
    slots: torch.Tensor, requests: torch.Tensor, before: Sequence[int], new: Sequence[int]
) -> list[Call]:
    """Requests whose queries and contexts are as many, up to a factor of two, in one call."""
    groups: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    start = 0
    for number, (old, more) in enumerate(zip(before, new, strict=True)):
        if more:
            kind = (more - 1).bit_length(), (old + more - 1).bit_length()
            groups.setdefault(kind, []).append((number, start, old, more))
        start += more
    calls = []
    for (_, bits), members in groups.items():
        width = max(1, KEYS >> bits)
        for first in range(0, len(members), width):
            calls.append(_call(slots, requests, members[first : first + width]))
    return calls


def _call(slots: torch.Tensor, requests: torch.Tensor, members: Sequence[tuple[int, int, int, int]]) -> Call:
    """members: place among the requests, first query, cached keys and queries of each."""
    number, start, old, more = (torch.tensor(row, device=slots.device) for row in zip(*members, strict=True))
    step = torch.arange(int(more.max()), device=slots.device)
    at = torch.arange(int((old + more).max()), device=slots.device)
    real = step < more[:, None]
    rows = start[:, None] + torch.where(real, step, 0)
    # behind a context stand other requests' slots
    places = slots[requests[number].long()[:, None], torch.minimum(at, (old + more)[:, None] - 1)]
    inside = at < (old + more)[:, None]
    seen = (at <= (old[:, None] + step)[..., None]) & inside[:, None]
    return Call(rows, places, seen[:, None], None if real.all() else real)
