"""The draft model's passes over micro-batches: for its objective, or for statistics and tables.

Owns the path from hidden states of the backbone to the loss of the MTP layer, and the sums over micro-batches
and ranks. Other modules provide the layout (`draft_batch`), the layer's unrolling (`drafts.megatron_draft`),
the loss on sampled text (`drafts.loss`), and windows (`drafts.windows`, with the passes of `ppow`). The
trainer of the policy decides when these passes run, and steps the optimizer. No gradient flows into the
backbone, the embedding or the head.

The loss of a micro-batch is only the numerator. Its denominator (with visit weights) is known only after the
last micro-batch of all ranks. The denominator then divides the accumulated gradient (`PolicyOptimizer.step`),
so the step does not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from math import lcm
from operator import add
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from rlpipe.batching.draft_layout import DraftBatch, draft_batch
from rlpipe.batching.micro_batch import MicroBatch, as_rows
from rlpipe.config.draft import DraftConfig
from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.loss import MtpStats, depth_targets
from rlpipe.drafts.loss.alignment import DepthTargets
from rlpipe.drafts.loss.linear import linear_draft_rows, linear_mtp_loss
from rlpipe.drafts.loss.stats import no_stats
from rlpipe.drafts.megatron_draft import draft_hidden_states
from rlpipe.drafts.tables import Table, context_tables
from rlpipe.drafts.windows.totals import PpowTotals
from rlpipe.drafts.windows.training import WindowTraining
from rlpipe.trainer.layers import BranchLayout
from rlpipe.trainer.model import PolicyModel
from rlpipe.trainer.passes import Forward, Passes, schedule
from rlpipe.trainer.ppow import MtpWindows
from rlpipe.trainer.runtime import Runtime, pipeline_group

T = TypeVar("T")
DraftStats: TypeAlias = MtpStats | PpowTotals
MULTIPLE = 32  # as in the batcher: kernels that were prepared for a number of rows are reused


class Aligned(NamedTuple):
    """The draft's states aligned with the target's, for each token of the turns.

    batch: layout of the micro-batch. states: [N, K, H] of the draft. backbone: [N, H], the hidden states from
    which the target predicts. targets: tokens and mask of each depth.
    """

    batch: DraftBatch
    states: torch.Tensor
    backbone: torch.Tensor
    targets: DepthTargets


class DraftPasses:
    """Runs the draft from hidden states of the backbone.

    group: the data parallel ranks. windows: settings of an objective on windows, None for other objectives.
    updates: optimizer steps of the run. Raises ValueError if the layers do not support windows.
    """

    def __init__(
        self,
        config: DraftConfig,
        runtime: Runtime,
        passes: Passes,
        *,
        group: dist.ProcessGroup,
        windows: PpowConfig | None,
        updates: int,
        seed: int,
    ) -> None:
        if windows is not None and runtime.te:
            raise ValueError(
                f"draft.objective={config.objective} reads keys of finished passes, which "
                "TransformerEngine's attention does not expose: set trainer.layers=local."
            )
        self._passes, self._group, self._device = passes, group, runtime.device
        self._config, self._runtime = config, runtime

        # The schedule of windows counts the draft's steps, not the policy's.
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
        policy: PolicyModel,
        micro_batch: MicroBatch,
        *,
        hidden: torch.Tensor,
        layout: BranchLayout | None,
        temperature: float,
        updates: int,
    ) -> tuple[torch.Tensor, DraftStats]:
        """Compute the objective on a micro-batch: its numerator, a scalar, and statistics.

        hidden: [N, H] of the backbone. layout: layout of the backbone's pass, with keys if the objective
        reads them. temperature: sampling temperature of the rollouts. updates: the draft's optimizer steps so
        far.
        """
        if self._windows is None:
            numerator, stats = self._supervised(policy, micro_batch, hidden, temperature=temperature)
            # Each context parallel rank computes the full loss, and Megatron sums their gradients.
            return numerator / policy.pg_collection.cp.size(), stats

        # An objective on windows: depth 1 predicts from every anchor, and windows start at some of them.
        no_windows = torch.zeros((), device=self._device), PpowTotals.zeros(self._device)
        batch = draft_batch(micro_batch, 1, MULTIPLE)
        if batch is None:
            return no_windows

        assert layout is not None, "windows are refused with layers that have no layout"
        windows = MtpWindows(
            policy,
            micro_batch,
            batch,
            hidden=hidden.detach(),
            retained=layout.release(),
            temperature=temperature,
            runtime=self._runtime,
        )
        return self._windows.loss(windows, updates) or no_windows

    def forward(
        self, policy: PolicyModel, *, count: int, temperature: float, updates: int
    ) -> Forward[DraftStats]:
        """Make the pass of the objective for `schedule` over `count` micro-batches.

        The backbone runs without gradients. temperature, updates: see `loss`.
        """

        def forward(index: int, micro_batch: MicroBatch) -> Any:
            with torch.no_grad():
                hidden, _, layout = self._passes.hidden(policy, micro_batch, retain_keys=self.reads_keys)

            # The previous pipeline stage waits for a gradient: send it zeros.
            zero: torch.Tensor | float = 0.0
            if not policy.pre_process:
                zero = policy.decoder.input_tensor[:0].sum()
            if not policy.post_process:
                return hidden + zero, None

            def finish_micro_batch(hidden: torch.Tensor) -> tuple[torch.Tensor, DraftStats]:
                loss, stats = self.loss(
                    policy,
                    micro_batch,
                    hidden=hidden,
                    layout=layout,
                    temperature=temperature,
                    updates=updates,
                )
                return loss * count + zero, stats  # Megatron divides by the number of micro-batches

            return hidden, finish_micro_batch

        return forward

    def sum_over_ranks(self, parts: Iterable[DraftStats]) -> DraftStats:
        """Sum the objective's statistics over micro-batches and ranks."""
        empty = PpowTotals.zeros(self._device) if self.reads_keys else self._no_stats()
        return self._sum(parts, empty)

    def statistics(self, policy: PolicyModel, shard: Sequence[MicroBatch], temperature: float) -> MtpStats:
        """Compute teacher-forced statistics over micro-batches and ranks; works with any objective."""

        def score(micro_batch: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, MtpStats]:
            return self._supervised(policy, micro_batch, hidden, temperature=temperature)

        return self._sum(self._run(policy, shard, score), self._no_stats())

    def tables(
        self, policy: PolicyModel, shard: Sequence[MicroBatch], temperature: float
    ) -> dict[int, Table]:
        """Tabulate draft and target at every context of this rank's trajectories, by row of the batch."""

        def tabulate(micro_batch: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, dict[int, Table]]:
            return hidden.sum(), self._tables(policy, micro_batch, hidden, temperature=temperature)

        return {row: table for tables in self._run(policy, shard, tabulate) for row, table in tables.items()}

    def _no_stats(self) -> MtpStats:
        """Return the statistics of no tokens."""
        return no_stats(self._config.depths, self._device)

    def _sum(self, parts: Iterable[Any], empty: Any) -> Any:
        """Sum statistics over micro-batches, starting from `empty`, and then over ranks."""
        total = reduce(add, parts, empty)

        # Pipeline stages before the last add zeros.
        for group in self._group, pipeline_group():
            total = total.all_reduce(group) if group.size() > 1 else total
        return total

    def _run(
        self,
        policy: PolicyModel,
        shard: Sequence[MicroBatch],
        use: Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, T]],
    ) -> list[T]:
        """Apply `use` to the hidden states of each micro-batch, without gradients."""

        def forward(index: int, micro_batch: MicroBatch) -> Any:
            hidden, *_ = self._passes.hidden(policy, micro_batch)
            if not policy.post_process:
                return hidden, None
            return hidden, lambda hidden: use(micro_batch, hidden)

        with torch.no_grad():
            return schedule(policy, shard, forward, forward_only=True)

    def _supervised(
        self, policy: PolicyModel, micro_batch: MicroBatch, hidden: torch.Tensor, *, temperature: float
    ) -> tuple[torch.Tensor, MtpStats]:
        """Compute the numerator of the loss, a scalar that trains only the MTP layer, and statistics.

        hidden: the result of `PolicyModel.hidden_states` for the micro-batch.
        """
        aligned = self._aligned(policy, micro_batch, hidden)
        if aligned is None:
            return torch.zeros((), device=hidden.device), no_stats(self._config.depths, hidden.device)

        # A normalizer of 1 leaves the loss a numerator (see the module's docstring).
        group = policy.pg_collection.tp
        return linear_mtp_loss(
            self._config.supervised,
            aligned.states,
            aligned.backbone,
            head_weight=policy.head_weight,
            mask=aligned.targets.mask,
            tokens=aligned.targets.tokens,
            anchors=self._config.anchors,
            turn_starts=aligned.targets.turn_starts,
            temperature=temperature,
            tp_group=group if group.size() > 1 else None,
            normalizer=1.0,
            vocab=policy.local_vocab,
            draft_ids=policy.local_draft_ids,
        )

    def _tables(
        self, policy: PolicyModel, micro_batch: MicroBatch, hidden: torch.Tensor, *, temperature: float
    ) -> dict[int, Table]:
        """Compute the tables of a micro-batch, by row of the packed batch; see `context_tables`."""
        aligned = self._aligned(policy, micro_batch, hidden)
        if aligned is None:
            return {}

        batch, targets = aligned.batch, aligned.targets
        group = policy.pg_collection.tp
        rows, choices = linear_draft_rows(
            aligned.states,
            aligned.backbone,
            head_weight=policy.head_weight,
            mask=targets.mask,
            tokens=targets.tokens,
            temperature=temperature,
            tp_group=group if group.size() > 1 else None,
            vocab=policy.local_vocab,
            draft_ids=policy.local_draft_ids,
        )

        return context_tables(rows, choices, batch=batch, mask=targets.mask, owner_rows=micro_batch.rows)

    def _aligned(self, policy: PolicyModel, micro_batch: MicroBatch, hidden: torch.Tensor) -> Aligned | None:
        """Run the draft and align its states with the backbone's; None when no token is drafted."""
        move, as_padded_rows = self._runtime.to_device, self._runtime.te
        ranks = policy.pg_collection.tp.size() if policy.config.sequence_parallel else 1
        batch = draft_batch(micro_batch, self._config.depths, 1 if as_padded_rows else lcm(MULTIPLE, ranks))
        if batch is None:
            return None

        # The layouts index flat tokens: undo the padding of rows first.
        hidden = hidden.detach()
        if as_padded_rows:
            hidden = hidden.index_select(0, move(as_rows(micro_batch.branches, micro_batch.tokens)[1]))

        inputs = hidden.index_select(0, move(batch.places))
        states = torch.stack(
            (self._draft_rows if as_padded_rows else self._draft_branches)(policy, batch, inputs), 1
        )

        # Select, for each token of the turns, the states of its anchor and of the backbone.
        anchors, backbone = (move(index.flatten()) for index in (batch.anchors, batch.backbone))
        targets = depth_targets(move(batch.tokens), move(batch.sampled), self._config.depths)
        return Aligned(batch, states.index_select(0, anchors), hidden.index_select(0, backbone), targets)

    def _draft_branches(
        self, policy: PolicyModel, batch: DraftBatch, inputs: torch.Tensor
    ) -> list[torch.Tensor]:
        """Compute the draft's hidden states [M, H] of each depth from inputs [M, H] of flat anchors."""
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

    def _draft_rows(self, policy: PolicyModel, batch: DraftBatch, inputs: torch.Tensor) -> list[torch.Tensor]:
        """Compute the same as `_draft_branches` over padded rows, for attention kernels without branches."""
        move = self._runtime.to_device
        following = np.stack([as_rows(batch.branches, ids)[0] for ids in batch.following])
        indices = move(as_rows(batch.branches, batch.places)[1])
        _, count, length = following.shape

        # Scatter the flat inputs into rows, run, and gather the states back.
        padded = inputs.new_zeros(count * length, inputs.shape[1]).index_copy(0, indices, inputs)
        padded = padded.view(count, length, -1).transpose(0, 1).contiguous()
        states = draft_hidden_states(
            policy, padded, move(following), rotary_pos_emb=policy.rotary(np.arange(length))
        )
        return [state.transpose(0, 1).flatten(0, 1).index_select(0, indices) for state in states]
