"""The draft's passes over micro-batches: under its objective, or for statistics and tables.

Owns the way from hidden states of the backbone to the loss of the MTP layer, and the sums over micro-batches
and ranks. The layout is `draft_batch`, the layer's unrolling `drafts.megatron_draft`, the loss on given text
`drafts.loss`, windows `drafts.windows` on the passes of `ppow`. The trainer of the policy decides when, and
steps the optimizer. Nothing flows back into the backbone, the embedding or the head.

The loss of a micro-batch is the numerator alone. Its denominator (with visit weights) is known only after
the last micro-batch of all ranks, and divides the accumulated gradient (`PolicyOptimizer.step`): so the step
does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from math import lcm
from operator import add
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_pipeline_model_parallel_group

from rlpipe.batching.draft_layout import DraftBatch, draft_batch
from rlpipe.batching.micro_batch import MicroBatch, as_rows
from rlpipe.config.draft import DraftConfig
from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.loss import MtpStats, depth_targets
from rlpipe.drafts.loss.alignment import DepthTargets
from rlpipe.drafts.loss.linear import linear_draft_rows, linear_mtp_loss
from rlpipe.drafts.loss.stats import no_stats
from rlpipe.drafts.megatron_draft import draft_hidden_states
from rlpipe.drafts.visit import accept_probabilities
from rlpipe.drafts.windows.totals import PpowTotals
from rlpipe.drafts.windows.training import WindowTraining
from rlpipe.trainer.layers import BranchLayout
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.passes import Passes, schedule
from rlpipe.trainer.ppow import MtpWindows
from rlpipe.trainer.runtime import Runtime

Table = tuple[np.ndarray, dict[str, np.ndarray]]  # places [n], statistics [n, K] by name, nan where masked
TABLE_ROWS = {  # name in a table -> field of Rows
    "rejection": "alpha",
    "target_entropy": "target_entropy",
    "draft_entropy": "draft_entropy",
    "kl": "kl",
    "reverse_kl": "reverse_kl",
    "target_above": "target_above",
    "draft_above": "draft_above",
}
MULTIPLE = 32  # as the batcher's: kernels prepared for one number of rows are used again


class DraftPasses:
    """Runs the draft from hidden states of the backbone.

    group: of the data parallel ranks. windows: settings of an objective on windows, None for another one.
    updates: optimizer steps of the run. Raises ValueError where the layers cannot give what windows need.
    """

    def __init__(
        self,
        config: DraftConfig,
        runtime: Runtime,
        passes: Passes,
        group: dist.ProcessGroup,
        windows: PpowConfig | None,
        *,
        updates: int,
        seed: int,
    ) -> None:
        if windows is not None and runtime.te:
            raise ValueError(
                f"draft.objective={config.objective} reads keys of finished passes, which "
                "TransformerEngine's attention keeps to itself: set trainer.layers=local."
            )
        self._passes, self._group, self._device = passes, group, runtime.device
        self._config, self._runtime = config, runtime
        self._windows: WindowTraining | None = None
        if windows is not None:
            steps = max(1, updates // config.interval)
            self._windows = WindowTraining(
                windows, config.objective, depths=config.depths, steps=steps, seed=seed
            )

    @property
    def reads_keys(self) -> bool:
        """Whether the objective reads the keys of the backbone's pass."""
        return self._windows is not None

    def loss(
        self,
        policy: Any,
        micro: MicroBatch,
        hidden: torch.Tensor,
        layout: BranchLayout | None,
        temperature: float,
        updates: int,
    ) -> tuple[torch.Tensor, MtpStats | PpowTotals]:
        """The objective on a micro-batch: numerator and statistics.

        layout: of the backbone's pass, with keys if the objective reads them. updates: the draft has had.
        """
        if self._windows is None:
            numerator, stats = self._supervised(policy, micro, hidden, temperature)
            return numerator / policy.pg_collection.cp.size(), stats  # each rank has all; Megatron sums them
        nothing = torch.zeros((), device=self._device), PpowTotals.zeros(self._device)
        batch = draft_batch(micro, 1, MULTIPLE)
        if batch is None:
            return nothing
        seen = hidden.detach(), layout.release(), temperature
        text = MtpWindows(policy, micro, batch, *seen, self._runtime)
        return self._windows.loss(text, updates) or nothing

    def forward(
        self, policy: Any, count: int, temperature: float, updates: int
    ) -> Callable[[int, MicroBatch], tuple[torch.Tensor, Any]]:
        """For `schedule` over `count` micro-batches: the objective, from a backbone without gradients."""

        def forward(index: int, micro: MicroBatch) -> tuple[torch.Tensor, Any]:
            with torch.no_grad():
                hidden, _, layout = self._passes.hidden(policy, micro, self.reads_keys)
            nothing: torch.Tensor | float = 0.0
            if not policy.pre_process:  # the stage before waits for a gradient, of which there is none
                nothing = policy.decoder.input_tensor[:0].sum()
            if not policy.post_process:
                return hidden + nothing, None

            def finish_micro(hidden: torch.Tensor) -> Any:
                loss, stats = self.loss(policy, micro, hidden, layout, temperature, updates)
                return loss * count + nothing, stats  # Megatron divides by the number of micro-batches

            return hidden, finish_micro

        return forward

    def summed(self, parts: Iterable[Any], windows: bool | None = None) -> MtpStats | PpowTotals:
        """Statistics over micro-batches and ranks; windows: of which kind, None for the objective's."""
        windows = self.reads_keys if windows is None else windows
        nothing = PpowTotals.zeros(self._device) if windows else no_stats(self._config.depths, self._device)
        mine = reduce(add, parts, nothing)
        for group in self._group, get_pipeline_model_parallel_group():  # stages before the last have nothing
            mine = mine.all_reduce(group) if group.size() > 1 else mine
        return mine

    def statistics(self, policy: Any, shard: Sequence[MicroBatch], temperature: float) -> MtpStats:
        """Teacher-forced statistics over micro-batches and ranks, whatever the objective."""
        parts = self._scored(policy, shard, lambda *of: self._supervised(policy, *of, temperature))
        return self.summed(parts, windows=False)

    def tables(self, policy: Any, shard: Sequence[MicroBatch], temperature: float) -> dict[int, Table]:
        """Draft and target at every context of this rank's trajectories, by row of the packed ones."""

        def table(micro: MicroBatch, hidden: torch.Tensor) -> Any:
            return hidden.sum(), self._tables(policy, micro, hidden, temperature)

        parts = self._scored(policy, shard, table)
        return {row: found for part in parts for row, found in part.items()}

    def _scored(
        self, policy: Any, shard: Sequence[MicroBatch], use: Callable[[MicroBatch, torch.Tensor], Any]
    ) -> list[Any]:
        """What `use` makes of the hidden states of each micro-batch, without gradients."""

        def forward(index: int, micro: MicroBatch) -> Any:
            hidden, *_ = self._passes.hidden(policy, micro)
            if not policy.post_process:
                return hidden, None
            return hidden, lambda hidden: use(micro, hidden)

        with torch.no_grad():
            return schedule(policy, shard, forward, forward_only=True)

    def _supervised(
        self, policy: PolicyModel, micro: MicroBatch, hidden: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, MtpStats]:
        """Numerator of the loss, a scalar that trains the MTP layer alone, and statistics.

        hidden: as `PolicyModel.hidden_states` returned them for the micro-batch.
        """
        found = self._aligned(policy, micro, hidden)
        if found is None:
            return torch.zeros((), device=hidden.device), no_stats(self._config.depths, hidden.device)
        _, states, backbone, targets = found
        group = policy.pg_collection.tp
        return linear_mtp_loss(
            self._config.supervised,
            states,
            backbone,
            head_weight=policy.head_weight,
            mask=targets.mask,
            tokens=targets.tokens,
            anchors=self._config.anchors,
            turn_starts=targets.turn_starts,
            temperature=temperature,
            tp_group=group if group.size() > 1 else None,
            normalizer=1.0,
            vocab=policy.local_vocab,
        )

    def _tables(
        self, policy: PolicyModel, micro: MicroBatch, hidden: torch.Tensor, temperature: float
    ) -> dict[int, Table]:
        """What draft and target say at every context of a micro-batch, by row of `micro.rows`.

        A context is a place from which depth 1 drafts a token; arrays are in order of the tokens.
        """
        found = self._aligned(policy, micro, hidden)
        if found is None:
            return {}
        batch, states, backbone, targets = found
        group = policy.pg_collection.tp
        rows, target_only, top = linear_draft_rows(
            states,
            backbone,
            head_weight=policy.head_weight,
            mask=targets.mask,
            tokens=targets.tokens,
            temperature=temperature,
            tp_group=group if group.size() > 1 else None,
            vocab=policy.local_vocab,
        )
        accept = accept_probabilities(rows.draft_logprob, rows.target_logprob)
        columns = {"target_only": target_only, "top": top, "accept": accept}
        columns |= {name: getattr(rows, field) for name, field in TABLE_ROWS.items()}
        mask = targets.mask.cpu().numpy()
        values = {
            name: np.where(mask, column.float().cpu().numpy(), np.nan) for name, column in columns.items()
        }
        owners = np.repeat(batch.owners, batch.tokens.shape[1])
        first = batch.positions[batch.anchors.flatten()] + 2  # where depth 1's token stands
        tables: dict[int, Table] = {}
        for owner in np.unique(batch.owners):
            mine = np.flatnonzero((owners == owner) & mask[:, 0])
            tables[int(micro.rows[owner])] = (first[mine], {name: v[mine] for name, v in values.items()})
        return tables

    def _aligned(
        self, policy: PolicyModel, micro: MicroBatch, hidden: torch.Tensor
    ) -> tuple[DraftBatch, torch.Tensor, torch.Tensor, DepthTargets] | None:
        """The layout, and per cell of its turns: draft states [N, K, H], backbone [N, H], what is compared.

        None when nothing is drafted.
        """
        move, rows = self._runtime.to_device, self._runtime.te
        ranks = policy.pg_collection.tp.size() if policy.config.sequence_parallel else 1
        batch = draft_batch(micro, self._config.depths, 1 if rows else lcm(MULTIPLE, ranks))
        if batch is None:
            return None
        hidden = hidden.detach()
        if rows:
            hidden = hidden.index_select(0, move(as_rows(micro.branches, micro.tokens)[1]))
        inputs = hidden.index_select(0, move(batch.places))
        states = torch.stack((self._rows if rows else self._branches)(policy, batch, inputs), 1)
        anchors, backbone = (move(index.flatten()) for index in (batch.anchors, batch.backbone))
        targets = depth_targets(move(batch.tokens), move(batch.sampled), self._config.depths)
        return batch, states.index_select(0, anchors), hidden.index_select(0, backbone), targets

    def _branches(self, policy: PolicyModel, batch: DraftBatch, inputs: torch.Tensor) -> list[torch.Tensor]:
        """Hidden states [M, H] by depth, from inputs [M, H]; anchors lie flat, attention knows branches."""
        move = self._runtime.to_device
        layout = BranchLayout(batch.branches, move(batch.positions))
        states = draft_hidden_states(
            policy,
            inputs[:, None],
            move(batch.following[:, None]),
            rotary_pos_emb=policy.rotary(batch.positions),
            layout=layout,
        )
        return [state[:, 0] for state in states]

    def _rows(self, policy: PolicyModel, batch: DraftBatch, inputs: torch.Tensor) -> list[torch.Tensor]:
        """The same over padded rows, for attention kernels that know no branches."""
        move = self._runtime.to_device
        following = np.stack([as_rows(batch.branches, ids)[0] for ids in batch.following])
        cells = move(as_rows(batch.branches, batch.places)[1])
        _, count, length = following.shape
        padded = inputs.new_zeros(count * length, inputs.shape[1]).index_copy(0, cells, inputs)
        padded = padded.view(count, length, -1).transpose(0, 1).contiguous()
        states = draft_hidden_states(
            policy, padded, move(following), rotary_pos_emb=policy.rotary(np.arange(length))
        )
        return [state.transpose(0, 1).flatten(0, 1).index_select(0, cells) for state in states]
