"""Latent attention over a cache of latent vectors: keys and values of the heads are never computed.

The cache of a token is c (normed) and its rotated key k_R. For DeepSeek-V3 these are 576 numbers a layer; the
keys and values of all heads would be 128 * (192 + 128). With W_kb and W_vb of head i (DeepSeek-V2,
arXiv:2405.04434, 2.1.2):

    q_i . k_i = q_C . W_kb c + q_R . k_R = (W_kb^T q_C) . c + q_R . k_R        o_i = W_vb (sum_t p_t c_t)

So all heads read one key, which without its last `rotary` numbers is also their value. The price is more
arithmetic: a score takes kv_rank + rotary products instead of plain + rotary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from rlpipe.models import Architecture
from rlpipe.rollout.embedded.linear import Linear

Get = Callable[[str], torch.Tensor]


class LatentProjection:
    """Hidden states [N, H] -> queries of all heads, then the key that is cached: [N, heads + 1, d]."""

    def __init__(self, arch: Architecture, get: Get, prefix: str) -> None:
        """Read the weights. get: returns a weight by its HF name. prefix: prefix of the names of weights."""
        latent = self._latent = arch.latent
        self._heads = arch.heads
        shared = get(f"{prefix}kv_a_proj_with_mqa.weight")
        query = get(f"{prefix}{'q_b_proj' if latent.query_rank else 'q_proj'}.weight")

        # The engine rotates pairs of neighbouring channels; reorder checkpoints that rotate halves.
        if not latent.interleaved:
            half = latent.rotary // 2
            pairs = torch.stack((torch.arange(half), torch.arange(half) + half), 1).flatten()
            order = torch.cat((torch.arange(latent.plain), latent.plain + pairs)).to(query.device)
            query = query.unflatten(0, (arch.heads, -1))[:, order].flatten(0, 1)
            order = torch.cat((torch.arange(latent.kv_rank), latent.kv_rank + pairs)).to(query.device)
            shared = shared[order]

        self._query = Linear(query)
        if latent.query_rank:
            self._query_norm = get(f"{prefix}q_a_layernorm.weight")
            shared = torch.cat((get(f"{prefix}q_a_proj.weight"), shared))

        self._down = Linear(shared)
        self._norm = get(f"{prefix}kv_a_layernorm.weight")
        self._absorbed = _by_head(arch, get, prefix)[:, : latent.plain].contiguous()

    def __call__(self, hidden: torch.Tensor, rotate: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Project [N, H] -> [N, heads + 1, kv_rank + rotary]. rotate: applies RoPE to [N, heads, rotary]."""
        latent, heads, eps = self._latent, self._heads, self._latent.norm_eps
        compressed, shared, turned = self._down(hidden).split(
            [latent.query_rank, latent.kv_rank, latent.rotary], -1
        )

        if latent.query_rank:
            hidden = F.rms_norm(compressed, (latent.query_rank,), self._query_norm, eps)
        query = self._query(hidden).unflatten(-1, (heads, -1))

        # The queries of all heads, with W_kb absorbed, and the one key are written to a single tensor.
        made = query.new_empty(len(query), heads + 1, latent.kv_rank + latent.rotary)
        plain, rotary = query.split([latent.plain, latent.rotary], -1)
        made[:, :heads, : latent.kv_rank] = torch.bmm(plain.transpose(0, 1), self._absorbed).transpose(0, 1)
        made[:, :heads, latent.kv_rank :] = rotary

        made[:, heads, : latent.kv_rank] = F.rms_norm(shared, (latent.kv_rank,), self._norm, eps)
        made[:, heads, latent.kv_rank :] = turned
        rotate(made[..., latent.kv_rank :])
        return made


class LatentOutput:
    """Output projection: attention over cached keys [N, heads * d] -> [N, H]."""

    def __init__(self, arch: Architecture, get: Get, prefix: str) -> None:
        """Read the weights. get: returns a weight by its HF name. prefix: prefix of the names of weights."""
        self._heads, self._rank = arch.heads, arch.latent.kv_rank
        self._values = _by_head(arch, get, prefix)[:, arch.latent.plain :].transpose(1, 2).contiguous()
        self._output = Linear(get(f"{prefix}o_proj.weight"))

    def __call__(self, attended: torch.Tensor) -> torch.Tensor:
        """Multiply by W_vb and the output weights: [N, heads * (kv_rank + rotary)] -> [N, H]."""
        mixed = attended.unflatten(-1, (self._heads, -1))[..., : self._rank].transpose(0, 1)
        return self._output(torch.bmm(mixed, self._values).transpose(0, 1).flatten(1))


def _by_head(arch: Architecture, get: Get, prefix: str) -> torch.Tensor:
    """Return, for each head, the rows of W_kb, then those of W_vb: [heads, plain + value, kv_rank]."""
    return get(f"{prefix}kv_b_proj.weight").unflatten(0, (arch.heads, -1))
