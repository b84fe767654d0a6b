"""A step on windows, the same for every drafter and objective: sample, draft, verify and compare.

    Q and P along given text  criticality -> W anchors t, ppow.windows a trajectory
    drafts 1..K               G windows from each anchor: the only sampling; the gradient flows through here
    P after every draft       no gradient
    P along a greedy window   from each anchor, where R_dist counts

An anchor t knows token t + 1 and drafts t + 2 .. t + K + 1, as in a verify step of the engine. Owns the
randomness, the order of the passes and the rewards. A `WindowDrafter` runs the passes (`trainer.ppow` for an
MTP layer, `drafts.windows.eagle3` for an EAGLE-3 draft). Verification is in `rlpipe.spec.verify`, the loss in
`drafts.objectives.windows`.

All randomness comes from (seed, step, trajectory), so windows, drafts and coins do not depend on how
trajectories are divided into micro-batches and ranks.

Distributions exist for a part of the windows at a time (`rollout.window_parts`): while tokens are sampled,
while they are verified, and in the loss, which is checkpointed. So memory for distributions is at most a
small multiple of `PART_BYTES`, or of one window's G K V numbers if these are more. For all windows, only
states [W, G, K, H] and tokens are stored.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import reduce
from operator import add

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from rlpipe.config.draft_objectives import DraftObjective
from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.loss import depth_targets
from rlpipe.drafts.objectives.windows import LOSSES
from rlpipe.drafts.windows.reward import proximity_gap
from rlpipe.drafts.windows.rollout import (
    Drafts,
    Rollout,
    SampledWindows,
    Verified,
    WindowDrafter,
    logprobs_of,
    window_parts,
)
from rlpipe.drafts.windows.selection import hard_share, sample_windows, window_scores
from rlpipe.drafts.windows.totals import PpowTotals
from rlpipe.spec.sampling import sample_cdf


class WindowTraining:
    """An objective on windows, with its settings.

    depths: drafts of a window, K. steps: updates of the run; the curriculum ends with the last one.
    """

    def __init__(
        self, config: PpowConfig, objective: DraftObjective, *, depths: int, steps: int, seed: int
    ) -> None:
        self._config, self._objective = config, LOSSES[objective]
        self._depths, self._steps, self._seed = depths, steps, seed

    def loss(self, text: WindowDrafter, step: int) -> tuple[torch.Tensor, PpowTotals] | None:
        """Compute the loss summed over drafts, and totals. The loss trains only the drafter.

        step: updates so far. Returns None where no turn is long enough for a window.
        """
        rollout = self.rollout(text, step)
        if rollout is None:
            return None
        hard, parts = self.hard_share(step), rollout.parts()
        if len(parts) == 1:
            return self._objective.loss(rollout, hard, self._config)

        # The distributions of a part are freed after its loss, and computed again for its gradient.
        def run(part: Rollout, *states: torch.Tensor) -> tuple[torch.Tensor, PpowTotals]:
            return self._objective.loss(replace(part, states=states), hard, self._config)

        losses = [
            checkpoint(run, part, *part.states, use_reentrant=False, preserve_rng_state=False)
            for part in map(rollout.part, parts)
        ]
        totals, sums = zip(*losses, strict=True)
        return torch.stack(totals).sum(), reduce(add, sums)

    def hard_share(self, step: int) -> float:
        """Return the share of windows that are sampled by score, after `step` updates."""
        config = self._config
        return hard_share(
            step, self._steps, start=config.hard_start, end=config.hard_end, after=config.hard_after
        )

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
        states: list[torch.Tensor] = []
        for depth in range(self._depths):
            states.append(text.draft(tokens[-1] if depth else None))
            tokens.append(_sampled(text, states[-1].detach(), uniforms[..., depth], depths=self._depths))

        stacked = torch.stack(tokens, 2)
        with torch.no_grad():
            drafts = Drafts(
                text=text,
                windows=windows,
                tokens=stacked,
                states=states,
                first=text.first(),
                read=text.read(stacked),
                draft_cost=self._config.draft_cost or text.draft_cost,
            )
            verified = self._verify(drafts)
        return Rollout(**{f.name: getattr(drafts, f.name) for f in fields(Drafts)}, verified=verified)

    def _sample(
        self, text: WindowDrafter, scores: torch.Tensor, *, complete: torch.Tensor, step: int
    ) -> SampledWindows:
        """Sample `ppow.windows` windows from each trajectory that has a complete one.

        scores: [R, S >= 1], the score of the window at each anchor. complete: [R, >= S] bool, whether all
        drafts of the window are within the turn; at least one window is complete. Tensors are on the CPU.
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

    def _verify(self, drafts: Drafts) -> Verified:
        """Verify the drafts of the windows, and compute their rewards."""
        config, objective = self._config, self._objective
        compares = objective.proximity and config.proximity > 0
        greedy = self._greedy_logprobs(drafts) if compares else None

        parts = []
        for rows in drafts.parts():
            part = drafts.part(rows)
            log_p, tokens = part.target_logprobs, part.tokens
            coins = part.windows.coins.to(tokens.device)
            verdict = objective.verify(
                tokens.flatten(0, 1),
                part.logprobs.flatten(0, 1).exp(),
                log_p.flatten(0, 1).exp(),
                coins.flatten(0, 1),
                torch.zeros_like(coins[..., 0]).flatten(),  # the token after the window is not used
            )
            accepted = verdict.num_accepted.view(tokens.shape[:2])

            # R_dist compares the drafts with the target's greedy window.
            gap = torch.zeros_like(accepted, dtype=torch.float32)
            if greedy is not None:
                gap = proximity_gap(greedy[rows][:, None], logprobs_of(log_p[:, :, :-1], tokens))

            rewards = objective.reward(
                accepted,
                verdict.accept_prob.view_as(tokens),
                gap,
                draft_cost=drafts.draft_cost,
                config=config,
            )
            close = (accepted == 0) & (gap < config.tolerance) & compares
            parts.append((accepted, rewards, gap, close))

        accepted, rewards, gap, close = (torch.cat(values) for values in zip(*parts, strict=True))
        return Verified(num_accepted=accepted, rewards=rewards, gap=gap, close=close)

    def _greedy_logprobs(self, drafts: Drafts) -> torch.Tensor:
        """Compute the target's log-probabilities [W, K] of its greedy window."""
        text, states, best = drafts.text, drafts.first, []
        for depth in range(self._depths):
            largest, token = text.target_logprobs(states).max(-1)
            best.append(largest)
            if depth + 1 < self._depths:
                states = text.greedy(token)
        return torch.stack(best, 1)


@torch.no_grad()
def _sampled(
    text: WindowDrafter, states: torch.Tensor, uniforms: torch.Tensor, *, depths: int
) -> torch.Tensor:
    """Sample a token after each state: [W, G or 1, H] and uniforms [W, G] -> [W, G].

    depths: K. Windows are processed in the parts that `window_parts` returns.
    """
    tokens = []
    windows, group = uniforms.shape
    for rows in window_parts(windows, group, depths, vocab=text.vocab, device=states.device):
        logprobs = text.draft_logprobs(states[rows]).expand(*uniforms[rows].shape, -1)
        tokens.append(sample_cdf(logprobs.flatten(0, 1).exp(), uniforms[rows].flatten()))
    return torch.cat(tokens).view_as(uniforms)


def _generator(seed: int, step: int, row: int) -> torch.Generator:
    """Return the random generator for one trajectory's windows in one step."""
    state = np.random.SeedSequence((seed % 2**64, step, row)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))
