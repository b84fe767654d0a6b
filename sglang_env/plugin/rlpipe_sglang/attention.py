"""Faster attention for SGLang's `torch_native` backend on CPUs: it computes only the queries of a step.

SGLang processes one request at a time, pads its queries to the full context and attends from all positions,
although a verify step needs only the last gamma + 1. Here only real queries attend, to the keys of their
request up to their position, and requests of similar lengths share a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

KEYS = 1 << 16  # maximum of keys in a call with several requests, because the keys are copied
FEW = 16  # maximum of queries of a request in a verify step
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
    """Around `_run_sdpa_forward_extend`: attend from `new` queries per request, after `before` cached ones.

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
    """Around `_run_sdpa_forward_decode`: attend from one query of each request, at the end of its context."""
    if encoder_lens is not None or sliding_window_size is not None:
        given = query, output, keys, values, slots, requests, lengths, encoder_lens
        return original(backend, *given, sliding_window_size=sliding_window_size, **how)
    how.pop("causal", None)
    before = [length - 1 for length in lengths.tolist()]
    return _attend(backend, query, output, keys, values, slots, requests, before, [1] * len(before), **how)


def _attend(
    backend, query, output, keys, values, slots, requests, before, new, *, scaling=None, **_
) -> torch.Tensor:
    """Attend; calls are planned at the first layer of a pass. For the arguments see `extended`."""
    shared = query.shape[1] // keys.shape[1]  # query heads per key head
    asked, layer = (before, new, shared, query.dtype), keys.data_ptr()
    latent = layer == values.data_ptr()  # latent attention: the first numbers of a key are the value
    plan = backend.__dict__.get(_PLAN)
    # a layer that is called again begins a new pass, in which a request may have other slots
    if plan is None or layer in plan.layers or plan.asked != asked:
        plan = backend.__dict__[_PLAN] = Plan(asked, set(), together(slots, requests, *asked))
    plan.layers.add(layer)
    _, heads, width = query.shape
    for size, count, fold, places, hidden, rows, real in plan.calls:
        chosen = query if rows is None else query[rows]
        chosen = chosen.view(size, count, heads // fold, fold, width).transpose(1, 2)
        known = _rows(keys, places, size, query.dtype)
        found = scaled_dot_product_attention(
            chosen.reshape(size, heads // fold, count * fold, width),
            known,
            known[..., : values.shape[-1]] if latent else _rows(values, places, size, query.dtype),
            attn_mask=hidden,
            scale=scaling,
            enable_gqa=fold < shared,
        )
        found = found.view(size, heads // fold, count, fold, -1).transpose(1, 2)
        if rows is None:
            output.view(found.shape).copy_(found)
        elif real is None:
            output[rows] = found.flatten(2, 3)
        else:
            output[rows[real]] = found.flatten(2, 3)[real]
    return output


def _rows(cache: torch.Tensor, places: torch.Tensor, requests: int, dtype: torch.dtype) -> torch.Tensor:
    """Copy [requests, heads, keys, size] from the cache by rows, ten times as fast as `cache[places]`."""
    copied = cache.flatten(1).index_select(0, places)
    if copied.dtype != dtype:
        copied = copied.to(dtype)
    return copied.view(requests, -1, *cache.shape[1:]).transpose(1, 2)


class Call(NamedTuple):
    """One attention call for R requests with at most n queries and L keys each.

    size: R. count: n. fold: number of query heads that share a key head and are treated as queries of one
    head; 1 in long prefills, because the mask grows with fold. places: [R * L], slots of the keys. hidden:
    [R, 1, n * fold, L], -inf at keys after a query, else 0; None if each query sees all keys. rows: [R, n],
    indices of the queries in the pass; None if they are all its queries, in order. real: [R, n], false for
    padding; None without padding.
    """

    size: int
    count: int
    fold: int
    places: torch.Tensor
    hidden: torch.Tensor | None
    rows: torch.Tensor | None = None
    real: torch.Tensor | None = None


@dataclass
class Plan:
    """The calls of one pass. asked: the pass's lengths, heads and dtype. layers: layers that used it."""

    asked: tuple[list[int], list[int], int, torch.dtype]
    layers: set[int]
    calls: list[Call]


def together(
    slots: torch.Tensor,
    requests: torch.Tensor,
    before: Sequence[int],
    new: Sequence[int],
    shared: int,
    dtype: torch.dtype,
) -> list[Call]:
    """Plan one call if padding at most doubles the keys, else calls for each kind of request.

    Requests of a kind have equal numbers of queries and keys, up to a factor of two.
    """
    lengths = [old + more for old, more in zip(before, new, strict=True)]
    padded = len(lengths) * max(lengths, default=0)
    if 0 < min(new, default=0) == max(new) and (len(new) == 1 or padded <= min(KEYS, 2 * sum(lengths))):
        return [_call(slots, requests, before, new, shared, dtype)]
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
            chosen, starts, *sizes = zip(*members[first : first + width], strict=True)
            calls.append(_call(slots, requests[list(chosen)], *sizes, shared, dtype, starts))
    return calls


def _call(
    slots: torch.Tensor,
    requests: torch.Tensor,
    before: Sequence[int],
    new: Sequence[int],
    shared: int,
    dtype: torch.dtype,
    starts: Sequence[int] | None = None,
) -> Call:
    """Make a call. starts: index of each request's first query in the pass; None if one call is enough."""
    size, count, device = len(before), max(new), slots.device
    length = max(map(sum, zip(before, new, strict=True)))
    fold = shared if count <= FEW else 1
    if size == count == 1 and starts is None:
        return Call(1, 1, fold, slots[requests, :length].flatten(), None)
    old, at = torch.tensor(before, device=device).view(-1, 1), torch.arange(length, device=device)
    step = at[:count]
    rows = real = None
    if starts is not None:
        more = torch.tensor(new, device=device).view(-1, 1)
        real = step < more
        rows = torch.tensor(starts, device=device).view(-1, 1) + torch.where(real, step, 0)
        last, real = old + more - 1, None if min(new) == count else real
    else:
        last = old + (count - 1)
    if size == 1:
        places = slots[requests, :length]
    else:  # after the end of a context, a row has slots of other requests
        places = slots[requests.long().view(-1, 1), torch.minimum(at, last)]
    places = places.reshape(-1)
    if count == 1 and min(before) == max(before):
        return Call(size, count, fold, places, None, rows, real)
    sees = old + step if real is None else torch.minimum(old + step, last)
    hidden = torch.zeros(size, count, fold, length, dtype=dtype, device=device)
    hidden.masked_fill_(at > sees.view(size, count, 1, 1), float("-inf"))
    return Call(size, count, fold, places, hidden.view(size, 1, count * fold, length), rows, real)
