"""Trainer workers with a co-trained EAGLE-3 draft, on one rank or several, and what their steps made."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlpipe.actors.trainer_worker import TrainerWorker
from rlpipe.config.run import Config
from rlpipe.types import Group
from tests.helpers.trainers import meet


def co_train(
    rank: int, world_size: int, config: Config, steps: Sequence[list[Group]], folder: Path
) -> dict[str, Any]:
    """Metrics of each step; on the first rank also the draft before each step and at the end.

    folder: gets `hf/` and `draft/` as they are before the last step.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    master = meet(rank, world_size, folder / "address") if world_size > 1 else None
    worker = TrainerWorker(config, rank, world_size)
    worker.start(master)
    metrics, drafts = [], []

    def look() -> None:
        if worker._draft is not None:
            drafts.append(
                {n: p.detach().numpy().copy() for n, p in worker._draft._draft.state_dict().items()}
            )

    try:
        for number, groups in enumerate(steps):
            look()
            if number == len(steps) - 1:
                worker.begin_save(folder)
                worker.write_save()
                worker.end_save()
            made = worker.step(groups)
            metrics.append(
                {n: v.value() for n, v in made.items() if n.startswith(("mtp/", "ppow/", "actor/"))}
            )
        look()
    finally:
        worker.close()
        torch.set_num_threads(threads)
    return {"metrics": metrics, "drafts": drafts}


def differing(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """The largest difference of two drafts' weights, of all numbers."""
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name].astype(np.float64) - other[name]).max()) for name in one)
