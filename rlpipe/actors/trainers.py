"""Makes the trainer of a rank, for the policy or for the policy and its decoupled actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from rlpipe.config.draft import DraftConfig
from rlpipe.config.draft_vocab import read_draft_vocab
from rlpipe.config.paths import resolve_model
from rlpipe.config.run import Config
from rlpipe.config.trainer import LayerSpec
from rlpipe.drafts.protocols import TrainableDraft
from rlpipe.drafts.standalone_trainer import DraftTrainer
from rlpipe.drafts.windows.eagle3 import window_slots
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config
from rlpipe.rollout.embedded.model import Model
from rlpipe.trainer.decoupled import DecoupledTrainer
from rlpipe.trainer.megatron import MegatronTrainer

Trainer: TypeAlias = MegatronTrainer | DecoupledTrainer

TARGET_ROWS = 8  # rows of the target's cache; few, as a pass stores keys that are not read again


def make_trainer(config: Config, *, rank: int, world_size: int, master: str | None = None) -> Trainer:
    """Make the trainer of one rank and connect it to the other ranks, if any, at `master`.

    The settings in `draft` are for the draft that the engines use, which is the actor's draft if there is an
    actor. An EAGLE-3 draft has a separate trainer (`rlpipe.drafts.kinds`).
    Raises ValueError for unsupported settings or models.
    """
    actor, steps, trainer = config.decoupled, config.run.steps, config.trainer
    # Only the local layers can replay the engine's routes.
    if config.rollout.replay_routes and trainer.layers is LayerSpec.AUTO:
        trainer = replace(trainer, layers=LayerSpec.LOCAL)

    # The draft belongs to the generating model, and a co-trained separate draft has its own trainer.
    generates = resolve_model(config.rollout_model)
    draft_vocab = read_draft_vocab(config.spec, generates, int(read_config(generates)["vocab_size"]))
    draft: dict[str, Any] = {"ppow": config.ppow, "seed": config.run.seed, "draft_vocab": draft_vocab}

    policy = MegatronTrainer(
        trainer,
        config.algo,
        DraftConfig() if actor.active or config.cotrains_draft else config.draft,
        model_path=str(resolve_model(config.model.path)),
        rank=rank,
        world_size=world_size,
        master=master,
        total_steps=steps,
        **({} if actor.active else draft),
    )
    if not actor.active:
        return policy

    # Train the actor on the same rank, in the process group of the policy.
    algo = actor.algo(config.algo)
    try:
        actor_trainer = MegatronTrainer(
            actor.trainer(trainer),
            algo,
            config.draft,
            model_path=str(resolve_model(actor.path)),
            rank=rank,
            world_size=world_size,
            total_steps=steps,
            host=policy,
            **draft,
        )
    except BaseException:
        policy.close()
        raise

    return DecoupledTrainer(policy, actor_trainer, config=actor, algo=algo)


def train_alongside(
    config: Config,
    draft: TrainableDraft,
    target: Mapping[str, Any],
    *,
    weights: Mapping[str, torch.Tensor],
    draft_cost: float = 0.0,
) -> DraftTrainer:
    """Make the trainer of a draft that reads features of the engine's model.

    target: `config.json` of that model. weights: its tensors by HF name. draft_cost: see `DraftTrainer`.
    Raises ValueError for a target that the engine cannot run.
    """
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(auto if config.rollout.device == "auto" else config.rollout.device)

    # The target's cache needs a slot for each position of a context and of the windows after it.
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
