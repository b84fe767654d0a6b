"""What PPOW must find for one window, recomputed from plain forward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlpipe.drafts.windows.reward import window_reward

ReadTarget = Callable[[Tensor], tuple[Tensor, Tensor]]  # tokens [T] -> hidden states, logprobs [T, V]


def greedy_logprob(target: ReadTarget, known: Tensor, depths: int) -> Tensor:
    """Sum of the target's logprobs along its own greedy window after `known`."""
    follow, found = known, torch.zeros(())
    for _ in range(depths):
        _, log_p = target(follow)
        found = found + log_p[-1].max()
        follow = torch.cat((follow, log_p[-1:].argmax(-1)))
    return found


def check_verdict(
    judged: Any,
    at: tuple[int, int],
    drafts: Tensor,
    q: Tensor,
    p: Tensor,
    coins: Tensor,
    reference: Tensor,
    rules: dict[str, float],
) -> None:
    """Drafts [K] with logprobs q, p [K, V] and coins [K]: how many are accepted, and what they earn."""
    chosen = drafts[:, None]
    ratio = (p.gather(1, chosen) - q.gather(1, chosen)).exp()[:, 0]
    kept = (coins < ratio).int().cumprod(0).sum()
    assert judged.num_accepted[at] == kept
    reward = window_reward(kept, reference - p.gather(1, chosen).sum(), **rules)
    assert judged.rewards[at].item() == pytest.approx(reward.item(), abs=1e-6)
