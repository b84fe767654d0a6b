"""PPOW on a micro-batch: windows are drafted from places of its texts, judged by the target, and compared.

Owns the passes of MTP layer and backbone over a micro-batch and its windows. Which windows, the verdict on
them and the loss are `ppow_windows`', keys of finished passes are `continuation`'s.

    backbone's own pass  -> hidden states, keys         (with or without a gradient: none is taken from it)
    depth 1, all anchors -> Q along the text, keys      criticality -> W anchors t, ppow.windows a trajectory
    depths 2..K          -> G windows from each anchor  the only sampling; the gradient flows through here
    backbone, W G K more -> P after every draft         no gradient
    backbone, W(K - 1)   -> the greedy window from each anchor, where R_dist counts

So a step costs one MTP depth over the texts, and K (G + 1) tokens per window of each model. An anchor t
knows token t + 1 and drafts t + 2 .. t + K + 1, as in a verify step of the engine, and drafts exactly as the
engine does: deeper drafts attend to depth-1 keys of the prefix and to their own (teacher forcing lets them
see the text's further tokens instead, through keys of their depth). Nothing is random but what
(seed, step, trajectory) gives: windows, drafts and coins depend on no cut into micro-batches or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)

from rlpipe.batch import Branch, MicroBatch
from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.chunked import linear_draft_rows
from rlpipe.drafts.draft_batch import DraftBatch, draft_batch, tokens_up_to
from rlpipe.drafts.head import draft_step
from rlpipe.drafts.loss import depth_targets
from rlpipe.drafts.objectives.windows.ppow import loss as windows_loss
from rlpipe.drafts.ppow import PpowTotals, criticality, hard_share, window_scores
from rlpipe.drafts.ppow.step import Judged, draw_windows, judge_windows, sampled
from rlpipe.trainer.continuation import Continuation
from rlpipe.trainer.layers import BranchLayout, Kept
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.runtime import Runtime

MULTIPLE = 32  # as the batcher's: kernels prepared for one number of rows are used again


@dataclass(slots=True, kw_only=True)
class Windows:
    """W anchors, and what is random about the G windows drafted from each.

    owners: [W] row of the micro-batch. anchors: [W] index of t among the draft's anchors. following: [W] that
    of t + 1 in the micro-batch's tokens. draft_prefixes, prefixes: indices of the draft's anchors 0..t, and
    of tokens 0..t + 1. scores: [W]. draft_uniforms, coins: [W, G, K] float64.
    """

    owners: np.ndarray
    anchors: torch.Tensor
    following: torch.Tensor
    draft_prefixes: list[torch.Tensor]
    prefixes: list[torch.Tensor]
    scores: torch.Tensor
    draft_uniforms: torch.Tensor
    coins: torch.Tensor


@dataclass(slots=True, kw_only=True)
class Rollout:
    """Windows, what was drafted, and the verdict.

    tokens: [W, G, K]. logprobs: [W, G, K, V] of the drafter where each was drawn, with a graph.
    """

    windows: Windows
    tokens: torch.Tensor
    logprobs: torch.Tensor
    judged: Judged


class Ppow:
    """The objective of a draft that is trained with PPOW.

    depths: drafts of a window, K. steps: updates of the run; the curriculum ends there.
    """

    def __init__(self, config: PpowConfig, runtime: Runtime, *, depths: int, steps: int, seed: int) -> None:
        self._config, self._runtime = config, runtime
        self._depths, self._steps, self._seed = depths, steps, seed

    def loss(
        self,
        policy: PolicyModel,
        micro: MicroBatch,
        hidden: torch.Tensor,
        kept: Kept,
        temperature: float,
        step: int,
    ) -> tuple[torch.Tensor, PpowTotals]:
        """Sum over drafts of the loss, a scalar that trains the MTP layer alone, and totals.

        hidden: [N, H], kept: states and keys of the backbone's pass over the micro-batch. step: updates so
        far.
        """
        rollout = self.rollout(policy, micro, hidden, kept, temperature, step)
        if rollout is None:
            return torch.zeros((), device=hidden.device), PpowTotals.nothing(hidden.device)
        told = (rollout.logprobs, rollout.tokens, rollout.judged, rollout.windows.scores)
        return windows_loss(*told, self.hard_share(step), self._config)

    def hard_share(self, step: int) -> float:
        """Share of windows drawn by their score in the update after `step` others."""
        return hard_share(step, self._steps, self._config.hard_start, self._config.hard_end)

    def rollout(
        self,
        policy: PolicyModel,
        micro: MicroBatch,
        hidden: torch.Tensor,
        kept: Kept,
        temperature: float,
        step: int,
    ) -> Rollout | None:
        """Windows of a micro-batch, drafted and judged; None where no turn is long enough for one."""
        batch = draft_batch(micro, 1, MULTIPLE)
        if batch is None:
            return None
        move, hidden = self._runtime.to_device, hidden.detach()
        layout = BranchLayout(batch.branches, move(batch.positions), self._runtime.dtype, keep=True)
        inputs = hidden.index_select(0, move(batch.places))[:, None]
        rotary = policy.rotary(batch.positions)
        states = draft_step(policy, 0, inputs, move(batch.following), rotary, layout)[:, 0]
        windows = self._choose(policy, micro, batch, states.detach(), hidden, temperature, step)
        if windows is None:
            return None
        tokens, log_q = self._draft(policy, windows, states, layout.release(), temperature)
        with torch.no_grad():
            judged = self._judge(policy, windows, tokens, log_q.detach(), hidden, kept, temperature)
        return Rollout(windows=windows, tokens=tokens, logprobs=log_q, judged=judged)

    def _choose(
        self,
        policy: PolicyModel,
        micro: MicroBatch,
        batch: DraftBatch,
        states: torch.Tensor,
        hidden: torch.Tensor,
        temperature: float,
        step: int,
    ) -> Windows | None:
        """Anchors by criticality, all drafts of a window within the turn; and the step's randomness."""
        move, depths = self._runtime.to_device, self._depths
        shape = batch.tokens.shape
        texts = move(batch.tokens), move(batch.sampled)
        whole = depth_targets(*texts, depths).mask[:, -1].view(shape).cpu()
        if not whole.any():
            return None
        near, group = depth_targets(*texts, 1), policy.pg_collection.tp
        rows, *_ = linear_draft_rows(
            states.index_select(0, move(batch.anchors.flatten()))[:, None],
            hidden.index_select(0, move(batch.backbone.flatten())),
            policy.head_weight,
            near.mask,
            near.tokens,
            temperature=temperature,
            tp_group=group if group.size() > 1 else None,
            vocab=policy.local_vocab,
        )
        critical = criticality(rows.target_entropy, rows.kl, policy.vocab_real).view(shape)
        drawn = draw_windows(
            window_scores(critical, depths).cpu(),
            whole,
            batch.owners,
            micro.rows,
            self._config,
            hard=self.hard_share(step),
            depths=depths,
            seed=self._seed,
            step=step,
        )
        anchors = batch.anchors[drawn.turns, drawn.columns]
        following = batch.backbone[drawn.turns, drawn.columns + 1]
        return Windows(
            owners=drawn.owners,
            anchors=move(anchors),
            following=move(following),
            draft_prefixes=self._prefixes(batch.branches, anchors),
            prefixes=self._prefixes(micro.branches, following),
            scores=drawn.scores,
            draft_uniforms=drawn.draft_uniforms.to(states.device),
            coins=drawn.coins.to(states.device),
        )

    def _prefixes(self, branches: list[Branch], last: np.ndarray) -> list[torch.Tensor]:
        """Indices of everything up to each of these tokens."""
        starts = np.cumsum([0, *(branch.length for branch in branches)])
        found = [tokens_up_to(branches, starts, index) for index in last]
        return list(self._runtime.to_device(np.concatenate(found)).split([len(path) for path in found]))

    def _draft(
        self, policy: PolicyModel, windows: Windows, states: torch.Tensor, kept: Kept, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [W, G, K] and logprobs [W, G, K, V] of the drafter at each; states: [M, H] of depth 1."""
        group = self._config.group_size
        ahead = Continuation(kept, windows.draft_prefixes, group)
        state = states.index_select(0, windows.anchors)
        log_q = _logprobs(policy, state, temperature)[:, None].expand(-1, group, -1)
        tokens, logprobs = [sampled(log_q, windows.draft_uniforms[..., 0])], [log_q]
        state = state.repeat_interleave(group, 0)
        for depth in range(1, self._depths):
            rotary = policy.rotary(ahead.advance(1).positions)
            state = draft_step(policy, depth, state[:, None], tokens[-1].view(1, -1), rotary, ahead)[:, 0]
            log_q = _logprobs(policy, state, temperature).view_as(log_q)
            tokens.append(sampled(log_q, windows.draft_uniforms[..., depth]))
            logprobs.append(log_q)
        return torch.stack(tokens, 2), torch.stack(logprobs, 2)

    def _judge(
        self,
        policy: PolicyModel,
        windows: Windows,
        tokens: torch.Tensor,
        log_q: torch.Tensor,
        hidden: torch.Tensor,
        kept: Kept,
        temperature: float,
    ) -> Judged:
        """Verification of the windows, and what they earn."""
        count, group, depths = tokens.shape
        first = _logprobs(policy, hidden.index_select(0, windows.following), temperature)
        ahead = Continuation(kept, windows.prefixes, group).advance(depths)
        later = _logprobs(policy, policy.hidden_states(tokens.view(1, -1), ahead), temperature)
        log_p = torch.cat(
            (first[:, None, None].expand(-1, group, -1, -1), later.view(count, group, depths, -1)), 2
        )
        greedy = self._greedy(policy, windows, first, kept, temperature) if self._config.proximity else None
        cost = self._config.draft_cost or _draft_cost(policy)
        return judge_windows(tokens, log_q, log_p, windows.coins, greedy, self._config, cost)

    def _greedy(
        self, policy: PolicyModel, windows: Windows, first: torch.Tensor, kept: Kept, temperature: float
    ) -> torch.Tensor:
        """Logprobs [W, K] along the window that the target would write greedily from each anchor."""
        ahead = Continuation(kept, windows.prefixes)
        largest, token = first.max(-1)
        found = [largest]
        for _ in range(1, self._depths):
            hidden = policy.hidden_states(token[None], ahead.advance(1))
            largest, token = _logprobs(policy, hidden, temperature).max(-1)
            found.append(largest)
        return torch.stack(found, 1)


def _logprobs(policy: PolicyModel, hidden: torch.Tensor, temperature: float) -> torch.Tensor:
    """log softmax over the whole vocabulary, [N, H] -> [N, V] float32; the head is a constant."""
    local = copy_to_tensor_model_parallel_region(hidden) @ policy.head_weight.detach().T
    logits = gather_from_tensor_model_parallel_region(local)[:, : policy.vocab_real]
    return (logits.float() / temperature).log_softmax(-1)


def _draft_cost(policy: PolicyModel) -> float:
    """Parameters of the draft against those of the backbone; embedding and head, which both use, apart."""
    sizes = [
        sum(
            p.numel() * (policy.pg_collection.tp.size() if getattr(p, "tensor_model_parallel", False) else 1)
            for p in part.parameters()
        )
        for part in (policy.mtp, policy.decoder)
    ]
    return sizes[0] / sizes[1]
