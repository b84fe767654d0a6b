"""Attention of a few new tokens in each row over the row's cached keys.

Owns the choice of kernel, and each kernel's mask. On a CPU, `attend_products` handles a few queries against a
few hundred keys. It makes the query heads that share a key head the rows of one product, so that keys and
values are read once. In float32 two batched products are fastest (25 to 30% less time than
scaled_dot_product_attention, measured at 8 and 32 rows, 100 keys, heads of 32). In bfloat16, where query
heads share key heads, scaled_dot_product_attention over the same rows is used: it takes half the time of the
products at 1 row and the same time at 32 (measured under load, three query heads for each key head). For a
single query per key head the products are faster. All other cases use `attend`, which on a GPU allows only
the memory-efficient kernel.

For each row `attend_products` reads as many keys as the longest row has. One long conversation would make
this expensive for all rows, so the rows are processed in groups of consecutive rows of similar lengths.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

NARROW_QUERIES = 8  # the two products are used on a CPU for up to this many tokens per row
PIECE_ROWS = 4  # rows that are never separated
PIECE_KEYS = 1000  # an additional group costs as much time as reading this many keys of a row

Piece = tuple[int, int, int]  # rows start..stop - 1, and the number of keys read of each


def use_products(width: int, device: torch.device) -> bool:
    """Return whether a pass of `width` tokens per row uses the two batched products."""
    return device.type == "cpu" and width <= NARROW_QUERIES


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute softmax(scale q k^T + mask) v with grouped heads; scale: None for 1 / sqrt(D).

    query: [B, q, heads, D]. keys, values: [B, kv_heads, L, D], views of the cache.
    mask: [B, q, L], 0 or -inf. Returns [B * q, heads * D].
    """
    heads, kv_heads = query.shape[2], keys.shape[1]
    if query.is_cuda:
        return attend_grouped(query, keys, values, mask, scale)

    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        keys,
        values,
        attn_mask=mask.unsqueeze(1),
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return attended.transpose(1, 2).reshape(-1, heads * query.shape[3])


def attend_grouped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute `attend`, with the query heads of a key head treated as further queries of one head.

    No GPU kernel takes both a mask and fewer key heads than query heads: with these torch multiplies matrices
    and stores all scores. So the memory-efficient kernel is called directly, with one head for each key head.
    """
    batch, width, heads = query.shape[:3]
    grouped = query.unflatten(2, (keys.shape[1], -1)).permute(0, 2, 1, 3, 4)  # [B, kv_heads, q, group, D]
    group, length = grouped.shape[3], mask.shape[2]

    # The kernel requires rows of the mask at multiples of 16 bytes.
    bias = F.pad(mask.to(query.dtype).repeat_interleave(group, 1), (0, -length % 8))[..., :length]
    bias = bias.unsqueeze(1).expand(-1, keys.shape[1], -1, -1)
    grouped = grouped.flatten(2, 3)
    if query.device.type == "cpu":
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias, scale=scale)
    else:
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        attended = kernel(grouped, keys, values, bias, False, scale=scale)[0]
    by_head = attended.unflatten(2, (width, group)).permute(0, 2, 1, 3, 4)
    return by_head.reshape(batch * width, heads * values.shape[3])


def pieces_of(contexts: np.ndarray) -> tuple[Piece, ...]:
    """Group consecutive rows so that few unneeded keys are read; contexts: [B], keys that each row needs.

    >>> pieces_of(np.array([900, 880, 910, 905, *[100] * 8]))
    ((0, 4, 910), (4, 12, 100))
    >>> pieces_of(np.array([130, 100, 100, 100, *[100] * 8]))
    ((0, 12, 130),)
    """
    longest = np.maximum.reduceat(contexts, np.arange(0, len(contexts), PIECE_ROWS)).tolist()
    groups: list[Piece] = []
    for index, keys in enumerate(longest):
        start, stop = index * PIECE_ROWS, min((index + 1) * PIECE_ROWS, len(contexts))

        # Join the rows to the group before them if this reads few unneeded keys.
        if groups:
            begin, middle, before = groups[-1]
            more = max(before, keys)
            if (more - before) * (middle - begin) + (more - keys) * (stop - start) <= PIECE_KEYS:
                groups[-1] = (begin, stop, more)
                continue
        groups.append((start, stop, keys))
    return tuple(groups)


def expand_mask(mask: torch.Tensor, kv_heads: int, group: int) -> torch.Tensor:
    """Expand a mask [B, q, L] to [B * kv_heads, q, group, L] for `attend_products`, once per pass."""
    width, length = mask.shape[1:]
    return mask[:, None, :, None].expand(-1, kv_heads, -1, group, -1).reshape(-1, width, group, length)


def attend_products(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    pieces: tuple[Piece, ...],
    scale: float | None = None,
) -> torch.Tensor:
    """Attend with the query heads of a key head as rows of one product; see the module's docstring.

    keys, values: [B * kv_heads, L, D]. mask: from `expand_mask`. Other arguments and the result: see
    `attend`.
    """
    batch, width, heads, dim = query.shape
    merged, _, group, length = mask.shape
    kv_heads = merged // batch

    # The heads that share a key head become rows of one product.
    grouped = query.view(batch, width, -1, group, dim).transpose(1, 2).reshape(merged, width * group, dim)
    mask = mask.reshape(merged, -1, length)
    single = width * group == 1
    kernel = _two_products if single or query.dtype == torch.float32 else _one_kernel
    outputs = []
    for start, stop, seen in pieces:
        rows = slice(start * kv_heads, stop * kv_heads)
        parts = grouped[rows], keys[rows, :seen], values[rows, :seen], mask[rows, :, :seen]
        outputs.append(kernel(*parts, scale=scale or dim**-0.5))

    attended = (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).view(batch, -1, width, group, dim)
    return attended.transpose(1, 2).reshape(batch * width, heads * dim)


def _two_products(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Compute attention [M, n, D] of queries [M, n, D] over keys and values [M, L, D], mask [M, n, L]."""
    scores = torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), values)


def _one_kernel(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Compute the result of `_two_products` with scaled_dot_product_attention."""
    query, keys, values, mask = (x.unsqueeze(1) for x in (query, keys, values, mask))
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale).squeeze(1)
