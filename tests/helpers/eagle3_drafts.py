"""Random EAGLE-3 drafts for random checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from rlpipe.config.eagle3 import Eagle3Shape
from rlpipe.drafts.eagle3_model import Eagle3
from rlpipe.models.checkpoint import read_config


def random_draft(
    target: Path,
    *,
    layers: Sequence[int] = (),
    ids: Sequence[int] | None = None,
    scale: float = 0.3,
    seed: int = 0,
) -> Eagle3:
    """A draft for the checkpoint in `target` whose weights are noise, norms included.

    ids: its vocabulary, None for all. scale: standard deviation of the matrices.
    """
    shape = Eagle3Shape.for_target(read_config(target), layers, len(ids) if ids else 0)
    draft = Eagle3(shape, None if ids is None else torch.tensor(ids))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(scale * noise if parameter.dim() == 2 else 1 + 0.1 * noise)
    return draft


def write_random_draft(path: Path, target: Path, **settings: object) -> Path:
    """`random_draft` in a directory, which is returned."""
    random_draft(target, **settings).save(path)
    return path
