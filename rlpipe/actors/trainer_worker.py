"""A trainer rank: groups in, one optimizer step, weights out.

A plain class: Ray wraps one per rank, the inline cluster uses one as it is. Every rank gets all
groups and packs them alike; the packing says which micro-batches are its own.
"""

from __future__ import annotations

import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpipe.actors.trainers import make_trainer, train_alongside
from rlpipe.algo.advantage import compute_advantages
from rlpipe.algo.correction import make_rule, token_data
from rlpipe.batching.packing import PackedBatch, pack
from rlpipe.config.run import Config
from rlpipe.diagnosis.probe import COLUMNS, ProbeTable
from rlpipe.drafts.kinds import DRAFTERS
from rlpipe.metrics.spans import SpanLog
from rlpipe.metrics.values import Mean, Value, stats
from rlpipe.trainer.runtime import open_address
from rlpipe.types import Group, Trajectory
from rlpipe.weights.payload import WeightPayload, pack_weights

if TYPE_CHECKING:
    from rlpipe.drafts.standalone_trainer import DraftTrainer, SavingDraft
    from rlpipe.trainer.checkpoint import Saving, SavingHf
    from rlpipe.weights.buckets import Bucket
    from rlpipe.weights.offer import BroadcastResult, Rendezvous
    from rlpipe.weights.sender import WeightSender


class TrainerWorker:
    """Rank `rank` of `world_size`; `start` joins the process group."""

    def __init__(self, config: Config, rank: int = 0, world_size: int = 1) -> None:
        self._config = config
        self._rank, self._world_size = rank, world_size
        self._saving: list[Saving | SavingHf | SavingDraft] = []
        self._sender: WeightSender | None = None
        self._rule = make_rule(config.algo)  # asked for its columns only; the trainer's has the state
        self._draft: DraftTrainer | None = None  # on the first rank, which sees the whole batch
        self._draft_learns = config.cotrains_draft
        self._spans = SpanLog(f"trainer {rank}", {"train": "perf/utilisation/trainer"})

    def address(self, host: str = "127.0.0.1") -> str | None:
        """Where this rank, the first, waits for the others; host: how they reach it. None if it is alone."""
        return open_address(host, world_size=self._world_size) if self._world_size > 1 else None

    def start(self, master: str | None = None) -> None:
        """Build the model and join the other ranks at `master`."""
        self._trainer = make_trainer(
            self._config, rank=self._rank, world_size=self._world_size, master=master
        )
        if self._config.cotrains_draft and self._rank == 0:
            spec = self._config.spec
            make_draft_trainer = DRAFTERS[spec.drafter].make_trainer
            assert make_draft_trainer is not None, spec.drafter
            self._draft = make_draft_trainer(self._config, spec.draft_path, train_alongside=train_alongside)
        if self._config.broadcasts_weights:
            from rlpipe.rollout.sglang.environment import is_on_gpu
            from rlpipe.weights.sender import WeightSender

            rollout, drafter = self._config.rollout, self._config.spec.drafter
            self._sender = WeightSender(
                rollout, self._trainer, on_gpu=is_on_gpu(rollout), drafter=drafter, draft=self._draft
            )

    def step(self, groups: list[Group]) -> dict[str, Value]:
        """Advantages, packing, one optimizer step."""
        with self._spans.lane() as lane, lane.span("train", version=self._trainer.policy_version):
            metrics = self._step(groups)
        return metrics | self._spans.drain()

    def _step(self, groups: list[Group]) -> dict[str, Value]:
        started = time.monotonic()
        config = self._config
        advantages = compute_advantages(groups, config.algo)
        trajectories = [t for group in groups for t in group.trajectories]
        seed = config.run.seed
        batch = self._pack(
            trajectories,
            advantages,
            minibatches=config.algo.minibatches,
            # to the distillation of an actor every trajectory says something
            skip_zero_advantage=config.algo.skips_zero_advantage and not config.decoupled.active,
            draft_learns=self._trainer.trains_draft,
            **token_data(self._rule, trajectories, seed),
            seed=seed + self._trainer.policy_version,
        )
        metrics: dict[str, Value] = {"timing_s/adv": Mean(time.monotonic() - started, 1)}
        sampled = (own[t.loss_mask].tolist() for t, own in zip(trajectories, advantages, strict=True))
        metrics |= stats("critic/advantages", chain.from_iterable(sampled))
        draft = self._train_draft(trajectories)
        step = self._trainer.train_step(batch)
        for name in step.keys() & draft.keys():  # what both take: seconds
            step[name] = Mean(step[name].value() + draft[name].value(), 1)

        return metrics | draft | step

    def freeze_draft(self) -> None:
        """Train the policy alone from here on."""
        self._trainer.freeze_draft()
        self._draft_learns = False

    def _train_draft(self, trajectories: list[Trajectory]) -> dict[str, Value]:
        """One optimizer step of a draft apart on all trajectories, for the policy before its own step."""
        due = (self._trainer.policy_version + 1) % self._config.draft.interval == 0
        if not (self._draft_learns and due):
            return {}
        weights = self._trainer.export_weights()
        if self._draft is None or weights is None:
            return {}
        self._draft.follow(weights)
        return self._draft.adapt_step(self._pack(trajectories, None, share_prefixes=False))

    def probe(self, trajectories: list[Trajectory]) -> list[ProbeTable]:
        """What target and draft say at every context of these trajectories; see `metrics.probe`."""
        tables = self._trainer.draft_tables(self._pack(trajectories, None))
        depths = self._config.draft.depths
        nowhere = np.zeros(0, dtype=int), {name: np.zeros((0, depths)) for name in COLUMNS}
        return [
            ProbeTable(trajectory_id=t.trajectory_id, positions=positions, values=values)
            for t, (positions, values) in (
                (t, table or nowhere) for t, table in zip(trajectories, tables, strict=True)
            )
        ]

    def _pack(
        self, trajectories: list[Trajectory], advantages: list[np.ndarray] | None, **options: Any
    ) -> PackedBatch:
        """Pack as this trainer reads batches; options: further arguments of `pack`."""
        config = self._config
        return pack(
            trajectories,
            advantages,
            config.trainer.micro_batch_tokens,
            dp_size=config.trainer.dp,
            temperature=config.rollout.temperature,
            **{
                "share_prefixes": self._trainer.shares_prefixes,
                "routes": config.rollout.replay_routes,
            }
            | options,
        )

    def export(self, version: int) -> WeightPayload | None:
        """Full weights for the engines; None off rank 0 (which still takes part in the gathering).

        With a decoupled actor the policy's come along where they are validated.
        """
        with self._spans.lane() as lane, lane.span("sync", version=version):
            judged = None
            if self._config.decoupled.active and self._config.validates(version):
                judged = self._trainer.policy.export_weights()
            weights = self._trainer.export_weights()
            if weights is None:
                return None
            if self._draft is not None:
                weights |= self._draft.export_weights()
            return pack_weights(weights, version, None if judged is None else pack_weights(judged, version))

    def open_group(self, host: str, servers: int) -> tuple[Rendezvous, list[Bucket]]:
        """A group with so many servers, and what every update consists of; on rank 0."""
        return self._broadcaster().open(host, servers)

    def broadcast(self, version: int) -> BroadcastResult | None:
        """Full weights to all servers at once; None off rank 0 (which still takes part in the gathering)."""
        with self._spans.lane() as lane, lane.span("sync", version=version):
            sent = self._broadcaster().send(version)
        return sent if self._rank == 0 else None

    def newest(self, version: int) -> WeightPayload:
        """What `broadcast` sent last; on rank 0, and on another thread than everything else."""
        return self._broadcaster().newest(version)

    def _broadcaster(self) -> WeightSender:
        assert self._sender is not None, "this run does not broadcast weights"
        return self._sender

    def begin_save(self, directory: Path) -> None:
        """Copy the state that goes to `trainer/` and, for Hugging Face, to `hf/`.

        That of a draft apart goes to `draft_trainer/` and, as servers read it, to `draft/`.
        """
        with self._spans.lane() as lane, lane.span("copy", version=self._trainer.policy_version):
            self._saving = self._trainer.begin_save(directory / "trainer", directory / "hf")
            if self._draft is not None:
                self._saving.append(self._draft.begin_save(directory / "draft_trainer", directory / "draft"))

    def write_save(self) -> None:
        """Write this rank's part of the copy; on another thread than everything else, which goes on."""
        with self._spans.lane() as lane, lane.span("write"):
            for part in self._saving:
                part.write()

    def end_save(self) -> None:
        """Complete what every rank has written."""
        saving, self._saving = self._saving, []
        for part in saving:
            part.finish()

    def load(self, directory: Path) -> None:
        """Trainer state of a checkpoint directory. Raises ValueError when it is of other drafts."""
        draft = directory / "draft_trainer"
        if draft.is_dir() != self._config.cotrains_draft:
            holds, train = (
                ("a", "its spec.drafter and draft.train=online")
                if draft.is_dir()
                else ("no", "draft.train=off")
            )
            raise ValueError(
                f"{directory} holds {holds} draft co-trained beside the policy: continue with {train}, or "
                "choose another run.dir."
            )
        if self._draft is not None:
            self._draft.load(draft)

        self._trainer.load(directory / "trainer")

    def close(self) -> None:
        """Leave the process group."""
        if self._sender is not None:
            self._sender.close()
        self._trainer.close()
