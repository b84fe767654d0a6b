"""What a trainer rank trains: the policy, or the policy and the decoupled actor that generates for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from rlpipe.config.draft import DraftConfig
from rlpipe.config.paths import resolve
from rlpipe.config.run import Config
from rlpipe.config.trainer import LayerSpec
from rlpipe.drafts.protocols import TrainableDraft
from rlpipe.drafts.standalone_trainer import DraftTrainer
from rlpipe.drafts.windows.eagle3 import window_slots
from rlpipe.models import read_architecture
from rlpipe.rollout.embedded.model import Model
from rlpipe.trainer.decoupled import DecoupledTrainer
from rlpipe.trainer.megatron import MegatronTrainer

Trainer: TypeAlias = MegatronTrainer | DecoupledTrainer

TARGET_ROWS = 8  # rows of the target's cache: a pass keeps keys it will not read again


def make_trainer(config: Config, *, rank: int, world_size: int, master: str | None = None) -> Trainer:
    """One rank, joined with the others, if any, at `master`.

    The draft that `draft` trains is the one the engines use: the actor's where there is one; an EAGLE-3 draft
    has a trainer of its own (`rlpipe.drafts.kinds`).
    Raises ValueError for settings or models it cannot work with.
    """
    actor, steps, trainer = config.decoupled, config.run.steps, config.trainer
    if config.rollout.replay_routes and trainer.layers is LayerSpec.AUTO:  # the others get no routes
        trainer = replace(trainer, layers=LayerSpec.LOCAL)

    draft: dict[str, Any] = {"ppow": config.ppow, "seed": config.run.seed}
    policy = MegatronTrainer(
        trainer,
        config.algo,
        DraftConfig() if actor.active or config.cotrains_draft else config.draft,
        model_path=str(resolve(config.model.path)),
        rank=rank,
        world_size=world_size,
        master=master,
        total_steps=steps,
        **({} if actor.active else draft),
    )
    if not actor.active:
        return policy

    algo = actor.algo(config.algo)
    try:
        beside = MegatronTrainer(
            actor.trainer(trainer),
            algo,
            config.draft,
            model_path=str(resolve(actor.path)),
            rank=rank,
            world_size=world_size,
            total_steps=steps,
            beside=policy,
            **draft,
        )
    except BaseException:
        policy.close()
        raise

    return DecoupledTrainer(policy, beside, config=actor, algo=algo)


def train_alongside(
    config: Config,
    draft: TrainableDraft,
    target: Mapping[str, Any],
    *,
    weights: Mapping[str, torch.Tensor],
    draft_cost: float = 0.0,
) -> DraftTrainer:
    """The trainer of a draft whose target is the engine's model, so its features are drafted from.

    target, weights: its `config.json`, and its tensors by HF name. draft_cost: see `DraftTrainer`.
    Raises ValueError for a target the engine cannot run.
    """
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if config.rollout.device == "auto" else config.rollout.device)
    arch = read_architecture(target)
    ahead = window_slots(config.ppow, config.draft.depths) if config.draft.windows else 0
    model = Model(
        arch,
        {name: weights[name] for name in arch.weight_shapes(mtp=False)},
        mtp=False,
        rows=TARGET_ROWS,
        slots=config.rollout.max_context + ahead,
        device=device,
        dtype=getattr(torch, config.rollout.dtype),
    )
    return DraftTrainer(config, draft.to(device), model, draft_cost=draft_cost)
