"""Replaces `sgl_kernel`: torch versions of the CPU operations that decoding with a chain of drafts calls.

The published wheel contains CUDA code. SGLang imports many names from it on any device. The functions that a
dense text model on a CPU really calls are implemented here, in torch; every other name raises when it is
called. Shapes: B sequences, n = gamma + 1 tokens of a verify step. Outputs are written in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def __getattr__(name: str) -> Callable:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_, **__):
        raise NotImplementedError(
            f"sgl_kernel.{name} is not part of rlpipe's CPU support: serve this model on a GPU"
        )

    missing.__name__ = name
    return missing


def assign_req_to_token_pool_cpu(req_pool, req_to_token, start, end, out_cache_loc, pool_len) -> None:
    """Write newly allocated cache slots into each request's row: positions start[i]..end[i] - 1."""
    taken = 0
    for row, first, last in zip(req_pool.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        req_to_token[row, first:last] = out_cache_loc[taken : taken + count].to(req_to_token.dtype)
        taken += count


def assign_extend_cache_locs_cpu(req_pool, req_to_token, start, end, out_cache_loc, pool_len) -> None:
    """Read the slots of positions start[i]..end[i] - 1 of each request, one request after the other."""
    taken = 0
    for row, first, last in zip(req_pool.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        out_cache_loc[taken : taken + count] = req_to_token[row, first:last].to(out_cache_loc.dtype)
        taken += count


def assign_draft_cache_locs_contiguous_cpu(
    req_pool, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
) -> None:
    """Read the slots that the draft steps will write: topk * num_steps after the end of each sequence."""
    count = topk * num_steps
    for i, (row, first) in enumerate(zip(req_pool.tolist(), seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, first : first + count]
        out_cache_loc[i * count : (i + 1) * count] = slots.to(out_cache_loc.dtype)


def build_tree_kernel_efficient_cpu(
    parents, selected, seq_lens, mask, positions, index, next_token, next_sibling, topk, depth, n, mode
) -> None:
    """Describe a chain as a tree: token i follows token i - 1, no siblings, causal mask [B, n, n]."""
    if topk != 1 or mode != 1:
        raise NotImplementedError(f"the CPU builds chains only, got topk={topk} and mask mode {mode}")
    batch, steps = seq_lens.numel(), torch.arange(n)
    positions.view(batch, n).copy_(seq_lens[:, None] + steps)
    index.view(batch, n).copy_(torch.arange(batch * n).view(batch, n))
    following = torch.where(steps < n - 1, steps + 1, -1)
    next_token.view(batch, n).copy_(following.expand(batch, n))
    next_sibling.view(batch, n).fill_(-1)
    mask.view(-1)[: batch * n * n].view(batch, n, n).copy_(torch.ones(n, n, dtype=torch.bool).tril())


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
) -> None:
    """Accept drafts while each is the target's argmax; target_predict: [B, n] or flat. Names: SGLang's."""
    batch, n = candidates.shape
    best = target_predict.view(batch, n)
    accepted = (candidates[:, 1:] == best[:, :-1]).int().cumprod(1).sum(1)
    for row, count in enumerate(accepted.tolist()):
        places = retrive_index[row, : count + 1].long()
        accept_index[row, : count + 1] = places.to(accept_index.dtype)
        predicts[places] = best[row, : count + 1].to(predicts.dtype)
    accept_token_num.copy_(accepted)


def fill_bonus_tokens_cpu(tokens, accept_lens, out, stride) -> None:
    """Write the last accepted token of each sequence: tokens [B, stride]; accept_lens [B] includes it."""
    rows = torch.arange(accept_lens.numel())
    out.copy_(tokens.view(-1)[stride * rows + accept_lens.long() - 1])


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, out, size=None) -> None:
    """Write the cache slots of accepted tokens, in order; accept_index: -1 marks a rejected one."""
    kept = accept_index.view(-1)
    kept = kept[kept >= 0].long()
    out[: kept.numel()] = out_cache_loc[kept]


def rotate_input_ids_cpu(input_ids, start, lengths, topk_index, select_index=None) -> None:
    """Shift each sequence's ids left by one and write its next token at the end (or at select_index)."""
    for i, (first, length) in enumerate(zip(start.tolist(), lengths.tolist(), strict=True)):
        if not length:
            continue
        input_ids[first : first + length - 1] = input_ids[first + 1 : first + length].clone()
        place = first + length - 1 if select_index is None else int(select_index[i])
        input_ids[place] = topk_index.view(-1)[i]


def copy_all_layer_kv_cache_cpu(*_, **__) -> None:
    """Do nothing: in a chain, the cache entries of accepted tokens are already adjacent."""
