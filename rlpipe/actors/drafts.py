"""Which trainer an EAGLE-3 draft has: the target is the engine's model, so its features are drafted from."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlpipe.config.paths import resolve
from rlpipe.config.run import Config
from rlpipe.drafts.eagle3 import Eagle3
from rlpipe.drafts.eagle3_trainer import Eagle3Trainer, new_draft
from rlpipe.drafts.ppow.eagle3 import draft_cost, window_slots
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.rollout.embedded.model import Model
from rlpipe.types import Trajectory

TARGET_ROWS = 8  # rows of the target's cache: a pass keeps keys it will not read again


def make_eagle3(config: Config, start: str, trajectories: Sequence[Trajectory] = ()) -> Eagle3Trainer:
    """The trainer of the draft in directory `start`, of that in `eagle3.start`, or of a new one.

    trajectories: their sampled tokens choose a reduced vocabulary of a new draft. Raises ValueError for a
    target the engine cannot run, or settings that do not fit it.
    """
    path = resolve(config.model.path)
    hf_config, weights = read_config(path), read_weights(path)
    setting = "spec.draft_path" if start else "eagle3.start"
    if start := start or config.eagle3.start:
        draft = Eagle3.load(resolve(start), hf_config, setting)
    else:
        draft = new_draft(config, hf_config, weights, trajectories)
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if config.rollout.device == "auto" else config.rollout.device)
    arch = read_architecture(hf_config)
    ahead = window_slots(config.ppow, config.mtp.depths) if config.mtp.windows else 0
    target = Model(
        arch,
        {name: weights[name] for name in arch.weight_shapes(mtp=False)},
        mtp=False,
        rows=TARGET_ROWS,
        slots=config.rollout.max_context + ahead,
        device=device,
        dtype=getattr(torch, config.rollout.dtype),
    )
    return Eagle3Trainer(config, draft.to(device), target, draft_cost(draft, weights))
