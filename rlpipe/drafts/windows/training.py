"""A step on windows, the same for every drafter and objective: sample, draft, verify and compare.

    Q and P along given text  criticality -> W anchors t, ppow.windows a trajectory
    drafts 1..K               G windows from each anchor: the only sampling; the gradient flows through here
    P after every draft       no gradient
    P along a greedy window   from each anchor, where R_dist counts

An anchor t knows token t + 1 and drafts t + 2 .. t + K + 1, as in a verify step of the engine. Owns the
randomness, the order of the passes and the rewards; the passes are a `WindowDrafter`'s (`trainer.ppow` for an
MTP layer, `drafts.windows.eagle3` for an EAGLE-3 draft), verification `rlpipe.spec.verify`'s, the loss
`drafts.objectives.windows`'.

All randomness comes from (seed, step, trajectory), so windows, drafts and coins do not depend on how
trajectories are divided into micro-batches and ranks.
"""

from __future__ import annotations

import numpy as np
import torch

from rlpipe.config.draft_objectives import DraftObjective
from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.loss import depth_targets
from rlpipe.drafts.objectives.windows import LOSSES
from rlpipe.drafts.windows.reward import expected_reward, proximity_gap, window_reward
from rlpipe.drafts.windows.rollout import Rollout, SampledWindows, Verified, WindowDrafter, logprobs_of
from rlpipe.drafts.windows.selection import hard_share, sample_windows, window_scores
from rlpipe.drafts.windows.totals import PpowTotals
from rlpipe.spec.sampling import sample_cdf
from rlpipe.spec.verify import verify_chain


class WindowTraining:
    """An objective on windows with its settings.

    depths: drafts of a window, K. steps: updates of the run; the curriculum ends there.
    """

    def __init__(
        self, config: PpowConfig, objective: DraftObjective, *, depths: int, steps: int, seed: int
    ) -> None:
        self._config, self._loss = config, LOSSES[objective]
        self._depths, self._steps, self._seed = depths, steps, seed

    def loss(self, text: WindowDrafter, step: int) -> tuple[torch.Tensor, PpowTotals] | None:
        """Compute the sum over drafts of the loss, which trains the drafter only, and totals.

        step: updates so far. Returns None where no turn is long enough for a window.
        """
        rollout = self.rollout(text, step)
        return None if rollout is None else self._loss(rollout, self.hard_share(step), self._config)

    def hard_share(self, step: int) -> float:
        """Return the share of windows sampled by their score in the update after `step` others."""
        return hard_share(step, self._steps, start=self._config.hard_start, end=self._config.hard_end)

    def rollout(self, text: WindowDrafter, step: int) -> Rollout | None:
        """Sample windows, draft and verify; None where no turn is long enough for a window."""
        turns = torch.from_numpy(text.turns), torch.from_numpy(text.sampled)
        complete = depth_targets(*turns, self._depths).mask[:, -1].view(text.turns.shape)
        if not complete.any():
            return None

        with torch.no_grad():
            scores = window_scores(text.criticality(), self._depths).cpu()
        windows = self._sample(text, scores, complete=complete, step=step)

        # Draft K tokens from each window: the only passes with a graph.
        device = text.start(windows, self._config.group_size)
        uniforms = windows.draft_uniforms.to(device)
        tokens: list[torch.Tensor] = []
        logprobs: list[torch.Tensor] = []
        for depth in range(self._depths):
            logprobs.append(text.draft(tokens[-1] if depth else None))
            tokens.append(_sampled(logprobs[-1], uniforms[..., depth]))
        drafts, log_q = torch.stack(tokens, 2), torch.stack(logprobs, 2)

        with torch.no_grad():
            verified = self._verify(text, drafts, log_q.detach(), coins=windows.coins.to(device))
        return Rollout(text=text, windows=windows, tokens=drafts, logprobs=log_q, verified=verified)

    def _sample(
        self, text: WindowDrafter, scores: torch.Tensor, *, complete: torch.Tensor, step: int
    ) -> SampledWindows:
        """Sample `ppow.windows` windows of each trajectory that has any.

        scores: [R, S >= 1] of the window at each anchor. complete: [R, >= S] bool, whether all drafts of the
        window are within the turn; some are. On the CPU.
        """
        config, indices, owners, chosen, uniforms = self._config, [], [], [], []
        for owner in np.unique(text.owners):
            candidates = complete[:, : scores.shape[1]] & torch.from_numpy(text.owners == owner)[:, None]
            if not candidates.any():
                continue

            generator = _generator(self._seed, step, int(text.rows[owner]))
            candidate_scores, hard = scores[candidates], self.hard_share(step)
            picks = sample_windows(candidate_scores, config.windows, hard, generator=generator)
            indices.append(candidates.nonzero()[picks].numpy())
            owners += [owner] * len(picks)
            chosen.append(candidate_scores[picks])
            size = (2, len(picks), config.group_size, self._depths)
            uniforms.append(torch.rand(size, generator=generator, dtype=torch.float64))

        turns, columns = np.concatenate(indices).T
        draft_uniforms, coins = torch.cat(uniforms, 1)
        return SampledWindows(
            owners=np.array(owners),
            turns=turns,
            columns=columns,
            scores=torch.cat(chosen),
            draft_uniforms=draft_uniforms,
            coins=coins,
        )

    def _verify(
        self, text: WindowDrafter, tokens: torch.Tensor, log_q: torch.Tensor, *, coins: torch.Tensor
    ) -> Verified:
        """Verify the drafts of the windows by rejection, and compute their rewards."""
        config, first = self._config, text.first()
        log_p = torch.cat((first[:, None, None].expand(-1, tokens.shape[1], -1, -1), text.read(tokens)), 2)

        verdict = verify_chain(
            tokens.flatten(0, 1),
            log_q.flatten(0, 1).exp(),
            log_p.flatten(0, 1).exp(),
            coins.flatten(0, 1),
            torch.zeros_like(coins[..., 0]).flatten(),  # the token after the window is not used
        )
        accepted = verdict.num_accepted.view(tokens.shape[:2])

        # R_dist compares the drafts with the window that the target would write greedily.
        gap = torch.zeros_like(accepted, dtype=torch.float32)
        if config.proximity:
            largest, token = first.max(-1)
            best = [largest]
            for _ in range(1, self._depths):
                largest, token = text.greedy(token).max(-1)
                best.append(largest)
            gap = proximity_gap(torch.stack(best, 1)[:, None], logprobs_of(log_p[:, :, :-1], tokens))

        cost = config.draft_cost or text.draft_cost
        rules = {"draft_cost": cost, "proximity": config.proximity, "tolerance": config.tolerance}
        if config.expected_reward:
            rewards = expected_reward(verdict.accept_prob.view_as(tokens), gap, **rules)
        else:
            rewards = window_reward(accepted, gap, **rules)
        close = (accepted == 0) & (gap < config.tolerance) & (config.proximity > 0)

        return Verified(logprobs=log_p[:, :, :-1], num_accepted=accepted, rewards=rewards, close=close)


def _sampled(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample a token of each distribution: [W, G, V] and [W, G] -> [W, G]."""
    probs = logprobs.detach().flatten(0, 1).exp()
    return sample_cdf(probs, uniforms.flatten()).view_as(uniforms)


def _generator(seed: int, step: int, row: int) -> torch.Generator:
    """Return the random generator of a trajectory's windows in a step."""
    state = np.random.SeedSequence((seed % 2**64, step, row)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))
