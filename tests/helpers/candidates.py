"""Rollouts that carry their distribution, for OBRS: not the logprob of each sampled token alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rlpipe.types import Group, Trajectory


def tell_candidates(
    groups: Sequence[Group], count: int, rollout: Callable[[Trajectory], torch.Tensor]
) -> None:
    """Give every sampled token its logprob under the rollout and the rollout's `count` most likely tokens.

    rollout: log q [T, V] of a trajectory, row t the distribution of token t (row 0 is not read).
    """
    for trajectory in (t for group in groups for t in group.trajectories):
        log_q = rollout(trajectory)
        trajectory.top_logprobs = [[] for _ in trajectory.token_ids]
        for place, sampled in enumerate(trajectory.loss_mask.tolist()):
            if sampled:
                best = log_q[place].topk(count)
                trajectory.rollout_logprobs[place] = log_q[place, trajectory.token_ids[place]].item()
                trajectory.top_logprobs[place] = list(
                    zip(best.indices.tolist(), best.values.tolist(), strict=True)
                )


def policy_logprobs(model: torch.nn.Module, trajectory: Trajectory, temperature: float = 1.0) -> torch.Tensor:
    """log p [T, V] of a Hugging Face model; row 0, which nothing precedes, is uniform."""
    logits = model(torch.tensor([trajectory.token_ids.tolist()])).logits[0] / temperature
    return torch.cat([torch.zeros_like(logits[:1]), logits[:-1]]).log_softmax(-1)


def noisy(log_p: torch.Tensor, scale: float, seed: int = 0) -> torch.Tensor:
    """A rollout near the policy: normal noise of standard deviation `scale` in the logits."""
    generator = torch.Generator().manual_seed(seed)
    return (log_p + scale * torch.randn(log_p.shape, generator=generator)).log_softmax(-1)
