"""Verification of a chain of drafts in torch, with the signatures of SGLang's CUDA and Triton kernels.

`chain_speculative_sampling` is speculative sampling (Leviathan et al., arXiv:2211.17192, Algorithm 1):
draft x is accepted if u * q(x) < p(x), else the token is sampled from max(p - q, 0). Target-only verification
accepts x if u < p(x), else it samples from p without x. With both, emitted tokens have exactly the
distribution p. n is gamma + 1 throughout.

    candidates [B, n] int64, column 0 is the last token before the drafts
    target_probs [B, n, V], draft_probs [B, n - 1 or n, V] float32
    uniform_samples [B, >= n - 1], uniform_samples_for_final_sampling [B], in [0, 1)
    predicts [B * n] int32, accept_index [B, n] int32, accept_token_num [B] int32: written in place
"""

from __future__ import annotations

import torch


def chain_speculative_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool,
    *,
    block_verification: bool = False,
) -> None:
    """Verify a chain by rejection sampling. Thresholds are ignored, as in SGLang's kernel."""
    if block_verification:
        raise NotImplementedError("block verification needs SGLang's CUDA kernel")
    p, q = _of_drafts(target_probs, candidates), _of_drafts(draft_probs, candidates)
    kept = (q > 0) & (q <= 1) & (uniform_samples[:, : p.shape[1]] * q < p)
    accepted = kept.int().cumprod(1).sum(1)
    rows = torch.arange(len(candidates))
    last = accepted == p.shape[1]
    rejected_by = draft_probs[rows, accepted.clamp(max=draft_probs.shape[1] - 1)]
    residual = (target_probs[rows, accepted] - rejected_by.nan_to_num(0.0)).clamp_min(0)
    weights = torch.where(last[:, None], target_probs[rows, accepted], residual)
    final = _draw(weights, uniform_samples_for_final_sampling)
    _commit(predicts, accept_index, accept_token_num, candidates, retrive_index, accepted, final)


def chain_target_only_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Verify a chain by the target-only rule; lossless with thresholds of 1, SGLang's default."""
    p = _of_drafts(target_probs, candidates)
    kept = (uniform_samples[:, : p.shape[1]] < p / threshold_acc) | (p >= threshold_single)
    accepted = kept.int().cumprod(1).sum(1)
    rows = torch.arange(len(candidates))
    weights = target_probs[rows, accepted].clone()
    rejected = accepted < p.shape[1]
    weights[rows[rejected], candidates[rows[rejected], accepted[rejected] + 1]] = 0.0
    final = _draw(weights, uniform_samples_for_final_sampling)
    _commit(predicts, accept_index, accept_token_num, candidates, retrive_index, accepted, final)


def top_k_renorm(probs: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Zero all but the top_k[i] largest entries of row i of `probs` [B, V] and renormalize."""
    ordered, ids = probs.sort(-1, descending=True)
    ordered[torch.arange(probs.shape[-1]) >= top_k[:, None]] = 0.0
    kept = torch.zeros_like(probs).scatter_(-1, ids, ordered)
    return kept / kept.sum(-1, keepdim=True)


def _of_drafts(probs: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """Return the probability of each draft token in its row, [B, n - 1]."""
    drafts = candidates[:, 1:].long()
    return probs[:, : drafts.shape[1]].gather(-1, drafts.unsqueeze(-1)).squeeze(-1)


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample tokens [B] from unnormalized weights [B, V]; for a row of zeros, return the last token."""
    cumulative = weights.double().cumsum(-1)
    below = cumulative <= uniforms[:, None].double() * cumulative[:, -1:]
    return below.sum(-1).clamp(max=weights.shape[-1] - 1)


def _commit(predicts, accept_index, accept_token_num, candidates, retrive_index, accepted, final) -> None:
    """Write each sequence's accepted drafts, then its final token, to the tensors that SGLang reads."""
    for row, count in enumerate(accepted.tolist()):
        places = retrive_index[row, : count + 1].long()
        accept_index[row, : count + 1] = places.to(accept_index.dtype)
        predicts[places[:-1]] = candidates[row, 1 : count + 1].to(predicts.dtype)
        predicts[places[-1]] = final[row].to(predicts.dtype)
    accept_token_num.copy_(accepted)
