"""What a trainer rank trains: the policy, or the policy and the decoupled actor that generates for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlpipe.config.mtp import MtpConfig
from rlpipe.config.paths import resolve
from rlpipe.config.run import Config
from rlpipe.config.trainer import LayerSpec
from rlpipe.trainer.decoupled import DecoupledTrainer
from rlpipe.trainer.megatron import MegatronTrainer

Trainer = MegatronTrainer | DecoupledTrainer


def make_trainer(config: Config, *, rank: int, world_size: int, master: str | None = None) -> Trainer:
    """One rank, joined with the others, if any, at `master`.

    The draft that `mtp` trains is the one the engines use: the actor's where there is one; an EAGLE-3 draft
    has a trainer of its own (`DrafterKind.trainer`).
    Raises ValueError for settings or models it cannot work with.
    """
    actor, steps, trainer = config.decoupled, config.run.steps, config.trainer
    if config.rollout.replay_routes and trainer.layers is LayerSpec.AUTO:  # the others get no routes
        trainer = replace(trainer, layers=LayerSpec.LOCAL)
    draft: dict[str, Any] = {"ppow": config.ppow, "seed": config.run.seed}
    policy = MegatronTrainer(
        trainer,
        config.algo,
        MtpConfig() if actor.active or config.trains_beside else config.mtp,
        str(resolve(config.model.path)),
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
            config.mtp,
            str(resolve(actor.path)),
            rank=rank,
            world_size=world_size,
            total_steps=steps,
            beside=policy,
            **draft,
        )
    except BaseException:
        policy.close()
        raise
    return DecoupledTrainer(policy, beside, actor, algo)
