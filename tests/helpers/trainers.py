"""Trainers for tests: small defaults, and one function that trains and tells what happened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlpipe.algo.advantage import compute_advantages
from rlpipe.config.algo import AlgoConfig
from rlpipe.config.mtp import MtpConfig
from rlpipe.config.trainer import TrainerConfig
from rlpipe.pipeline.batcher import PackedBatch, pack
from rlpipe.trainer.megatron import MegatronTrainer
from rlpipe.types import Group


def make_trainer(
    path: Path | str,
    config: TrainerConfig | None = None,
    algo: AlgoConfig | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    master: str | None = None,
    total_steps: int = 10,
) -> MegatronTrainer:
    """A trainer with a learning rate that moves weights visibly."""
    return MegatronTrainer(
        config or TrainerConfig(lr=1e-2),
        algo or AlgoConfig(),
        MtpConfig(),
        path,
        rank=rank,
        world_size=world_size,
        master=master,
        total_steps=total_steps,
    )


def make_batch(
    groups: Sequence[Group], algo: AlgoConfig, dp: int = 1, budget: int = 64, temperature: float = 1.0
) -> PackedBatch:
    """Groups packed as a trainer worker packs them."""
    return pack(
        [t for group in groups for t in group.trajectories],
        compute_advantages(groups, algo),
        budget,
        dp,
        minibatches=algo.minibatches,
        temperature=temperature,
        skip_zero_advantage=algo.skips_zero_advantage,
    )


def train(
    rank: int,
    world_size: int,
    runs: dict[str, tuple[Path, TrainerConfig, AlgoConfig, str]],
    groups: Sequence[Sequence[Group]],
) -> dict[str, dict[str, Any]]:
    """Train each named run on all groups: logprobs before, metrics, weights after, by run name.

    A run is (model, trainer settings, algorithm, address of rank 0): process groups share no address.
    """
    torch.set_num_threads(1)
    told = {}
    for name, (path, config, algo, address) in runs.items():
        trainer = make_trainer(path, config, algo, rank=rank, world_size=world_size, master=address)
        logprobs = trainer.logprobs(make_batch(groups[0], algo, config.dp))
        metrics = [trainer.train_step(make_batch(batch, algo, config.dp)) for batch in groups]
        weights = trainer.export_weights()
        told[name] = {
            "logprobs": logprobs,
            "metrics": [{k: v.value() for k, v in step.items()} for step in metrics],
            "weights": None if weights is None else {k: np.asarray(v) for k, v in weights.items()},
        }
        trainer.close()
    return told
