"""The drafters, one file each, and the trainer that those with a model of their own share.

A file's name is a value of `spec.drafter` (`config.drafters`). What it imports at its top is loaded when it
is chosen; the drafters here import torch where they need it, so that settings load without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rlpipe.config.run import Config
    from rlpipe.drafts.target import TrainableDraft
    from rlpipe.drafts.trainer import DraftTrainer

TARGET_ROWS = 8  # rows of the target's cache: a pass keeps keys it will not read again


def train_beside(
    config: Config,
    draft: TrainableDraft,
    target: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    draft_cost: float = 0.0,
) -> DraftTrainer:
    """The trainer of a draft whose target is the engine's model, so its features are drafted from.

    target, weights: its `config.json`, and its tensors by HF name. draft_cost: see `DraftTrainer`.
    Raises ValueError for a target the engine cannot run.
    """
    import torch

    from rlpipe.drafts.ppow.eagle3 import window_slots
    from rlpipe.drafts.trainer import DraftTrainer
    from rlpipe.models import read_architecture
    from rlpipe.rollout.embedded.model import Model

    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if config.rollout.device == "auto" else config.rollout.device)
    arch = read_architecture(target)
    ahead = window_slots(config.ppow, config.mtp.depths) if config.mtp.windows else 0
    model = Model(
        arch,
        {name: weights[name] for name in arch.weight_shapes(mtp=False)},
        mtp=False,
        rows=TARGET_ROWS,
        slots=config.rollout.max_context + ahead,
        device=device,
        dtype=getattr(torch, config.rollout.dtype),
    )
    return DraftTrainer(config, draft.to(device), model, draft_cost)
