"""The trainer: packed batches in, optimizer steps and weights out, on Megatron-core.

Owns one rank of the policy, its optimizer and its version. The algorithm (loss, correction) is
`rlpipe.algo`, CPU or GPU is `runtime`, weights are `hf_bridge`, files are `checkpoint`.

A step: for each minibatch, Megatron's schedule runs forward and backward over this rank's micro-batches
and reduces gradients; norms are clipped per group; AdamW steps. The MTP layer is not run: it is frozen,
and the policy's gradient does not need it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlpipe.algo.policy_loss import LossTotals, check_names, finish, micro_batch_loss, optimizer_step_count
from rlpipe.config.algo import AlgoConfig
from rlpipe.config.mtp import MtpConfig, MtpTrain
from rlpipe.config.trainer import TrainerConfig, check_parallel
from rlpipe.hf_layout import read_config, read_weights
from rlpipe.metrics.values import Last, Mean, Sum, Value, reduce
from rlpipe.trainer import runtime
from rlpipe.trainer.batch import MicroBatch, MiniBatch, PackedBatch

Scores = list[torch.Tensor]  # per micro-batch [B, R] float32


class MegatronTrainer:
    """One rank of the trainer; every method is collective: call it on all ranks, in the same order.

    policy_version: optimizer steps applied so far; a skipped step does not count.
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
    ) -> None:
        """Load the model of `model_path` and get ready to train.

        master: `host:port` of rank 0, where the ranks meet (not needed by one rank alone).
        total_steps: batches of the run; the learning rate schedule ends there.
        Raises ValueError for impossible sizes, unknown algorithm names or an unsupported checkpoint.
        """
        self._hf_config = read_config(model_path)
        check_parallel(config, self._hf_config, world_size)
        check_names(algo)
        self._config, self._algo, self._path = config, algo, Path(model_path)
        self._temperature = 1.0  # of the batch in hand
        self._runtime = runtime.start(config, rank=rank, world_size=world_size, master=master)
        try:
            self._build(mtp, total_steps * algo.optimizer_steps)
        except BaseException:
            runtime.stop()
            raise
        self.policy_version = 0

    def _build(self, mtp: MtpConfig, optimizer_steps: int) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        from rlpipe.trainer.hf_bridge import load_hf_weights
        from rlpipe.trainer.model import build_model
        from rlpipe.trainer.optimizer import PolicyOptimizer

        weights = read_weights(self._path)

        def load_policy() -> Any:
            model = build_model(self._hf_config, self._config, self._runtime)
            load_hf_weights(model, self._hf_config, weights)
            return model

        self.model = load_policy()
        if mtp.train is MtpTrain.FROZEN and self.model.mtp_process:
            self.model.mtp.requires_grad_(False)
        self._reference = load_policy().requires_grad_(False) if self._algo.kl_coef else None
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
    def shares_prefixes(self) -> bool:
        """Whether batches may share prefixes: TransformerEngine's attention reads padded rows only."""
        return not self._runtime.te

    def train_step(self, batch: PackedBatch) -> dict[str, Value]:
        """One or more optimizer steps on a batch (ppo_epochs * minibatches).

        Returns metrics already reduced over all ranks, the same on each. A step whose gradient is not
        finite is left out and counted in `actor/skipped_steps`, and so is one without trainable tokens.
        """
        start = time.perf_counter()
        minibatches, self._temperature = batch.minibatches, batch.temperature
        shards = [m.shards[self._dp_rank] for m in minibatches]
        several = self._algo.optimizer_steps > 1
        old = [self._scores(self.model, s) if several else None for s in shards]
        reference = [self._scores(self._reference, s) if self._reference else None for s in shards]
        mine: list[dict[str, Value]] = []
        shared: list[dict[str, Value]] = []
        for _ in range(self._algo.ppo_epochs):
            for minibatch, shard, old_scores, reference_scores in zip(
                minibatches, shards, old, reference, strict=True
            ):
                metrics = self._backward(minibatch, shard, old_scores, reference_scores)
                mine += metrics
                shared.append(self._apply(minibatch))
        total = finish(reduce([*self._gather(reduce(mine)), *shared]))
        total["timing_s/update_actor"] = Mean(time.perf_counter() - start, 1)
        return total

    def logprobs(self, batch: PackedBatch) -> list[list[float]]:
        """Current logprobs of every packed trajectory, parallel to its token_ids, on every rank.

        0.0 where loss_mask is 0, and throughout trajectories that `pack` left out.
        """
        self._temperature = batch.temperature
        found: dict[int, np.ndarray] = {}
        for minibatch in batch.minibatches:
            shard = minibatch.shards[self._dp_rank]
            scores = self._scores(self.model, shard)
            for micro, score in zip(shard, scores, strict=True):
                values, mask = score.cpu().numpy(), micro.mask > 0
                for b in np.flatnonzero(micro.rows >= 0):
                    line = np.zeros(batch.lengths[micro.rows[b]], dtype=np.float32)
                    line[micro.indices[b, mask[b]]] = values[b, mask[b]]
                    found[int(micro.rows[b])] = line
        everywhere = {row: line for part in self._gather(found) for row, line in part.items()}
        return [
            everywhere[row].tolist() if row in everywhere else [0.0] * length
            for row, length in enumerate(batch.lengths)
        ]

    def export_weights(self) -> dict[str, torch.Tensor] | None:
        """Target and MTP weights under HF names, full, on the CPU; None on ranks other than 0."""
        from rlpipe.trainer.hf_bridge import export_hf_weights

        weights = export_hf_weights(self.model, self._hf_config)
        return weights if self._runtime.rank == 0 else None

    def save(self, directory: str | Path) -> None:
        """Everything a resumed run needs; the directory appears when it is complete."""
        from rlpipe.trainer.checkpoint import save

        save(self, Path(directory))

    def load(self, directory: str | Path) -> None:
        """Continue from `save`, with any tp and dp."""
        from rlpipe.trainer.checkpoint import load

        load(self, Path(directory))

    def save_hf(self, directory: str | Path) -> None:
        """A Hugging Face checkpoint: backbone, MTP, config, tokenizer, in the dtypes of the original."""
        from rlpipe.trainer.checkpoint import save_hf

        save_hf(self.export_weights(), Path(directory), like=self._path)

    def close(self) -> None:
        """Leave the process group."""
        runtime.stop()

    def _backward(
        self,
        minibatch: MiniBatch,
        shard: Sequence[MicroBatch],
        old: Scores | None,
        reference: Scores | None,
    ) -> list[dict[str, Value]]:
        """Accumulate the minibatch's gradient, reduced over ranks; metrics of each micro-batch."""
        totals = LossTotals(
            tokens=max(1, minibatch.tokens), sequences=max(1, minibatch.sequences), dp_size=self._config.dp
        )
        self._wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

        def loss_of(index: int, micro: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor) -> Any:
            move = self._runtime.to_device
            loss, metrics = micro_batch_loss(
                logprobs=logprobs,
                entropies=entropies,
                old_logprobs=logprobs.detach() if old is None else old[index],
                rollout_logprobs=move(micro.rollout_logprobs),
                advantages=move(micro.advantages),
                mask=move(micro.mask),
                reference_logprobs=None if reference is None else reference[index],
                totals=totals,
                config=self._algo,
            )
            return loss * len(shard), metrics  # Megatron divides by the number of micro-batches

        return self._run(self._wrapped, shard, loss_of, forward_only=False)

    def _apply(self, minibatch: MiniBatch) -> dict[str, Value]:
        """Step the optimizer; metrics that are the same on every rank."""
        if minibatch.tokens == 0:
            return {"actor/skipped_steps": Sum(1)}
        outcome = self.optimizer.step()
        self.policy_version += outcome.applied
        metrics: dict[str, Value] = {
            "actor/skipped_steps": Sum(not outcome.applied),
            "actor/lr": Last(outcome.lrs["policy"]),
        }
        if outcome.applied:
            metrics["actor/grad_norm"] = Mean(outcome.grad_norms["policy"], 1)
        return metrics | optimizer_step_count(self._algo)

    def _scores(self, model: Any, shard: Sequence[MicroBatch]) -> Scores:
        """Logprobs of the targets under a model, without a graph."""

        def keep(index: int, micro: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor) -> Any:
            return logprobs.sum(), logprobs

        with torch.no_grad():
            return self._run(model, shard, keep, forward_only=True)

    def _run(self, model: Any, shard: Sequence[MicroBatch], use: Any, forward_only: bool) -> list:
        """Megatron's schedule over micro-batches; `use(index, micro, logprobs, entropies)` ends each one."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from rlpipe.trainer.logprobs import token_logprobs

        policy = getattr(model, "module", model)
        move = self._runtime.to_device

        def forward_step(numbered: Iterator[tuple[int, MicroBatch]], _: Any) -> Any:
            index, micro = next(numbered)
            select = move(micro.mask) > 0
            logits = self._logits(policy, micro)

            def finish_micro(output: torch.Tensor) -> Any:
                logprobs, entropies = token_logprobs(
                    output,
                    move(micro.targets),
                    temperature=self._temperature,
                    vocab_start=policy.vocab_start,
                    group=policy.pg_collection.tp,
                )
                grid = torch.zeros(select.shape, dtype=torch.float32, device=select.device)
                return use(index, micro, *(grid.masked_scatter(select, x) for x in (logprobs, entropies)))

            return logits, finish_micro

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=enumerate(shard),
            model=model,
            num_microbatches=len(shard),
            seq_length=1,  # the schedule without pipelining reads neither size
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _logits(self, policy: Any, micro: MicroBatch) -> torch.Tensor:
        """Logits [P, V_local] of a micro-batch's predictions."""
        from rlpipe.trainer.layers import BranchLayout

        move = self._runtime.to_device
        if not self.shares_prefixes:
            tokens, sources = micro.padded()
            return policy.forward_selected(move(tokens), move(sources))
        layout = BranchLayout(micro.branches, move(micro.positions), self._runtime.dtype)
        return policy.forward_selected(move(micro.tokens[None]), move(micro.sources), layout)

    def _gather(self, part: Any) -> list[Any]:
        """One object of each data parallel rank, on all of them."""
        if self._config.dp == 1:
            return [part]
        parts: list[Any] = [None] * self._config.dp
        dist.all_gather_object(parts, part, group=self._dp_group)
        return parts
