"""Windows of an MTP layer: it drafts them after tokens of a micro-batch, and the backbone reads them.

Owns the passes that `drafts.windows.training` needs; `continuation` reads the keys of finished passes.

    backbone's pass      -> hidden states, keys         (with or without a graph: no gradient flows into it)
    depth 1, all anchors -> Q along the text, keys
    depths 2..K          -> G windows from each anchor
    backbone, W G K more -> P after every draft
    backbone, W(K - 1)   -> the greedy window from each anchor

So a step costs one MTP depth over the texts and, for each of the two models, K (G + 1) tokens per window.
Draft tokens equal those of the engine: deeper ones attend to depth-1 keys of the prefix and to the keys of
their window. (With teacher forcing they attend to keys of their own depth, at tokens of the text, instead.)
"""

from __future__ import annotations

import numpy as np
import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)

from rlpipe.batching.draft_layout import DraftBatch, tokens_up_to
from rlpipe.batching.micro_batch import Branch, MicroBatch
from rlpipe.drafts.loss import depth_targets
from rlpipe.drafts.megatron_draft import draft_step
from rlpipe.drafts.vocabulary import spread
from rlpipe.drafts.windows.rollout import SampledWindows, criticality_of
from rlpipe.trainer.continuation import Continuation
from rlpipe.trainer.layers import BranchLayout, RetainedKeys
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.runtime import Runtime


class MtpWindows:
    """A single-use `drafts.windows.rollout.WindowDrafter` on a micro-batch.

    prefixes: for each window, indices of the tokens 0 .. t + 1. draft_prefixes: indices of the draft's
    anchors 0 .. t.
    """

    def __init__(
        self,
        policy: PolicyModel,
        micro_batch: MicroBatch,
        batch: DraftBatch,
        *,
        hidden: torch.Tensor,
        retained: RetainedKeys,
        temperature: float,
        runtime: Runtime,
    ) -> None:
        """Run depth 1 over all anchors. hidden, retained: states and keys of the backbone's pass."""
        self.owners, self.turns, self.sampled = batch.owners, batch.tokens, batch.sampled
        self.rows, self.vocab, self.known = micro_batch.rows, policy.vocab_real, policy.draft_ids
        self._policy, self._micro_batch, self._batch, self._hidden = policy, micro_batch, batch, hidden
        self._retained, self._temperature, self._runtime = retained, temperature, runtime

        # Retain the keys of depth 1, because the windows continue that pass.
        move = runtime.to_device
        layout = BranchLayout(batch.branches, move(batch.positions), retain_keys=True)
        inputs = hidden.index_select(0, move(batch.places))[:, None]
        rotary = policy.rotary(batch.positions)

        self._states = draft_step(
            policy, 0, inputs, tokens=move(batch.following), rotary_pos_emb=rotary, layout=layout
        )[:, 0]
        self._draft_retained = layout.release()

    @property
    def draft_cost(self) -> float:
        """Ratio of the draft's parameters to the backbone's, without embedding and head."""
        policy = self._policy

        # Multiply the size of a shard by the number of tensor parallel ranks.
        draft_size, backbone_size = (
            sum(
                p.numel()
                * (policy.pg_collection.tp.size() if getattr(p, "tensor_model_parallel", False) else 1)
                for p in part.parameters()
            )
            for part in (policy.mtp, policy.decoder)
        )
        return draft_size / backbone_size

    def criticality(self) -> torch.Tensor:
        """Compute the criticality [R, L] of the first draft from each token of the turns."""
        batch, move = self._batch, self._runtime.to_device
        near = depth_targets(move(batch.tokens), move(batch.sampled), 1).mask[:, 0]

        # Depth 1 at a token predicts the same token as the target at the next position.
        backbone = move(batch.backbone.flatten())
        following = torch.cat((backbone[1:], backbone[-1:]))
        states = self._states.detach().index_select(0, move(batch.anchors.flatten())[near])
        target = self._hidden.index_select(0, following[near])

        critical = torch.zeros(near.shape, device=near.device)
        critical[near] = criticality_of(self, states, target)
        return critical.view(batch.tokens.shape)

    def start(self, windows: SampledWindows, group: int) -> torch.device:
        """Prepare to continue W windows, `group` times each."""
        batch, self._group = self._batch, group
        anchors = batch.anchors[windows.turns, windows.columns]
        following = batch.backbone[windows.turns, windows.columns + 1]

        # The draft's prefix ends at the anchor; the backbone's prefix ends one token later.
        self.draft_prefixes = self._prefixes(batch.branches, anchors)
        self.prefixes = self._prefixes(self._micro_batch.branches, following)

        self._first = self._runtime.to_device(following)
        self._state = self._states.index_select(0, self._runtime.to_device(anchors))
        self._depth, self._drafting = 0, Continuation(self._draft_retained, self.draft_prefixes, group=group)
        self._reading = Continuation(self._retained, self.prefixes)
        return self._state.device

    def draft(self, tokens: torch.Tensor | None) -> torch.Tensor:
        """Compute states [W, G, H] of the layer after its last tokens [W, G]; in the first call [W, 1, H]."""
        if tokens is None:
            return self._state[:, None]

        # The G continuations of a window share the first state and differ from their first token onwards.
        state = self._state if self._depth else self._state.repeat_interleave(self._group, 0)
        self._depth += 1
        rotary = self._policy.rotary(self._drafting.advance(1).positions)
        flat = tokens.view(1, -1)
        states = draft_step(
            self._policy,
            self._depth,
            state[:, None],
            tokens=flat,
            rotary_pos_emb=rotary,
            layout=self._drafting,
        )
        self._state = states[:, 0]

        return self._state.unflatten(0, tokens.shape)

    def first(self) -> torch.Tensor:
        """Select states [W, H] of the target at the position of the first draft."""
        return self._hidden.index_select(0, self._first)

    def read(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute states [W, G, K, H] of the target after each of the tokens [W, G, K]."""
        ahead = Continuation(self._retained, self.prefixes, group=self._group).advance(tokens.shape[2])
        return self._policy.hidden_states(tokens.view(1, -1), ahead).view(*tokens.shape, -1)

    def greedy(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute states [W, H] of the target after one more token, [W], of each greedy window."""
        return self._policy.hidden_states(tokens[None], self._reading.advance(1))

    def _prefixes(self, branches: list[Branch], last: np.ndarray) -> list[torch.Tensor]:
        """List, for each token of `last`, the indices of all tokens up to it."""
        starts = np.cumsum([0, *(branch.length for branch in branches)])
        paths = [tokens_up_to(branches, starts, index) for index in last]
        return list(self._runtime.to_device(np.concatenate(paths)).split([len(path) for path in paths]))

    def target_logprobs(self, states: torch.Tensor) -> torch.Tensor:
        """Compute log softmax over the full vocabulary, [..., H] -> [..., V] float32; the head is fixed."""
        logits = self._logits(states.flatten(0, -2)).unflatten(0, states.shape[:-1])
        return (logits / self._temperature).log_softmax(-1)

    def draft_logprobs(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the draft's log softmax, [..., H] -> [..., V]; its vocabulary may be reduced."""
        logits, ids = self._logits(states.flatten(0, -2)), self._policy.draft_ids
        if ids is not None:
            logits = spread(logits[:, ids], ids, logits.shape[1], temperature=self._temperature)
        return (logits / self._temperature).log_softmax(-1).unflatten(0, states.shape[:-1])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits over the full vocabulary, [N, H] -> [N, V] float32."""
        local = copy_to_tensor_model_parallel_region(hidden) @ self._policy.head_weight.detach().T
        return gather_from_tensor_model_parallel_region(local)[:, : self._policy.vocab_real].float()
