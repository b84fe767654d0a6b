"""A step on windows, the same for every drafter and objective: they are drawn, drafted, judged and compared.

    Q and P along given text  criticality -> W anchors t, ppow.windows a trajectory
    drafts 1..K               G windows from each anchor: the only sampling; the gradient flows through here
    P after every draft       no gradient
    P along a greedy window   from each anchor, where R_dist counts

An anchor t knows token t + 1 and drafts t + 2 .. t + K + 1, as in a verify step of the engine. Owns the
randomness, the order of the passes and the verdict; the passes are a `WindowDrafter`'s (`trainer.ppow` for an
MTP layer, `drafts.windows.eagle3` for an EAGLE-3 draft), verification `rlpipe.spec.verify`'s, the loss
`drafts.objectives.windows`'.

Nothing is random but what (seed, step, trajectory) gives: windows, drafts and coins depend on no cut into
micro-batches or ranks.
"""

from __future__ import annotations

import numpy as np
import torch

from rlpipe.config.draft_objectives import DraftObjective
from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.loss import depth_targets
from rlpipe.drafts.objectives.windows import LOSSES
from rlpipe.drafts.windows.reward import expected_reward, proximity_gap, window_reward
from rlpipe.drafts.windows.rollout import Drawn, Judged, Rollout, WindowDrafter, logprobs_of
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
        """Sum over drafts of the loss, which trains the drafter alone, and totals; step: updates so far.

        None where no turn is long enough for a window.
        """
        found = self.rollout(text, step)
        return None if found is None else self._loss(found, self.hard_share(step), self._config)

    def hard_share(self, step: int) -> float:
        """Share of windows drawn by their score in the update after `step` others."""
        return hard_share(step, self._steps, self._config.hard_start, self._config.hard_end)

    def rollout(self, text: WindowDrafter, step: int) -> Rollout | None:
        """Windows, drafted and judged; None where no turn is long enough for one."""
        turns = torch.from_numpy(text.turns), torch.from_numpy(text.sampled)
        whole = depth_targets(*turns, self._depths).mask[:, -1].view(text.turns.shape)
        if not whole.any():
            return None
        with torch.no_grad():
            scores = window_scores(text.criticality(), self._depths).cpu()
        drawn = self._drawn(text, scores, whole, step)
        device = text.start(drawn, self._config.group_size)
        uniforms = drawn.draft_uniforms.to(device)
        tokens: list[torch.Tensor] = []
        logprobs: list[torch.Tensor] = []
        for depth in range(self._depths):
            logprobs.append(text.draft(tokens[-1] if depth else None))
            tokens.append(_sampled(logprobs[-1], uniforms[..., depth]))
        drafts, log_q = torch.stack(tokens, 2), torch.stack(logprobs, 2)
        with torch.no_grad():
            judged = self._judged(text, drafts, log_q.detach(), drawn.coins.to(device))
        return Rollout(text=text, drawn=drawn, tokens=drafts, logprobs=log_q, judged=judged)

    def _drawn(self, text: WindowDrafter, scores: torch.Tensor, whole: torch.Tensor, step: int) -> Drawn:
        """`ppow.windows` windows of each trajectory that has any.

        scores: [R, S >= 1] of the window at each anchor. whole: [R, >= S] bool, all drafts of the window lie
        within the turn; some do. On the CPU.
        """
        config, cells, owned, chosen, uniforms = self._config, [], [], [], []
        for owner in np.unique(text.owners):
            mine = whole[:, : scores.shape[1]] & torch.from_numpy(text.owners == owner)[:, None]
            if not mine.any():
                continue
            generator = _generator(self._seed, step, int(text.rows[owner]))
            drawn = sample_windows(scores[mine], config.windows, self.hard_share(step), generator)
            cells.append(mine.nonzero()[drawn].numpy())
            owned += [owner] * len(drawn)
            chosen.append(scores[mine][drawn])
            size = (2, len(drawn), config.group_size, self._depths)
            uniforms.append(torch.rand(size, generator=generator, dtype=torch.float64))
        turns, columns = np.concatenate(cells).T
        draft_uniforms, coins = torch.cat(uniforms, 1)
        return Drawn(
            owners=np.array(owned),
            turns=turns,
            columns=columns,
            scores=torch.cat(chosen),
            draft_uniforms=draft_uniforms,
            coins=coins,
        )

    def _judged(
        self, text: WindowDrafter, tokens: torch.Tensor, log_q: torch.Tensor, coins: torch.Tensor
    ) -> Judged:
        """Verification of the windows, and what they earn."""
        config, first = self._config, text.first()
        log_p = torch.cat((first[:, None, None].expand(-1, tokens.shape[1], -1, -1), text.read(tokens)), 2)
        verdict = verify_chain(
            tokens.flatten(0, 1),
            log_q.flatten(0, 1).exp(),
            log_p.flatten(0, 1).exp(),
            coins.flatten(0, 1),
            torch.zeros_like(coins[..., 0]).flatten(),  # what follows the window is not asked for
        )
        accepted = verdict.num_accepted.view(tokens.shape[:2])
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
        return Judged(logprobs=log_p[:, :, :-1], num_accepted=accepted, rewards=rewards, close=close)


def _sampled(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """A token of each distribution, [W, G, V] and [W, G] -> [W, G]."""
    probs = logprobs.detach().flatten(0, 1).exp()
    return sample_cdf(probs, uniforms.flatten()).view_as(uniforms)


def _generator(seed: int, step: int, row: int) -> torch.Generator:
    """What is random about a trajectory's windows in a step."""
    state = np.random.SeedSequence((seed % 2**64, step, row)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))
