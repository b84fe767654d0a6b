"""The draft's passes over micro-batches: under its objective, or for statistics and tables.

Owns what follows the backbone's hidden states, whatever the objective: `draft` (supervised) or `ppow`
(windows). The trainer of the policy decides when, and steps the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from rlpipe.batch import MicroBatch
from rlpipe.config.mtp import MtpConfig
from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.draft_batch import draft_batch
from rlpipe.drafts.loss import MtpStats
from rlpipe.drafts.ppow.step import WindowTraining
from rlpipe.drafts.ppow.totals import PpowTotals
from rlpipe.trainer.draft import MULTIPLE, Draft, Table, no_stats, total
from rlpipe.trainer.layers import BranchLayout
from rlpipe.trainer.passes import Passes, schedule
from rlpipe.trainer.ppow import MtpWindows
from rlpipe.trainer.runtime import Runtime


class DraftPasses:
    """Runs the draft from hidden states of the backbone.

    group: of the data parallel ranks. windows: settings of an objective on windows, None for another one.
    updates: optimizer steps of the run. Raises ValueError where the layers cannot give what windows need.
    """

    def __init__(
        self,
        config: MtpConfig,
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
                f"mtp.objective={config.objective} reads keys of finished passes, which TransformerEngine's "
                "attention keeps to itself: set trainer.layers=local."
            )
        self._depths, self._device = config.depths, runtime.device
        self._passes, self._group = passes, group
        self._draft, self._runtime = Draft(config, runtime), runtime
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
            return self._draft.loss(policy, micro, hidden, temperature)
        nothing = torch.zeros((), device=self._device), PpowTotals.nothing(self._device)
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

            def finish_micro(hidden: torch.Tensor) -> Any:
                loss, stats = self.loss(policy, micro, hidden, layout, temperature, updates)
                return loss * count, stats  # Megatron divides by the number of micro-batches

            return hidden, finish_micro

        return forward

    def summed(self, parts: Iterable[Any]) -> MtpStats | PpowTotals:
        """Statistics of the objective over micro-batches and ranks."""
        nothing = no_stats(self._depths, self._device)
        return total(
            parts, nothing if self._windows is None else PpowTotals.nothing(self._device), self._group
        )

    def statistics(self, policy: Any, shard: Sequence[MicroBatch], temperature: float) -> MtpStats:
        """Teacher-forced statistics over micro-batches and ranks, whatever the objective."""
        parts = self._scored(policy, shard, lambda *of: self._draft.loss(policy, *of, temperature))
        return total(parts, no_stats(self._depths, self._device), self._group)

    def tables(self, policy: Any, shard: Sequence[MicroBatch], temperature: float) -> dict[int, Table]:
        """Draft and target at every context of this rank's trajectories, by row of the packed ones."""

        def table(micro: MicroBatch, hidden: torch.Tensor) -> Any:
            return hidden.sum(), self._draft.tables(policy, micro, hidden, temperature)

        parts = self._scored(policy, shard, table)
        return {row: found for part in parts for row, found in part.items()}

    def _scored(
        self, policy: Any, shard: Sequence[MicroBatch], use: Callable[[MicroBatch, torch.Tensor], Any]
    ) -> list[Any]:
        """What `use` makes of the hidden states of each micro-batch, without gradients."""

        def forward(index: int, micro: MicroBatch) -> Any:
            hidden, *_ = self._passes.hidden(policy, micro)
            return hidden, lambda hidden: use(micro, hidden)

        with torch.no_grad():
            return schedule(policy, shard, forward, forward_only=True)
