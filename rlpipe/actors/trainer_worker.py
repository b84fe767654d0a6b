"""A trainer rank: groups in, one optimizer step, weights out.

It is a plain class: Ray wraps one per rank, the inline cluster uses one directly. Every rank receives all
groups and packs them identically; the packing assigns the micro-batches to ranks. torch is imported only in
the constructor, because the driver imports this module but not torch.
"""

from __future__ import annotations

import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rlpipe.actors.network import choose_interface
from rlpipe.algo.advantage import compute_advantages
from rlpipe.batching.packing import PackedBatch, pack
from rlpipe.config.run import Config
from rlpipe.diagnosis.probe import COLUMNS, ProbeTable
from rlpipe.drafts.kinds import DRAFTERS
from rlpipe.metrics.spans import SpanLog
from rlpipe.metrics.values import Mean, Value, stats
from rlpipe.types import Group, Trajectory

if TYPE_CHECKING:
    from rlpipe.drafts.standalone_trainer import DraftTrainer, SavingDraft
    from rlpipe.drafts.tables import Table
    from rlpipe.trainer.checkpoint import Saving, SavingHf
    from rlpipe.weights.buckets import Bucket
    from rlpipe.weights.offer import BroadcastResult, Rendezvous
    from rlpipe.weights.payload import WeightPayload
    from rlpipe.weights.protocols import ExportsWeights
    from rlpipe.weights.sender import WeightSender


class TrainerWorker:
    """Rank `rank` of `world_size`; `start` joins the process group."""

    def __init__(self, config: Config, rank: int = 0, world_size: int = 1) -> None:
        from rlpipe.algo.correction import make_rule

        choose_interface(config)
        self._config = config
        self._rank, self._world_size = rank, world_size
        self._saving: list[Saving | SavingHf | SavingDraft] = []
        self._sender: WeightSender | None = None
        # Used only for its columns; the trainer has another rule with the state.
        self._rule = make_rule(config.algo)
        self._draft: DraftTrainer | None = None  # on the first rank, which has the full batch
        self._read_draft: DraftTrainer | None = None  # for the probe; the same object if co-trained
        self._draft_learns = config.cotrains_draft
        self._spans = SpanLog(f"trainer {rank}", {"train": "perf/utilisation/trainer"})

    def address(self, host: str = "127.0.0.1") -> str | None:
        """Return the address at which rank 0 waits for others; None with a single rank. host: its host."""
        from rlpipe.trainer.runtime import open_address

        return open_address(host, world_size=self._world_size) if self._world_size > 1 else None

    def start(self, master: str | None = None) -> None:
        """Build the model and join the other ranks at `master`."""
        from rlpipe.actors.trainers import make_trainer

        self._trainer = make_trainer(
            self._config, rank=self._rank, world_size=self._world_size, master=master
        )

        # A standalone draft has one trainer, on the rank that has the full batch.
        if self._config.cotrains_draft and self._rank == 0:
            self._draft = self._make_draft_trainer()

        if self._config.broadcasts_weights:
            from rlpipe.rollout.sglang.environment import is_on_gpu
            from rlpipe.weights.sender import WeightSender

            rollout, drafter = self._config.rollout, self._config.spec.drafter
            everywhere = self._config.sends_from_every_rank
            self._sender = WeightSender(
                rollout,
                cast("ExportsWeights", self._trainer),  # with a decoupled actor there is no broadcast
                on_gpu=is_on_gpu(rollout),
                drafter=drafter,
                draft=self._draft,
                root=everywhere or self._rank == 0,
                everywhere=everywhere,
            )

    def step(self, groups: list[Group]) -> dict[str, Value]:
        """Compute advantages, pack the groups and take one optimizer step; return its metrics."""
        with self._spans.lane() as lane, lane.span("train", version=self._trainer.policy_version):
            metrics = self._step(groups)
        return metrics | self._spans.drain()

    def _step(self, groups: list[Group]) -> dict[str, Value]:
        """Train on the groups of one step; return its metrics."""
        from rlpipe.algo.correction import token_data

        started = time.monotonic()
        config = self._config
        advantages = compute_advantages(groups, config.algo)

        trajectories = [t for group in groups for t in group.trajectories]
        seed = config.run.seed
        batch = self._pack(
            trajectories,
            advantages,
            minibatches=config.algo.minibatches,
            # The distillation of an actor uses every trajectory, with or without an advantage.
            skip_zero_advantage=config.algo.skips_zero_advantage and not config.decoupled.active,
            draft_learns=self._trainer.trains_draft,
            **token_data(self._rule, trajectories, seed),
            seed=seed + self._trainer.policy_version,
        )

        metrics: dict[str, Value] = {"timing_s/adv": Mean(time.monotonic() - started, 1)}
        sampled = (own[t.loss_mask].tolist() for t, own in zip(trajectories, advantages, strict=True))
        metrics |= stats("critic/advantages", chain.from_iterable(sampled))

        # The draft is trained for the policy that generated this batch, so step it before the policy.
        draft = self._train_draft(trajectories)
        step = self._trainer.train_step(batch)

        # Both report seconds under the same names: add them up.
        for name in step.keys() & draft.keys():
            step[name] = Mean(step[name].value() + draft[name].value(), 1)

        return metrics | draft | step

    def freeze_draft(self) -> None:
        """Train only the policy from now on."""
        self._trainer.freeze_draft()
        self._draft_learns = False

    def _train_draft(self, trajectories: list[Trajectory]) -> dict[str, Value]:
        """Take one optimizer step of a standalone draft on all trajectories, before the policy's step."""
        due = (self._trainer.policy_version + 1) % self._config.draft.interval == 0
        if not (self._draft_learns and due):
            return {}

        # All ranks gather the weights, but only the first has the draft.
        weights = self._trainer.export_weights()
        if self._draft is None or weights is None:
            return {}

        self._draft.follow(weights)
        return self._draft.adapt_step(self._pack(trajectories, None, share_prefixes=False))

    def probe(self, trajectories: list[Trajectory]) -> list[ProbeTable]:
        """Compare target and draft at every context of these trajectories; see `diagnosis.probe`.

        If a trajectory has several segments, only the first is read.
        """
        tables, depths = self._tables([t.segment(t.segments()[0]) for t in trajectories])

        # A trajectory without contexts gets an empty table.
        nowhere = np.zeros(0, dtype=int), {name: np.zeros((0, depths)) for name in COLUMNS}
        return [
            ProbeTable(trajectory_id=t.trajectory_id, positions=positions, values=values)
            for t, (positions, values) in (
                (t, table or nowhere) for t, table in zip(trajectories, tables, strict=True)
            )
        ]

    def _tables(self, trajectories: list[Trajectory]) -> tuple[list[Table | None], int]:
        """Return a table per trajectory, and the depths; for a separate draft only on the first rank."""
        spec, depths = self._config.spec, self._config.draft.depths
        if not spec.needs_model:
            return self._lookup_tables(trajectories), spec.gamma
        if not spec.needs_draft:
            return self._trainer.draft_tables(self._pack(trajectories, None)), depths

        # All ranks gather the weights, but only the first has the draft.
        weights = self._trainer.export_weights()
        if self._rank or weights is None:
            return [None] * len(trajectories), depths
        if self._read_draft is None:
            self._read_draft = self._draft or self._make_draft_trainer()
        self._read_draft.follow(weights)
        return self._read_draft.draft_tables(self._pack(trajectories, None, share_prefixes=False)), depths

    def _lookup_tables(self, trajectories: list[Trajectory]) -> list[Table | None]:
        """Look up the drafter's guesses in the texts, and score them with the target."""
        from rlpipe.drafts.tables import as_candidates, guesses_of, lookup_table

        spec = self._config.spec
        drafter = DRAFTERS[spec.drafter].guess
        assert drafter is not None, spec.drafter

        guessed = [guesses_of(t, drafter, spec) for t in trajectories]
        asked = [as_candidates(t, *guesses) for t, guesses in zip(trajectories, guessed, strict=True)]
        scores = self._trainer.candidate_scores(self._pack(asked, None, candidates=True))
        return [
            None if score is None else lookup_table(t, *guesses, entropies=score[0], logprobs=score[1])
            for t, guesses, score in zip(trajectories, guessed, scores, strict=True)
        ]

    def _make_draft_trainer(self) -> DraftTrainer:
        """Make the trainer of a draft with a separate directory."""
        from rlpipe.actors.trainers import train_alongside

        spec = self._config.spec
        make_trainer = DRAFTERS[spec.drafter].make_trainer
        assert make_trainer is not None, spec.drafter
        return make_trainer(self._config, spec.draft_path, train_alongside=train_alongside)

    def _pack(
        self, trajectories: list[Trajectory], advantages: list[np.ndarray] | None, **options: Any
    ) -> PackedBatch:
        """Pack trajectories with this trainer's settings; options: further arguments of `pack`."""
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
        """Return the full weights for the engines; None except on rank 0 (all ranks take part in gathering).

        With a decoupled actor, the weights of the policy are included for versions that are validated.
        """
        from rlpipe.trainer.decoupled import DecoupledTrainer
        from rlpipe.weights.payload import pack_weights

        with self._spans.lane() as lane, lane.span("sync", version=version):
            policy_weights = None
            if isinstance(self._trainer, DecoupledTrainer) and self._config.validates(version):
                policy_weights = self._trainer.policy.export_weights()

            weights = self._trainer.export_weights()
            if weights is None:
                return None

            if self._draft is not None:
                weights |= self._draft.export_weights()
            policy = None if policy_weights is None else pack_weights(policy_weights, version)
            return pack_weights(weights, version, policy)

    def copy_weights(self, version: int) -> None:
        """Copy the full weights for `broadcast`, on the ranks that send (all ranks gather)."""
        with self._spans.lane() as lane, lane.span("copy", version=version):
            self._broadcaster().copy(version)

    # The following three methods are called on another thread than all others, while training continues.

    def open_group(self, host: str, servers: int) -> tuple[Rendezvous, list[Bucket]]:
        """Open a group with `servers` servers; return it and the buckets of every update."""
        return self._broadcaster().open(host, servers)

    def broadcast(self, version: int) -> BroadcastResult:
        """Send the copy to the servers of the group."""
        with self._spans.lane() as lane, lane.span("sync", version=version):
            return self._broadcaster().send(version)

    def newest(self) -> WeightPayload:
        """Return the weights that were copied last."""
        return self._broadcaster().newest()

    def _broadcaster(self) -> WeightSender:
        assert self._sender is not None, "this run does not broadcast weights"
        return self._sender

    def begin_save(self, directory: Path) -> None:
        """Copy the state for `trainer/` and, in Hugging Face format, for `hf/`.

        The state of a standalone draft is for `draft_trainer/` and, in the format of servers, for `draft/`.
        """
        with self._spans.lane() as lane, lane.span("copy", version=self._trainer.policy_version):
            self._saving = self._trainer.begin_save(directory / "trainer", directory / "hf")
            if self._draft is not None:
                self._saving.append(self._draft.begin_save(directory / "draft_trainer", directory / "draft"))

    def write_save(self) -> None:
        """Write this rank's part of the copy, on another thread, while training continues."""
        with self._spans.lane() as lane, lane.span("write"):
            for part in self._saving:
                part.write()

    def end_save(self) -> None:
        """Complete the checkpoint after all ranks have written their parts."""
        saving, self._saving = self._saving, []
        for part in saving:
            part.finish()

    def load(self, directory: Path) -> None:
        """Load the trainer's state from a checkpoint directory. Raises ValueError when its drafts differ."""
        draft = directory / "draft_trainer"
        if draft.is_dir() != self._config.cotrains_draft:
            holds, train = (
                ("a", "its spec.drafter and draft.train=online")
                if draft.is_dir()
                else ("no", "draft.train=off")
            )
            raise ValueError(
                f"{directory} holds {holds} draft co-trained with the policy: continue with {train}, or "
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
