"""The trainer: packed batches in, optimizer steps and weights out, on Megatron-core.

Owns one rank of the policy, its optimizer and its version. Other modules: `rlpipe.algo` has the algorithm
(loss, correction), `passes` forward and backward passes, `draft` the draft's passes, `runtime` the choice of
CPU or GPU, `hf_bridge` weights, and `checkpoint` files.

In a step, for each minibatch, Megatron's schedule runs forward and backward passes over this rank's
micro-batches and reduces gradients; then gradients are clipped by the norm of their group, and AdamW steps. A
frozen draft (MTP layer) does not run, as the policy's gradient does not need it. With draft.train=online the
draft learns from the hidden states of the same pass (`draft`), and none of its gradient reaches the policy.
With draft.objective=ppow it drafts windows from these states and learns from them (`ppow`). With adapt_only
only the draft is trained (`adapt_step`).
"""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlpipe.algo.correction import make_rule
from rlpipe.algo.policy_loss import (
    LossInputs,
    LossTotals,
    check_names,
    finish,
    micro_batch_loss,
    optimizer_step_count,
)
from rlpipe.batching.micro_batch import MicroBatch, MiniBatch, PackedBatch
from rlpipe.config.algo import AlgoConfig
from rlpipe.config.draft import DraftConfig, check_draft
from rlpipe.config.ppow import PpowConfig
from rlpipe.config.trainer import TrainerConfig, check_parallel, for_model
from rlpipe.metrics.values import Mean, Value, reduce
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.models.delta_net import check_kernel
from rlpipe.trainer import runtime
from rlpipe.trainer.passes import Companion, Passes, Predictions, Scores, schedule

if TYPE_CHECKING:
    from rlpipe.drafts.loss import MtpStats
    from rlpipe.drafts.tables import Table
    from rlpipe.trainer.checkpoint import Saving, SavingHf
    from rlpipe.trainer.draft import DraftStats
    from rlpipe.trainer.hf_bridge import Bucket
    from rlpipe.trainer.model import PolicyModel


class MegatronTrainer:
    """One rank of the trainer; every method is collective: call it on all ranks, in the same order.

    policy_version: number of updates so far, including those with a zero gradient but not skipped ones. rule:
    the correction, with its state from earlier batches.
    """

    def __init__(
        self,
        config: TrainerConfig,
        algo: AlgoConfig,
        mtp: DraftConfig,
        *,
        model_path: str | Path,
        rank: int = 0,
        world_size: int = 1,
        master: str | None = None,
        total_steps: int,
        adapt_only: bool = False,
        ppow: PpowConfig | None = None,
        draft_vocab: Sequence[int] | None = None,
        seed: int = 0,
        host: MegatronTrainer | None = None,
    ) -> None:
        """Load the model of `model_path` and prepare to train.

        master: the result of `runtime.open_address` on rank 0, to which the ranks connect (not needed by a
        single rank). total_steps: batches of the run; the learning rate schedules end there.
        adapt_only: freeze everything but the draft and train it by `adapt_step`; draft.train is ignored.
        ppow: settings of draft.objective=ppow, None for the defaults. seed: for windows, drafts and random
        numbers. draft_vocab: the draft's vocabulary (`spec.draft_vocab`), None for all.
        host: another trainer of this process, whose ranks and groups are used here; close it after this
        trainer. Raises ValueError for impossible sizes, unknown algorithm names or an unsupported checkpoint.
        """
        self._hf_config = read_config(model_path)

        # Refuse impossible settings before any process group or model exists.
        check_parallel(config, self._hf_config, world_size)
        if not adapt_only:
            check_names(algo)
        config = for_model(config, self._hf_config)
        self._online = mtp.online and not adapt_only
        if adapt_only or self._online:
            check_draft(mtp, self._hf_config, str(model_path))

        # A trainer with a host uses the host's process group.
        self._config, self._algo, self._mtp, self._path = config, algo, mtp, Path(model_path)
        self._adapt_only = adapt_only
        self._temperature = 1.0  # of the current batch
        self._draft_vocab = draft_vocab
        self._is_guest = host is not None
        if host is not None:
            self._runtime = host._runtime
        else:
            self._runtime = runtime.start(config, rank=rank, world_size=world_size, master=master)
        self._passes = Passes(self._runtime)

        # Leave the process group if building fails, so that another trainer can start.
        try:
            optimizer_steps = total_steps * (1 if adapt_only else algo.optimizer_steps)
            self._build(mtp, optimizer_steps=optimizer_steps, ppow=ppow, seed=seed)
        except BaseException:
            self.close()
            raise

        self.policy_version = 0
        self.rule = make_rule(algo)

    def _build(self, mtp: DraftConfig, *, optimizer_steps: int, ppow: PpowConfig | None, seed: int) -> None:
        """Build the draft's passes, the models and the optimizer."""
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        from rlpipe.trainer.draft import DraftPasses
        from rlpipe.trainer.hf_bridge import load_hf_weights
        from rlpipe.trainer.model import build_model
        from rlpipe.trainer.optimizer import PolicyOptimizer
        from rlpipe.trainer.reduction import OrderedReduction

        self._dp_rank = parallel_state.get_data_parallel_rank()
        self._dp_group: Any = parallel_state.get_data_parallel_group()

        # Only one replica of the weights exports them; its experts are spread over `ep` data parallel ranks.
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        self._exports = replica < self._config.ep

        windows = (ppow or PpowConfig()) if mtp.windows and (self._online or self._adapt_only) else None
        self._drafting = DraftPasses(
            mtp,
            self._runtime,
            self._passes,
            group=self._dp_group,
            windows=windows,
            updates=optimizer_steps,
            seed=seed,
        )

        if self._runtime.device.type == "cuda" and read_architecture(self._hf_config).delta:
            check_kernel(str(self._path))

        def load_policy() -> PolicyModel:
            model = build_model(self._hf_config, self._config, self._runtime)
            load_hf_weights(model, self._hf_config, read_weights(self._path))
            if self._draft_vocab is not None:
                model.draft_ids = torch.tensor(self._draft_vocab, device=self._runtime.device)
            return model

        self.model = load_policy()
        self.model.learn(policy=not self._adapt_only, draft=self._online or self._adapt_only)

        # With LoRA, the policy without adapters is the reference: no second copy of the weights.
        self._reference: PolicyModel | None = None
        if self._algo.kl_coef and not self._adapt_only:
            lora = self._config.lora.active
            self._reference = self.model if lora else load_policy().requires_grad_(requires_grad=False)

        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=self._config.distributed_optimizer,
            overlap_grad_reduce=True,
        )
        self._wrapped = DistributedDataParallel(self.model.config, ddp, self.model)
        OrderedReduction(self._wrapped)
        self.optimizer = PolicyOptimizer(self._config, mtp, self._wrapped, steps=optimizer_steps)

    @property
    def hf_config(self) -> Mapping[str, Any]:
        """The model's `config.json`."""
        return self._hf_config

    @property
    def device(self) -> torch.device:
        """The device of this rank's weights."""
        return self._runtime.device

    @property
    def trains_draft(self) -> bool:
        """Whether the draft is co-trained with the policy."""
        return self._online

    @property
    def shares_prefixes(self) -> bool:
        """Whether batches may share prefixes."""
        return self._passes.shares_prefixes

    def train_step(self, batch: PackedBatch) -> dict[str, Value]:
        """Take one or more optimizer steps on a batch (ppo_epochs * minibatches).

        Returns metrics reduced over all ranks, the same on each. A step is skipped if its gradient is not
        finite or if it has no trainable tokens (counted in `actor/skipped_steps`), and if its gradient is 0
        because all advantages are 0 (counted in `actor/idle_steps`).
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
        """Run `train_step` stepwise: yield before each optimizer step, after its gradient is accumulated.

        companion: is called with every micro-batch and may change its loss. Returns the metrics of
        train_step, without the time.
        """
        if self._adapt_only:
            raise ValueError(
                "this trainer was built with adapt_only=True: its policy is frozen, use adapt_step."
            )
        minibatches, self._temperature = batch.minibatches, batch.temperature
        shards = [m.shards[self._dp_rank] for m in minibatches]
        score = partial(self._passes.scores, temperature=batch.temperature)

        # PPO's ratio compares the policy with itself before the first step.
        needs_old = self._algo.needs_start_logprobs
        candidates = self.rule is not None and self.rule.target_at_start
        old = [score(self.model, s, candidates=candidates) if needs_old else None for s in shards]

        # The reference is another model, so it routes tokens to experts by its own scores.
        with self.model.without_adapters():
            reference = [score(self._reference, s, replay=False) if self._reference else None for s in shards]

        local, shared = list[dict[str, Value]](), list[dict[str, Value]]()
        for _ in range(self._algo.ppo_epochs):
            for minibatch, shard, old_scores, reference_scores in zip(
                minibatches, shards, old, reference, strict=True
            ):
                metrics, stats = self._backward(
                    minibatch, shard, old=old_scores, reference=reference_scores, companion=companion
                )
                local += metrics
                yield
                shared.append(self._apply(minibatch, stats))

        total = finish(reduce([*runtime.gather_last(reduce(local), self._dp_group), *shared]))
        if self.rule is not None:
            self.rule.observe(total)
        return total

    def adapt_step(self, batch: PackedBatch) -> dict[str, Value]:
        """Step only the draft, once per minibatch; the backbone runs without gradients.

        Returns mtp/* metrics, reduced over all ranks. A step whose gradient is not finite, or in which no
        token is drafted, is skipped and counted in `mtp/skipped_steps`.
        Raises ValueError unless the trainer was built with adapt_only=True.
        """
        if not self._adapt_only:
            raise ValueError("adapt_step trains only the draft: build the trainer with adapt_only=True.")

        start = time.perf_counter()
        steps = []
        for minibatch in batch.minibatches:
            self._wrapped.zero_grad_buffer()
            self.optimizer.zero_grad()

            shard = minibatch.shards[self._dp_rank]
            forward = self._drafting.forward(
                self.model,
                count=len(shard),
                temperature=batch.temperature,
                updates=self.optimizer.updates["mtp"],
            )

            # All ranks need the same statistics, because these scale the step.
            parts = schedule(self._wrapped, shard, forward, forward_only=False)
            steps.append(self._apply(minibatch, self._drafting.sum_over_ranks(parts)))
        return reduce(steps) | {"timing_s/update_actor": Mean(time.perf_counter() - start, 1)}

    def mtp_stats(self, batch: PackedBatch) -> MtpStats:
        """Compute teacher-forced statistics of the draft on a batch, including expected verify steps.

        Returns the statistics on every rank; the trainer's state is unchanged. Raises ValueError when the
        checkpoint has no draft.
        """
        check_draft(self._mtp, self._hf_config, str(self._path))
        return self._drafting.statistics(self.model, self._shard(batch), batch.temperature)

    def freeze_draft(self) -> None:
        """Stop co-training the draft with the policy."""
        self._online = False

    def draft_tables(self, batch: PackedBatch) -> list[Table | None]:
        """Tabulate draft and target at every context of each packed trajectory (None if it has no context).

        Returns the tables on every rank; the trainer's state is unchanged. Raises ValueError when the
        checkpoint has no draft.
        """
        check_draft(self._mtp, self._hf_config, str(self._path))
        tables = self._drafting.tables(self.model, self._shard(batch), batch.temperature)
        tables_by_row = ChainMap(*runtime.gather_last(tables, self._dp_group))
        return [tables_by_row.get(row) for row in range(len(batch.lengths))]

    def candidate_scores(self, batch: PackedBatch) -> list[tuple[np.ndarray, np.ndarray] | None]:
        """Compute entropies [n] and log-probabilities of candidates [n, K] at a trajectory's sampled tokens.

        batch: packed with candidates. The result is -inf for padding, and None for a trajectory that `pack`
        left out. Returns it on every rank; the trainer's state is unchanged.
        """
        scores: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for part in self._passes.candidate_scores(self.model, self._shard(batch), batch.temperature):
            scores |= part
        by_row = ChainMap(*runtime.gather_last(scores, self._dp_group))
        return [by_row.get(row) for row in range(len(batch.lengths))]

    def logprobs(self, batch: PackedBatch) -> list[list[float]]:
        """Compute current logprobs of every packed trajectory, parallel to its token_ids, on every rank.

        They are 0.0 where loss_mask is 0, and at all tokens of trajectories that `pack` left out.
        """
        parts = []
        for minibatch in batch.minibatches:
            shard = minibatch.shards[self._dp_rank]
            parts.append(self._passes.logprobs_by_row(self.model, shard, batch))

        # Segments of one trajectory may be in several parts; a part is 0 where it has no token.
        totals = [np.zeros(length, dtype=np.float32) for length in batch.lengths]
        for part in chain.from_iterable(runtime.gather_last(parts, self._dp_group)):
            for row, values in part.items():
                totals[row] += values
        return [total.tolist() for total in totals]

    def weight_buckets(
        self, megabytes: int, dtype: torch.dtype, *, everywhere: bool = False
    ) -> Iterable[Bucket]:
        """Gather target and MTP weights under HF names, bucket by bucket; see `hf_bridge`.

        Every rank must iterate to the end. Only rank 0 gets the tensors or, if `everywhere`, every rank.
        """
        from rlpipe.trainer.hf_bridge import weight_buckets

        if not (self._exports or everywhere):
            return ()
        return weight_buckets(
            self.model, self._hf_config, megabytes=megabytes, dtype=dtype, everywhere=everywhere
        )

    def bucket_plan(self, megabytes: int, dtype: torch.dtype) -> list[Bucket]:
        """List the buckets of `weight_buckets`, as tensors on the meta device."""
        from rlpipe.trainer.hf_bridge import bucket_plan

        return bucket_plan(self.model, self._hf_config, megabytes=megabytes, dtype=dtype)

    def export_weights(self) -> dict[str, torch.Tensor] | None:
        """Gather full target and MTP weights under HF names, on the CPU; None on ranks other than 0."""
        from rlpipe.trainer.hf_bridge import export_hf_weights

        return export_hf_weights(self.model, self._hf_config) if self._exports else None

    def save(self, directory: str | Path) -> None:
        """Write all state that a resumed run needs; the directory gets its name when it is complete."""
        from rlpipe.trainer.checkpoint import save

        save(self, Path(directory))

    def begin_save(self, directory: str | Path, hf: str | Path) -> list[Saving | SavingHf]:
        """Copy the state that `save` and `save_hf` write, for writing it to these directories later."""
        from rlpipe.trainer.checkpoint import SavingHf, begin_save

        # Return freed memory to the system, else the copies would be allocated in addition to it.
        if self._runtime.device.type == "cpu":
            runtime.release_freed_memory()
        weights = SavingHf(self.export_weights(), Path(hf), like=self._path, draft_vocab=self._draft_vocab)
        return [begin_save(self, Path(directory)), weights]

    def load(self, directory: str | Path) -> None:
        """Load the state that `save` wrote; tp and dp may differ."""
        from rlpipe.trainer.checkpoint import load

        load(self, Path(directory))

    def save_hf(self, directory: str | Path) -> None:
        """Write a Hugging Face checkpoint: backbone, MTP, config, tokenizer, in the original dtypes."""
        from rlpipe.trainer.checkpoint import save_hf

        save_hf(self.export_weights(), Path(directory), like=self._path, draft_vocab=self._draft_vocab)

    def close(self) -> None:
        """Leave the process group, unless it belongs to another trainer."""
        if not self._is_guest:
            runtime.stop()

    def _shard(self, batch: PackedBatch) -> list[MicroBatch]:
        """List this rank's micro-batches of all minibatches."""
        return [micro_batch for m in batch.minibatches for micro_batch in m.shards[self._dp_rank]]

    def _backward(
        self,
        minibatch: MiniBatch,
        shard: Sequence[MicroBatch],
        *,
        old: list[Scores] | None,
        reference: list[Scores] | None,
        companion: Companion | None,
    ) -> tuple[list[dict[str, Value]], DraftStats | None]:
        """Accumulate the minibatch's gradient, reduced over ranks.

        Returns metrics of each micro-batch, and the draft's statistics over all ranks (None if the draft's
        interval skips this step).
        """
        drafts = self._online and (self.policy_version + 1) % self._mtp.interval == 0
        extra = minibatch.draft_shards[self._dp_rank] if drafts else []
        count = len(shard) + len(extra)
        temperature, updates = self._temperature, self.optimizer.updates.get("mtp", 0)

        # Guard the divisor: a batch may have no trainable token.
        totals = LossTotals(
            tokens=max(1, minibatch.tokens), sequences=max(1, minibatch.sequences), dp_size=self._config.dp
        )
        self._wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

        def loss_of(
            index: int, micro_batch: MicroBatch, predictions: Predictions
        ) -> tuple[torch.Tensor, tuple[dict[str, Value], DraftStats | None]]:
            move = self._runtime.to_device
            start = None if old is None else old[index]
            inputs = LossInputs(
                logprobs=predictions.logprobs,
                entropies=predictions.entropies,
                old_logprobs=predictions.logprobs.detach() if start is None else start.logprobs,
                rollout_logprobs=move(micro_batch.rollout_logprobs),
                advantages=move(micro_batch.advantages),
                mask=move(micro_batch.mask),
                reference_logprobs=None if reference is None else reference[index].logprobs,
            )
            loss, metrics = micro_batch_loss(
                inputs,
                totals,
                self._algo,
                rule=self.rule,
                extras=None if self.rule is None else self._passes.extras(micro_batch, predictions, start),
            )
            metrics |= predictions.replayed()

            if companion is not None:
                loss, companion_metrics = companion.watch(
                    index, micro_batch, predictions, loss=loss, totals=totals
                )
                metrics |= companion_metrics

            # The draft learns from the hidden states of the same pass.
            stats = None
            if drafts:
                draft_loss, stats = self._drafting.loss(
                    self.model,
                    micro_batch,
                    hidden=predictions.hidden,
                    layout=predictions.layout,
                    temperature=temperature,
                    updates=updates,
                )
                loss = loss + draft_loss
            return loss * count, (metrics, stats)  # Megatron divides by the number of micro-batches

        retain_keys = drafts and self._drafting.reads_keys
        policy_forward = self._passes.forward(
            self._wrapped, loss_of, temperature=temperature, retain_keys=retain_keys
        )
        draft_forward = self._drafting.forward(
            self.model, count=count, temperature=temperature, updates=updates
        )

        # One schedule runs both: the policy's micro-batches, then those that train only the draft.
        def forward(index: int, micro_batch: MicroBatch) -> Any:
            return (policy_forward if index < len(shard) else draft_forward)(index, micro_batch)

        results = schedule(self._wrapped, [*shard, *extra], forward, forward_only=False)
        metrics = [metrics for metrics, _ in results[: len(shard)]]
        parts = [*(stats for _, stats in results[: len(shard)]), *results[len(shard) :]]
        return metrics, self._drafting.sum_over_ranks(parts) if drafts else None

    def _apply(self, minibatch: MiniBatch, stats: DraftStats | None) -> dict[str, Value]:
        """Step the optimizer and return metrics that are the same on every rank.

        stats: the draft's statistics if the draft is stepped, else None.
        """
        metrics: dict[str, Value] = {} if stats is None else stats.metrics()
        groups = ([] if self._adapt_only else ["policy"]) + ([] if stats is None else ["mtp"])
        scales = dict.fromkeys(groups, 1.0)

        # The draft's loss was only a numerator, and gradients are means over ranks: divide by the
        # denominator.
        if stats is not None:
            weight = stats.weight.item()
            scales["mtp"] = self._config.dp / weight if weight else 0.0

        outcome = self.optimizer.step(scales if minibatch.tokens else {})
        self.policy_version += bool(outcome.applied or "policy" in outcome.idle)
        metrics |= outcome.metrics(groups)

        if minibatch.tokens and not self._adapt_only:
            metrics |= optimizer_step_count(self._algo)
        return metrics
