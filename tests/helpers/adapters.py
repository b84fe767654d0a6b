"""A trainer's adapters for tests: filled with numbers, computed in float64, compared by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlpipe.config.trainer import TrainerConfig
from rlpipe.trainer.model import PolicyModel
from tests.helpers.float64 import in_float64
from tests.helpers.trainers import Run, make_trainer, meet, train

IDS = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(1))
PUSH = torch.randn(2, 17, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def fill(model: PolicyModel, seed: int = 0) -> None:
    """Numbers for every B, the same for any tensor parallel size."""
    generator, group = torch.Generator().manual_seed(seed), model.pg_collection.tp
    with torch.no_grad():
        for name, parameter in model.adapters.named_parameters():
            if ".b." in name:
                cut = getattr(parameter, "tensor_model_parallel", False)
                rows = len(parameter) * (group.size() if cut else 1)
                full = 0.3 * torch.randn(rows, parameter.shape[1], generator=generator)
                parameter.copy_(full.chunk(group.size())[group.rank()] if cut else full)


def pushed(model: PolicyModel) -> torch.Tensor:
    """Logits of some tokens, after their product with fixed numbers went back through the model."""
    logits = model.logits(IDS)
    (logits * PUSH.to(logits.dtype)).sum().backward()
    return logits.detach()


def gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What was pushed into it; Megatron's wrapper takes it over where the type is still its own."""
    return parameter.main_grad if parameter.grad is None else parameter.grad


def differentiate(
    rank: int, world_size: int, folder: Path, path: Path, config: TrainerConfig
) -> dict[str, Any]:
    """Logits and the gradients of this rank's adapters in float64, and the dimension they are cut along."""
    torch.set_num_threads(1)
    master = meet(rank, world_size, folder / "address") if world_size > 1 else None
    trainer = make_trainer(path, config, rank=rank, world_size=world_size, master=master)
    model = in_float64(trainer.model)
    fill(model)
    logits, parameters = pushed(model).numpy(), dict(model.adapters.named_parameters())
    cuts = {
        n: p.partition_dim if getattr(p, "tensor_model_parallel", False) else None
        for n, p in parameters.items()
    }
    found = {n: gradient(p).numpy() for n, p in parameters.items()}
    trainer.close()
    return {"logits": logits, "gradients": found, "cuts": cuts}


def differentiate_and_train(
    rank: int, world_size: int, folder: Path, path: Path, config: TrainerConfig, runs: dict[str, Run]
) -> dict[str, Any]:
    """Both in one launch; the first under the name "gradients"."""
    own = differentiate(rank, world_size, folder, path, config)
    return {"gradients": own} | train(rank, world_size, folder, runs)
