"""Trains two models on one batch: the policy, and the smaller actor that generated it (Jackpot Eq. 8).

Owns the actor's loss and the order of the two trainers; each is a full `MegatronTrainer` with a separate
optimizer, draft and checkpoint, in the same ranks. Each optimizer step consists of:

    policy   forward, backward of its loss (algo.correction=obrs: Eq. 5) ---- states of the sampled tokens
    actor    forward, backward of  ppo_coef * PPO (Eq. 6) + distill_coef * KL (Eq. 7)  <--+
    both     step

So the backbone of the policy runs only once. Its distributions at the sampled tokens are computed again from
the states of that pass by the policy's head, one micro-batch at a time. The actor does not affect the
policy's gradient. Between the two passes only the states of one update's sampled tokens are stored,
[tokens, H].

Eq. 7 averages over all sampled tokens, including those that OBRS rejects for the policy. The engines serve
the actor and its draft, and `draft_tables` measures this draft.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlpipe.algo.policy_loss import LossTotals, distillation_loss
from rlpipe.batching.micro_batch import MicroBatch, PackedBatch
from rlpipe.config.algo import AlgoConfig
from rlpipe.config.decoupled import DecoupledConfig, DistillKl
from rlpipe.drafts.loss.rows import Rows, resolve_backend, row_statistics
from rlpipe.metrics.values import Mean, Value
from rlpipe.trainer.megatron import MegatronTrainer
from rlpipe.trainer.passes import Predictions

if TYPE_CHECKING:
    import numpy as np
    import torch.distributed as dist

    from rlpipe.drafts.tables import Table
    from rlpipe.trainer.checkpoint import Saving, SavingHf

METRIC_NAMES = {  # metric of the actor's trainer -> reported name; mtp/* metrics are not renamed
    "actor/pg_loss": "decoupled/pg_loss",
    "actor/pg_clipfrac": "decoupled/pg_clipfrac",
    "actor/ppo_kl": "decoupled/ppo_kl",
    "actor/entropy": "decoupled/entropy",
    "actor/grad_norm": "decoupled/grad_norm",
    "actor/lr": "decoupled/lr",
    "actor/skipped_steps": "decoupled/skipped_steps",
    "rollout_corr/k3_kl": "decoupled/rollout_k3_kl",
    "training/rollout_probs_diff_max": "decoupled/rollout_probs_diff_max",
}


def divergences(
    actor_logits: torch.Tensor,
    policy_logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
) -> Rows:
    """Compute KL(p || q) and KL(q || p) of p = softmax(policy / T) and q = softmax(actor / T).

    Both logits are [P, V_local]; the policy's are constant. Where a group cuts the vocabulary, shards have
    equal size (padded with -inf). Returns `.kl` and `.reverse_kl`, each [P, 1], in nats, differentiable by
    actor_logits, z:

        d KL(p || q) / dz = (q - p) / T        d KL(q || p) / dz = q (log q - log p - KL(q || p)) / T

    >>> q, p = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    >>> rows = divergences(q, p)
    >>> round(rows.kl.item(), 3), round(rows.reverse_kl.item(), 3)
    (0.368, 0.511)
    """
    mask = torch.ones(len(actor_logits), 1, dtype=torch.bool, device=actor_logits.device)
    return row_statistics(
        actor_logits[:, None],
        policy_logits[:, None],
        mask,
        tokens=None,
        temperature=temperature,
        group=group,
        backend=resolve_backend("auto", actor_logits),
        needs_target=True,
    )


class DecoupledTrainer:
    """Replaces a `MegatronTrainer` in a run that trains `policy` and generates with `actor`.

    actor: built with `host=policy` and the settings of `DecoupledConfig.trainer` and `.algo`.
    algo: settings of the actor's loss. policy_version counts the policy's updates.
    """

    def __init__(
        self,
        policy: MegatronTrainer,
        actor: MegatronTrainer,
        *,
        config: DecoupledConfig,
        algo: AlgoConfig,
    ) -> None:
        self.policy, self.actor = policy, actor
        self._teacher = _Teacher()
        self._student = _Student(self._teacher, policy, config=config, algo=algo)

    @property
    def policy_version(self) -> int:
        """Optimizer steps applied to the policy so far."""
        return self.policy.policy_version

    @property
    def trains_draft(self) -> bool:
        """Whether the actor's draft is co-trained with it."""
        return self.actor.trains_draft

    @property
    def shares_prefixes(self) -> bool:
        """Whether batches may share prefixes."""
        return self.policy.shares_prefixes

    def train_step(self, batch: PackedBatch) -> dict[str, Value]:
        """Take the optimizer steps of both models on a batch.

        Returns the policy's metrics and, as `decoupled/*`, the actor's metrics and comparisons of the two
        models.
        """
        self._student.temperature = batch.temperature
        policy = _Steps(self.policy.steps(batch, self._teacher))
        actor = _Steps(self.actor.steps(batch, self._student))

        # Advance both, the policy first, as the actor reads the states of the policy's pass.
        updates = 0
        while not all([policy.advance(), actor.advance()]):
            updates += 1
        self._teacher.states.clear()

        renamed = {METRIC_NAMES.get(name, name): value for name, value in actor.metrics.items()}
        reported = {name: v for name, v in renamed.items() if name.startswith(("decoupled/", "mtp/"))}

        # Micro-batches report shares of the loss with a count of 0; count each update once.
        distill_loss = reported["decoupled/distill_loss"]
        assert isinstance(distill_loss, Mean)
        reported["decoupled/distill_loss"] = distill_loss.merge(Mean(0.0, updates))
        return (
            policy.metrics
            | reported
            | {
                "timing_s/update_actor": Mean(policy.seconds, 1),
                "timing_s/update_decoupled": Mean(actor.seconds, 1),
            }
        )

    def logprobs(self, batch: PackedBatch) -> list[list[float]]:
        """Return the policy's `MegatronTrainer.logprobs`."""
        return self.policy.logprobs(batch)

    def freeze_draft(self) -> None:
        """Freeze the actor's draft."""
        self.actor.freeze_draft()

    def draft_tables(self, batch: PackedBatch) -> list[Table | None]:
        """Return the actor's `MegatronTrainer.draft_tables`: its draft serves the rollouts."""
        return self.actor.draft_tables(batch)

    def candidate_scores(self, batch: PackedBatch) -> list[tuple[np.ndarray, np.ndarray] | None]:
        """Return the actor's `MegatronTrainer.candidate_scores`, [n] and [n, K]: it generates rollouts."""
        return self.actor.candidate_scores(batch)

    def export_weights(self) -> dict[str, torch.Tensor] | None:
        """Return the actor's `MegatronTrainer.export_weights`: the engines serve it."""
        return self.actor.export_weights()

    def save(self, directory: str | Path) -> None:
        """Save the policy to `directory` and the actor to its sibling (`of_the_actor`)."""
        self.policy.save(directory)
        self.actor.save(of_the_actor(directory))

    def begin_save(self, directory: str | Path, hf: str | Path) -> list[Saving | SavingHf]:
        """Begin to save both models; see `MegatronTrainer.begin_save`."""
        actor = self.actor.begin_save(of_the_actor(directory), of_the_actor(hf))
        return [*self.policy.begin_save(directory, hf), *actor]

    def load(self, directory: str | Path) -> None:
        """Load the state that `save` wrote."""
        self.policy.load(directory)
        self.actor.load(of_the_actor(directory))

    def save_hf(self, directory: str | Path) -> None:
        """Write Hugging Face checkpoints of both, in the layout of `save`."""
        self.policy.save_hf(directory)
        self.actor.save_hf(of_the_actor(directory))

    def close(self) -> None:
        """Leave the process group."""
        self.actor.close()
        self.policy.close()


def of_the_actor(directory: str | Path) -> Path:
    """Return the directory of the actor's part of a checkpoint.

    >>> str(of_the_actor("step_2/trainer"))
    'step_2/actor_trainer'
    """
    directory = Path(directory)
    return directory.with_name(f"actor_{directory.name}")


class _Teacher:
    """Companion of the policy's trainer: stores the states that predict sampled tokens, by micro-batch."""

    def __init__(self) -> None:
        self.states: dict[int, torch.Tensor] = {}

    def watch(
        self,
        index: int,
        micro_batch: MicroBatch,
        predictions: Predictions,
        *,
        loss: torch.Tensor,
        totals: LossTotals,
    ) -> tuple[torch.Tensor, dict[str, Value]]:
        """Store the states; the policy's loss does not change."""
        self.states[index] = predictions.states.detach()
        return loss, {}


class _Student:
    """Companion of the actor's trainer: adds the divergence from the policy to the actor's loss."""

    def __init__(
        self,
        teacher: _Teacher,
        policy: MegatronTrainer,
        *,
        config: DecoupledConfig,
        algo: AlgoConfig,
    ) -> None:
        self._teacher, self._policy, self._config, self._algo = teacher, policy, config, algo
        self.temperature = 1.0

    def watch(
        self,
        index: int,
        micro_batch: MicroBatch,
        predictions: Predictions,
        *,
        loss: torch.Tensor,
        totals: LossTotals,
    ) -> tuple[torch.Tensor, dict[str, Value]]:
        """Return the weighted sum of the actor's loss and the divergence, and metrics of both models."""
        config, model = self._config, self._policy.model
        loss = config.ppo_coef * loss

        # An empty micro-batch keeps this rank in step with the others.
        if not len(micro_batch.targets):
            return loss, {"decoupled/distill_loss": Mean(0.0, 0.0)}

        # Compute the policy's distribution from the states of its pass.
        with torch.no_grad():
            target = model.head(self._teacher.states[index])
        group, shard = model.pg_collection.tp, model.vocab_size // model.pg_collection.tp.size()
        rows = divergences(
            _padded(predictions.logits(), shard),
            _padded(target, shard),
            temperature=self.temperature,
            group=group if group.size() > 1 else None,
        )

        # Average by the rule of the policy loss, over all sampled tokens.
        mask = torch.from_numpy(micro_batch.mask).to(predictions.logprobs)
        divergence = rows.kl if config.distill_kl is DistillKl.FORWARD else rows.reverse_kl
        grid = torch.zeros_like(predictions.logprobs).masked_scatter(mask > 0, divergence[:, 0])
        distillation, share = distillation_loss(grid, mask, totals=totals, config=self._algo)
        if config.distill_coef:
            loss = loss + config.distill_coef * distillation

        return loss, {
            "decoupled/distill_loss": share,
            "decoupled/kl": _mean(rows.kl),
            "decoupled/reverse_kl": _mean(rows.reverse_kl),
            "decoupled/overlap": _mean(rows.alpha),
        }


class _Steps:
    """One trainer's optimizer steps, run one at a time. seconds: time so far. metrics: set at the end."""

    def __init__(self, steps: Generator[None, None, dict[str, Value]]) -> None:
        self._steps = steps
        self.seconds = 0.0
        self.metrics: dict[str, Value] = {}

    def advance(self) -> bool:
        """Run up to the next optimizer step; return whether the batch is finished."""
        started = time.perf_counter()
        try:
            next(self._steps)
        except StopIteration as done:
            self.metrics = done.value
            return True
        finally:
            self.seconds += time.perf_counter() - started
        return False


def _padded(logits: torch.Tensor, columns: int) -> torch.Tensor:
    """Pad logits to `columns` with tokens of probability 0, so that shards have equal size."""
    missing = columns - logits.shape[1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def _mean(values: torch.Tensor) -> Mean:
    """Return the mean over rows as a metric."""
    return Mean(values.detach().sum(dtype=torch.float64).item(), len(values))
