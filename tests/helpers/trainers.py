"""Trainers for tests: small defaults, and one function that trains and tells what happened."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlpipe.algo.advantage import compute_advantages
from rlpipe.algo.correction import make_rule, token_data
from rlpipe.batching.packing import PackedBatch, pack
from rlpipe.config.algo import AlgoConfig
from rlpipe.config.draft import DraftConfig
from rlpipe.config.ppow import PpowConfig
from rlpipe.config.trainer import TrainerConfig
from rlpipe.models.checkpoint import read_weights, weight_shapes
from rlpipe.trainer import runtime
from rlpipe.trainer.megatron import MegatronTrainer
from rlpipe.trainer.runtime import open_address
from rlpipe.types import GenerateResult, Group, Trajectory


def make_trainer(
    path: Path | str,
    config: TrainerConfig | None = None,
    algo: AlgoConfig | None = None,
    mtp: DraftConfig | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    master: str | None = None,
    total_steps: int = 10,
    adapt_only: bool = False,
    ppow: PpowConfig | None = None,
    draft_vocab: Sequence[int] | None = None,
    seed: int = 0,
) -> MegatronTrainer:
    """A trainer with a learning rate that moves weights visibly."""
    return MegatronTrainer(
        config or TrainerConfig(lr=1e-2),
        algo or AlgoConfig(),
        mtp or DraftConfig(),
        model_path=path,
        rank=rank,
        world_size=world_size,
        master=master,
        total_steps=total_steps,
        adapt_only=adapt_only,
        ppow=ppow,
        draft_vocab=draft_vocab,
        seed=seed,
    )


def make_batch(
    groups: Sequence[Group],
    algo: AlgoConfig,
    dp: int = 1,
    budget: int = 64,
    temperature: float = 1.0,
    share: bool = True,
    draft: bool = True,
) -> PackedBatch:
    """Groups packed as a trainer worker packs them, of a draft that learns or not; seed 0."""
    trajectories = [t for group in groups for t in group.trajectories]
    return pack(
        trajectories,
        compute_advantages(groups, algo),
        budget,
        dp_size=dp,
        minibatches=algo.minibatches,
        temperature=temperature,
        skip_zero_advantage=algo.skips_zero_advantage,
        draft_learns=draft,
        share_prefixes=share,
        routes=True,
        **token_data(make_rule(algo), trajectories, seed=0),
    )


def trainer_logprobs(
    path: Path | str, played: Sequence[tuple[list[int], GenerateResult]], temperature: float = 1.0
) -> list[list[float]]:
    """What a trainer of its own gives to every sampled token of (prompt, result) pairs."""
    trajectories = []
    for number, (prompt, result) in enumerate(played):
        trajectory = Trajectory(
            trajectory_id=str(number), group_id="g", instance_id="i", prompt_length=len(prompt), reward=0.0
        )
        trajectory.append_context(prompt)
        trajectory.append_sampled(result)
        trajectories.append(trajectory)
    longest = max(len(t.token_ids) for t in trajectories)
    trainer = make_trainer(path)
    try:
        found = trainer.logprobs(pack(trajectories, None, max(512, longest), temperature=temperature))
    finally:
        trainer.close()
        if torch.distributed.is_initialized():
            runtime.stop()
    return [line[t.prompt_length :] for line, t in zip(found, trajectories, strict=True)]


@dataclass(slots=True, kw_only=True)
class Run:
    """A trainer to start in every rank, and what it does.

    groups: one batch of groups per step.
    load: checkpoint to continue from. save: where to write one at the end.
    """

    path: Path
    config: TrainerConfig
    algo: AlgoConfig
    groups: Sequence[Sequence[Group]]
    mtp: DraftConfig = field(default_factory=DraftConfig)
    load: Path | None = None
    save: Path | None = None


def train(rank: int, world_size: int, folder: Path, runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    """Do the named runs one after another: logprobs before, metrics of each step, weights after.

    folder: where rank 0 tells the others the address of each run.
    """
    torch.set_num_threads(1)
    told = {}
    for number, (name, run) in enumerate(runs.items()):
        master = meet(rank, world_size, folder / f"address{number}") if world_size > 1 else None
        trainer = make_trainer(
            run.path, run.config, run.algo, run.mtp, rank=rank, world_size=world_size, master=master
        )
        if run.load:
            trainer.load(run.load)
        batches = [make_batch(groups, run.algo, run.config.dp) for groups in run.groups]
        logprobs = trainer.logprobs(batches[0])
        metrics = [trainer.train_step(batch) for batch in batches]
        weights = trainer.export_weights()
        told[name] = {
            "logprobs": logprobs,
            "metrics": [
                {k: v.value() for k, v in step.items() if not k.startswith("timing_s")} for step in metrics
            ],
            "weights": None if weights is None else {k: np.asarray(v.float()) for k, v in weights.items()},
        }
        if run.save:
            trainer.save(run.save)
        trainer.close()
    return told


def meet(rank: int, world_size: int, file: Path) -> str:
    """The address where rank 0 listens, told to the others in a file."""
    if rank == 0:
        draft = file.with_suffix(".draft")
        draft.write_text(open_address(world_size=world_size))
        draft.rename(file)
    while not file.exists():
        time.sleep(0.02)
    return file.read_text()


def stored_weights(path: Path | str) -> dict[str, torch.Tensor]:
    """Read the weights that a trainer exports: those of the files, without the name of a tied head."""
    stored = weight_shapes(path)
    return {name: tensor for name, tensor in read_weights(path).items() if name in stored}
