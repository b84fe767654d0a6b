"""The trainer: packed batches in, optimizer steps and weights out, on Megatron-core.

Owns one rank of the policy, its optimizer and its version. The algorithm (loss, correction) is
`rlpipe.algo`, forward and backward passes are `passes`, CPU or GPU is `runtime`, weights are `hf_bridge`,
files are `checkpoint`.

A step: for each minibatch, Megatron's schedule runs forward and backward over this rank's micro-batches
and reduces gradients; norms are clipped per group; AdamW steps. A frozen draft (MTP layer) is not run: the
policy's gradient does not need it. With mtp.train=online it learns from the hidden states of the same pass
(`draft`), and nothing of that reaches the policy; with mtp.objective=ppow from windows it drafts there
(`ppow`). With adapt_only the draft alone learns (`adapt_step`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from rlpipe.algo.correction import make_rule
from rlpipe.algo.policy_loss import LossTotals, check_names, finish, micro_batch_loss, optimizer_step_count
from rlpipe.algo.rule import TokenExtras
from rlpipe.batch import MicroBatch, MiniBatch, PackedBatch
from rlpipe.config.algo import AlgoConfig
from rlpipe.config.mtp import MtpConfig, check_draft
from rlpipe.config.ppow import PpowConfig
from rlpipe.config.trainer import TrainerConfig, check_parallel
from rlpipe.drafts.ppow import PpowTotals
from rlpipe.metrics.values import Last, Mean, Sum, Value, reduce
from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.trainer import runtime
from rlpipe.trainer.passes import Passes, Predictions, Scores, schedule

if TYPE_CHECKING:
    from rlpipe.drafts.loss import MtpStats
    from rlpipe.trainer.checkpoint import Saving, SavingHf
    from rlpipe.trainer.draft import Table
    from rlpipe.trainer.hf_bridge import Bucket
    from rlpipe.trainer.layers import BranchLayout


class Companion(Protocol):
    """What else happens to the micro-batches of an update; see `decoupled`."""

    def watch(
        self, index: int, micro: MicroBatch, found: Predictions, loss: torch.Tensor, totals: LossTotals
    ) -> tuple[torch.Tensor, dict[str, Value]]:
        """The loss to descend in place of the policy's, which is given, and further metrics."""
        ...


class MegatronTrainer:
    """One rank of the trainer; every method is collective: call it on all ranks, in the same order.

    policy_version: updates so far, those without a gradient included; a refused one does not count.
    rule: the correction, with what it remembers of the batches before.
    """

    def __init__(
        self,
        config: TrainerConfig,
        algo: AlgoConfig,
        mtp: MtpConfig,
        model_path: str | Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        master: str | None = None,
        total_steps: int,
        adapt_only: bool = False,
        ppow: PpowConfig | None = None,
        seed: int = 0,
        beside: MegatronTrainer | None = None,
    ) -> None:
        """Load the model of `model_path` and get ready to train.

        master: `runtime.open_address` of rank 0, where the ranks meet (not needed by one rank alone).
        total_steps: batches of the run; the learning rate schedules end there.
        adapt_only: freeze everything but the draft and train it by `adapt_step`, whatever mtp.train says.
        ppow: settings of mtp.objective=ppow, None for the defaults. seed: of its windows, drafts and coins.
        beside: a trainer of this process whose ranks and groups it uses too; close this one first.
        Raises ValueError for impossible sizes, unknown algorithm names or an unsupported checkpoint.
        """
        self._hf_config = read_config(model_path)
        check_parallel(config, self._hf_config, world_size)
        check_names(algo)
        self._online = mtp.online and not adapt_only
        if adapt_only or self._online:
            check_draft(mtp, self._hf_config, str(model_path))
        self._config, self._algo, self._mtp, self._path = config, algo, mtp, Path(model_path)
        self._adapt_only = adapt_only
        self._temperature = 1.0  # of the batch in hand
        self._guest = beside is not None
        if beside is not None:
            self._runtime = beside._runtime
        else:
            self._runtime = runtime.start(config, rank=rank, world_size=world_size, master=master)
        self._passes = Passes(self._runtime)
        try:
            self._build(mtp, total_steps * (1 if adapt_only else algo.optimizer_steps), ppow, seed)
        except BaseException:
            self.close()
            raise
        self.policy_version = 0
        self.rule = make_rule(algo)

    def _build(self, mtp: MtpConfig, optimizer_steps: int, ppow: PpowConfig | None, seed: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        from rlpipe.trainer.draft import Draft
        from rlpipe.trainer.hf_bridge import load_hf_weights
        from rlpipe.trainer.model import build_model
        from rlpipe.trainer.optimizer import PolicyOptimizer
        from rlpipe.trainer.ppow import Ppow

        windows = mtp.ppow and (self._online or self._adapt_only)
        if windows and self._runtime.te:
            raise ValueError(
                "mtp.objective=ppow reads keys of finished passes, which TransformerEngine's attention keeps "
                "to itself: set trainer.layers=local."
            )
        weights = read_weights(self._path)

        def load_policy() -> Any:
            model = build_model(self._hf_config, self._config, self._runtime)
            load_hf_weights(model, self._hf_config, weights)
            return model

        self.model = load_policy().requires_grad_(not self._adapt_only)
        if self.model.mtp_process:
            self.model.mtp.requires_grad_(self._online or self._adapt_only)
        wants_reference = self._algo.kl_coef and not self._adapt_only
        self._reference = load_policy().requires_grad_(False) if wants_reference else None
        self._draft, self._ppow = Draft(mtp, self._runtime), None
        if windows:
            updates = max(1, optimizer_steps // mtp.interval)
            self._ppow = Ppow(
                ppow or PpowConfig(), self._runtime, depths=mtp.depths, steps=updates, seed=seed
            )
        sharded = self._config.distributed_optimizer
        self._wrapped = DistributedDataParallel(
            self.model.config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded),
            self.model,
        )
        self.model.config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = PolicyOptimizer(self._config, mtp, self._wrapped, optimizer_steps)
        self._dp_rank = parallel_state.get_data_parallel_rank()
        self._dp_group = parallel_state.get_data_parallel_group()

    @property
    def hf_config(self) -> Mapping[str, Any]:
        """`config.json` of the model."""
        return self._hf_config

    @property
    def device(self) -> torch.device:
        """Where this rank's weights are."""
        return self._runtime.device

    @property
    def trains_draft(self) -> bool:
        """Whether the draft learns beside the policy."""
        return self._online

    @property
    def shares_prefixes(self) -> bool:
        """See `Passes`."""
        return self._passes.shares_prefixes

    def train_step(self, batch: PackedBatch) -> dict[str, Value]:
        """One or more optimizer steps on a batch (ppo_epochs * minibatches).

        Returns metrics already reduced over all ranks, the same on each. A step whose gradient is not
        finite is left out and counted in `actor/skipped_steps`, and so is one without trainable tokens. One
        whose gradient is 0, because no advantage differs from 0, is left out and counted in
        `actor/idle_steps`.
        """
        start = time.perf_counter()
        steps = self.steps(batch)
        while True:
            try:
                next(steps)
            except StopIteration as done:
                return done.value | {"timing_s/update_actor": Mean(time.perf_counter() - start, 1)}

    def steps(
        self, batch: PackedBatch, companion: Companion | None = None
    ) -> Generator[None, None, dict[str, Value]]:
        """`train_step` in pieces: yields before each optimizer step, when its gradient is there.

        companion: sees every micro-batch and may change its loss. Returns what train_step does, without time.
        """
        if self._adapt_only:
            raise ValueError(
                "this trainer was built with adapt_only=True: its policy is frozen, use adapt_step."
            )
        minibatches, self._temperature = batch.minibatches, batch.temperature
        shards = [m.shards[self._dp_rank] for m in minibatches]
        scored = self._algo.needs_start_logprobs
        ahead = self.rule is not None and self.rule.target_at_start
        score = partial(self._passes.scores, temperature=batch.temperature)
        old = [score(self.model, s, candidates=ahead) if scored else None for s in shards]
        reference = [score(self._reference, s) if self._reference else None for s in shards]
        mine: list[dict[str, Value]] = []
        shared: list[dict[str, Value]] = []
        for _ in range(self._algo.ppo_epochs):
            for minibatch, shard, old_scores, reference_scores in zip(
                minibatches, shards, old, reference, strict=True
            ):
                metrics, stats = self._backward(minibatch, shard, old_scores, reference_scores, companion)
                mine += metrics
                yield
                shared.append(self._apply(minibatch, stats))
        total = finish(reduce([*self._gather(reduce(mine)), *shared]))
        if self.rule is not None:
            self.rule.observe(total)
        return total

    def adapt_step(self, batch: PackedBatch) -> dict[str, Value]:
        """Optimizer steps of the draft alone, one per minibatch; the backbone runs without gradients.

        Returns mtp/* metrics, reduced over all ranks. A step whose gradient is not finite is left out and
        counted in `mtp/skipped_steps`, and so is one in which nothing is drafted.
        Raises ValueError unless the trainer was built with adapt_only=True.
        """
        if not self._adapt_only:
            raise ValueError("adapt_step trains the draft alone: build the trainer with adapt_only=True.")
        start = time.perf_counter()
        self._temperature = batch.temperature
        steps = []
        for minibatch in batch.minibatches:
            self._wrapped.zero_grad_buffer()
            self.optimizer.zero_grad()
            shard = minibatch.shards[self._dp_rank]
            stats = self._learned(self._run_draft(self._wrapped, shard, forward_only=False))
            steps.append(self._apply(minibatch, stats))
        return reduce(steps) | {"timing_s/update_actor": Mean(time.perf_counter() - start, 1)}

    def mtp_stats(self, batch: PackedBatch) -> MtpStats:
        """Teacher-forced statistics of the draft on a batch, expected verify steps included; on every rank.

        Changes nothing. Raises ValueError when the checkpoint has no draft.
        """
        check_draft(self._mtp, self._hf_config, str(self._path))
        self._temperature = batch.temperature
        with torch.no_grad():
            shards = [m.shards[self._dp_rank] for m in batch.minibatches]
            return self._total(s for shard in shards for s in self._run_draft(self.model, shard, True))

    def freeze_draft(self) -> None:
        """No longer train the draft beside the policy."""
        self._online = False

    def draft_tables(self, batch: PackedBatch) -> list[Table | None]:
        """Draft and target at every context of every packed trajectory (None: it has none); on every rank.

        Changes nothing. Raises ValueError when the checkpoint has no draft.
        """
        check_draft(self._mtp, self._hf_config, str(self._path))
        self._temperature = batch.temperature
        found: dict[int, Table] = {}
        with torch.no_grad():
            for minibatch in batch.minibatches:
                shard = minibatch.shards[self._dp_rank]
                for part in schedule(self.model, shard, self._tabled, forward_only=True):
                    found |= part
        everywhere = {row: table for part in self._gather(found) for row, table in part.items()}
        return [everywhere.get(row) for row in range(len(batch.lengths))]

    def _tabled(self, index: int, micro: MicroBatch) -> Any:
        """A step of Megatron's schedule that ends in `Draft.tables`."""
        hidden, *_ = self._passes.hidden(self.model, micro)

        def finish_micro(hidden: torch.Tensor) -> Any:
            return hidden.sum(), self._draft.tables(self.model, micro, hidden, self._temperature)

        return hidden, finish_micro

    def logprobs(self, batch: PackedBatch) -> list[list[float]]:
        """Current logprobs of every packed trajectory, parallel to its token_ids, on every rank.

        0.0 where loss_mask is 0, and throughout trajectories that `pack` left out.
        """
        found: dict[int, np.ndarray] = {}
        for minibatch in batch.minibatches:
            shard = minibatch.shards[self._dp_rank]
            scores = self._passes.scores(self.model, shard, temperature=batch.temperature)
            for micro, score in zip(shard, scores, strict=True):
                values, mask = score.logprobs.cpu().numpy(), micro.mask > 0
                for b in np.flatnonzero(micro.rows >= 0):
                    line = np.zeros(batch.lengths[micro.rows[b]], dtype=np.float32)
                    line[micro.indices[b, mask[b]]] = values[b, mask[b]]
                    found[int(micro.rows[b])] = line
        everywhere = {row: line for part in self._gather(found) for row, line in part.items()}
        return [
            everywhere[row].tolist() if row in everywhere else [0.0] * length
            for row, length in enumerate(batch.lengths)
        ]

    def weight_buckets(self, megabytes: int, dtype: torch.dtype) -> Iterable[Bucket]:
        """Target and MTP weights under HF names, by buckets gathered one after the other; see `hf_bridge`.

        Every rank must iterate to the end; there is something to see on rank 0 only.
        """
        from rlpipe.trainer.hf_bridge import weight_buckets

        if self._dp_rank:
            return ()  # another replica has the same
        return weight_buckets(self.model, self._hf_config, megabytes=megabytes, dtype=dtype)

    def bucket_plan(self, megabytes: int, dtype: torch.dtype) -> list[Bucket]:
        """What `weight_buckets` will show, as tensors on the meta device."""
        from rlpipe.trainer.hf_bridge import bucket_plan

        return bucket_plan(self.model, self._hf_config, megabytes=megabytes, dtype=dtype)

    def export_weights(self) -> dict[str, torch.Tensor] | None:
        """Target and MTP weights under HF names, full, on the CPU; None on ranks other than 0."""
        from rlpipe.trainer.hf_bridge import export_hf_weights

        return None if self._dp_rank else export_hf_weights(self.model, self._hf_config)

    def save(self, directory: str | Path) -> None:
        """Everything a resumed run needs; the directory appears when it is complete."""
        from rlpipe.trainer.checkpoint import save

        save(self, Path(directory))

    def begin_save(self, directory: str | Path, hf: str | Path) -> list[Saving | SavingHf]:
        """Copy what `save` and `save_hf` would write into these directories, to be written later."""
        from rlpipe.trainer.checkpoint import SavingHf, begin_save

        weights = SavingHf(self.export_weights(), Path(hf), like=self._path)
        return [begin_save(self, Path(directory)), weights]

    def load(self, directory: str | Path) -> None:
        """Continue from `save`, with any tp and dp."""
        from rlpipe.trainer.checkpoint import load

        load(self, Path(directory))

    def save_hf(self, directory: str | Path) -> None:
        """A Hugging Face checkpoint: backbone, MTP, config, tokenizer, in the dtypes of the original."""
        from rlpipe.trainer.checkpoint import save_hf

        save_hf(self.export_weights(), Path(directory), like=self._path)

    def close(self) -> None:
        """Leave the process group, unless it is another trainer's."""
        if not self._guest:
            runtime.stop()

    def _backward(
        self,
        minibatch: MiniBatch,
        shard: Sequence[MicroBatch],
        old: list[Scores] | None,
        reference: list[Scores] | None,
        companion: Companion | None = None,
    ) -> tuple[list[dict[str, Value]], MtpStats | PpowTotals | None]:
        """Accumulate the minibatch's gradient, reduced over ranks.

        Returns metrics of each micro-batch, and the draft's statistics over all ranks (None: it is not due).
        """
        drafts = self._online and (self.policy_version + 1) % self._mtp.interval == 0
        extra = minibatch.draft_shards[self._dp_rank] if drafts else []
        count = len(shard) + len(extra)
        totals = LossTotals(
            tokens=max(1, minibatch.tokens), sequences=max(1, minibatch.sequences), dp_size=self._config.dp
        )
        self._wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

        def loss_of(index: int, micro: MicroBatch, found: Predictions) -> Any:
            move = self._runtime.to_device
            start = None if old is None else old[index]
            loss, metrics = micro_batch_loss(
                logprobs=found.logprobs,
                entropies=found.entropies,
                old_logprobs=found.logprobs.detach() if start is None else start.logprobs,
                rollout_logprobs=move(micro.rollout_logprobs),
                advantages=move(micro.advantages),
                mask=move(micro.mask),
                reference_logprobs=None if reference is None else reference[index].logprobs,
                totals=totals,
                config=self._algo,
                rule=self.rule,
                extras=None if self.rule is None else self._extras(micro, found, start),
            )
            if companion is not None:
                loss, more = companion.watch(index, micro, found, loss, totals)
                metrics |= more
            stats = None
            if drafts:
                draft_loss, stats = self._draft_loss(self.model, micro, found.hidden, found.layout)
                loss = loss + draft_loss
            return loss * count, (metrics, stats)  # Megatron divides by the number of micro-batches

        keep = drafts and self._ppow is not None
        teach = self._passes.forward(self._wrapped, loss_of, self._temperature, keep)
        draft = self._draft_forward(self.model, count, forward_only=False)

        def forward(index: int, micro: MicroBatch) -> Any:
            return teach(index, micro) if index < len(shard) else draft(index, micro)

        done = schedule(self._wrapped, [*shard, *extra], forward, forward_only=False)
        metrics = [metrics for metrics, _ in done[: len(shard)]]
        parts = [*(stats for _, stats in done[: len(shard)]), *done[len(shard) :]]
        return metrics, self._learned(parts) if drafts else None

    def _draft_loss(
        self, policy: Any, micro: MicroBatch, hidden: torch.Tensor, layout: BranchLayout | None
    ) -> tuple[torch.Tensor, MtpStats | PpowTotals]:
        """The draft's objective on a micro-batch: numerator and statistics.

        layout: of the backbone's pass, with keys if the objective reads them.
        """
        if self._ppow is None:
            return self._draft.loss(policy, micro, hidden, self._temperature)
        done = self.optimizer.updates["mtp"]
        return self._ppow.loss(policy, micro, hidden, layout.release(), self._temperature, done)

    def _learned(self, parts: Iterable[Any]) -> MtpStats | PpowTotals:
        """Statistics of the draft's objective over micro-batches and ranks."""
        from rlpipe.trainer.draft import total

        if self._ppow is None:
            return self._total(parts)
        return total(parts, PpowTotals.nothing(self._runtime.device), self._dp_group)

    def _extras(self, micro: MicroBatch, found: Predictions, start: Scores | None) -> TokenExtras:
        """What the rule asked for: columns, the rollout's candidates and what its target gives to them."""
        own, move = micro.candidates, self._runtime.to_device
        columns = {name: move(values) for name, values in micro.columns.items()}
        if own is None:
            return TokenExtras(columns=columns)
        ahead = None if start is None else start.candidates
        target = found.of(move(own.ids)) if ahead is None else ahead
        return TokenExtras(columns=columns, rollout_top=move(own.logprobs), target_top=target)

    def _apply(self, minibatch: MiniBatch, stats: MtpStats | PpowTotals | None) -> dict[str, Value]:
        """Step the optimizer; metrics that are the same on every rank.

        stats: of the draft, if it is to be stepped.
        """
        metrics: dict[str, Value] = {} if stats is None else stats.metrics()
        groups = ([] if self._adapt_only else ["policy"]) + ([] if stats is None else ["mtp"])
        scales = dict.fromkeys(groups, 1.0)
        if stats is not None:  # gradients are means over ranks of what the numerator of the loss gives
            weight = stats.weight.item()
            scales["mtp"] = self._config.dp / weight if weight else 0.0
        outcome = self.optimizer.step(scales) if minibatch.tokens else None
        idle = outcome is not None and outcome.grad_norms.get("policy") == 0
        for tag in groups:
            name = {"policy": "actor", "mtp": "mtp"}[tag]
            done = outcome is not None and tag in outcome.applied
            rests = idle and tag == "policy"
            metrics[f"{name}/skipped_steps"] = Sum(not done and not rests)
            if outcome is not None and tag in outcome.lrs:
                metrics[f"{name}/lr"] = Last(outcome.lrs[tag])
            if done:
                metrics[f"{name}/grad_norm"] = Mean(outcome.grad_norms[tag], 1)
        if outcome is not None:
            self.policy_version += bool(outcome.applied) or idle
        if self._adapt_only:
            return metrics
        metrics["actor/idle_steps"] = Sum(idle)
        return metrics if outcome is None else metrics | optimizer_step_count(self._algo)

    def _run_draft(self, model: Any, shard: Sequence[MicroBatch], forward_only: bool) -> list[MtpStats]:
        """The draft over micro-batches, from a backbone without gradients; statistics of each.

        forward_only: teacher-forced statistics, whatever the objective.
        """
        forward = self._draft_forward(getattr(model, "module", model), len(shard), forward_only)
        return schedule(model, shard, forward, forward_only=forward_only)

    def _draft_forward(
        self, policy: Any, count: int, forward_only: bool
    ) -> Callable[[int, MicroBatch], tuple[torch.Tensor, Any]]:
        """A step of Megatron's schedule over `count` micro-batches that ends in the draft's loss."""

        def forward(index: int, micro: MicroBatch) -> tuple[torch.Tensor, Any]:
            keep = self._ppow is not None and not forward_only
            with torch.no_grad():
                hidden, _, layout = self._passes.hidden(policy, micro, keep)

            def finish_micro(hidden: torch.Tensor) -> Any:
                if forward_only:
                    return self._draft.loss(policy, micro, hidden, self._temperature)
                loss, stats = self._draft_loss(policy, micro, hidden, layout)
                return loss * count, stats

            return hidden, finish_micro

        return forward

    def _total(self, parts: Iterable[MtpStats]) -> MtpStats:
        """The draft's statistics over micro-batches and ranks."""
        from rlpipe.trainer.draft import no_stats, total

        return total(parts, no_stats(self._mtp.depths, self._runtime.device), self._dp_group)

    def _gather(self, part: Any) -> list[Any]:
        """One object of each data parallel rank, on all of them."""
        if self._config.dp == 1:
            return [part]
        parts: list[Any] = [None] * self._config.dp
        dist.all_gather_object(parts, part, group=self._dp_group)
        return parts
