"""Settings of a separate rollout model that is smaller than the policy (Jackpot). Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlpipe.config.algo import AlgoConfig, Correction, MaskRule, Proximal
from rlpipe.config.choice import Choice
from rlpipe.config.limits import at_least, learning_rates, positive
from rlpipe.config.trainer import LrSchedule, TrainerConfig, check_parallel

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")


class DistillKl(Choice):
    """The divergence between policy p and actor q that the actor minimises."""

    FORWARD = "forward"  # KL(p || q), Jackpot Eq. 7: q must cover p
    REVERSE = "reverse"  # KL(q || p): q avoids tokens that p does not generate


@dataclass(slots=True, kw_only=True)
class DecoupledConfig:
    """The actor is the model that generates. It is trained with the policy, from the same trajectories.

    loss of the actor = ppo_coef * PPO (Eq. 6) + distill_coef * KL (Eq. 7)              Jackpot Eq. 8
    """

    path: str = ""
    """Checkpoint directory of the actor, with the policy's tokenizer; empty: the policy itself generates."""

    ppo_coef: float = 1.0
    """Weight of PPO on the actor's tokens; 0: the actor learns only by distillation."""

    distill_coef: float = 1.0
    """The paper's lambda_distill; 0: no distillation."""

    distill_kl: DistillKl = DistillKl.FORWARD
    """See `DistillKl`."""

    correction: Correction = Correction.TIS_TOKEN
    """Correction of the actor's staleness (F in Eq. 6): none, tis_token, tis_sequence or icepop. The actor
    uses the clips, loss and optimizer steps of `algo`."""

    correction_threshold: float = 2.0
    """Threshold of the actor's correction."""

    lr: float = 1e-5
    """Learning rate of the actor's optimizer. Settings that are not in this section are taken from
    `trainer`."""

    min_lr: float = 0.0
    """Learning rate at the end of a decaying schedule."""

    warmup_steps: int = 0
    """Number of optimizer steps in which the learning rate rises."""

    lr_schedule: LrSchedule = LrSchedule.CONSTANT
    """See `LrSchedule`."""

    clip_grad: float = 1.0
    """Bound on the actor's gradient norm."""

    def __post_init__(self) -> None:
        self.distill_kl, self.correction = DistillKl(self.distill_kl), Correction(self.correction)
        self.lr_schedule = LrSchedule(self.lr_schedule)
        at_least(0, self, "decoupled", "ppo_coef", "distill_coef", "warmup_steps", "clip_grad")
        positive(self, "decoupled", "correction_threshold")
        learning_rates(self, "decoupled")

        if self.correction.is_obrs or self.correction is Correction.USER:
            raise ValueError(
                f"decoupled.correction={self.correction}: the actor is corrected only for its own "
                "staleness. Set decoupled.correction=tis_token; what corrects the policy is algo.correction."
            )

    @property
    def active(self) -> bool:
        """Whether a model other than the policy generates."""
        return bool(self.path)

    def trainer(self, policy: TrainerConfig) -> TrainerConfig:
        """Return the settings of the actor's trainer: the policy's, with the actor's optimizer."""
        return replace(
            policy,
            lr=self.lr,
            min_lr=self.min_lr,
            warmup_steps=self.warmup_steps,
            lr_schedule=self.lr_schedule,
            clip_grad=self.clip_grad,
        )

    def algo(self, policy: AlgoConfig) -> AlgoConfig:
        """Return the actor's PPO settings: the policy's with another correction, and no mask or penalties."""
        return replace(
            policy,
            correction=self.correction,
            user_correction="",
            correction_threshold=self.correction_threshold,
            correction_low=min(policy.correction_low, self.correction_threshold),
            proximal=Proximal.START,
            mask=MaskRule.NONE,
            mask_high=None,
            mask_low=None,
            kl_coef=0.0,
            entropy_coef=0.0,
        )


def check_actor(
    actor_path: Path, actor: Mapping[str, Any], policy_path: Path, policy: Mapping[str, Any], config: Any
) -> None:
    """Refuse an actor that has other tokens than the policy, or that the trainer cannot split.

    actor, policy: `config.json` of both. config: the run's settings. Raises ValueError with a hint.
    """
    named = f"decoupled.path={config.decoupled.path!r}"

    # The policy is trained on the actor's token ids, so both need one vocabulary.
    sizes = actor["vocab_size"], policy["vocab_size"]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"{named} has a vocabulary of {sizes[0]} and model.path={config.model.path!r} one of {sizes[1]}: "
            "the policy learns from the actor's tokens, so take two models of one family."
        )

    if different := _other_tokenizer(actor_path, policy_path):
        raise ValueError(
            f"{named} and model.path={config.model.path!r} do not share a tokenizer ({different}): the "
            "token ids of the two would not match. Take two models with the same tokenizer."
        )

    if config.trainer.cp > 1:
        raise ValueError(
            f"trainer.cp={config.trainer.cp} with decoupled.path: the two models are compared on whole "
            "micro-batches. Set trainer.cp=1 and use trainer.tp."
        )

    try:
        check_parallel(config.trainer, actor)
    except ValueError as error:
        raise ValueError(f"{named}, which is cut as the policy is: {error}") from error


def _other_tokenizer(actor: Path, policy: Path) -> str:
    """Describe how two tokenizers differ; empty when they map texts to the same ids."""
    both = [name for name in _TOKENIZERS if (actor / name).is_file() and (policy / name).is_file()]
    if not both:
        return f"none of {', '.join(_TOKENIZERS)} is in both directories"

    # tokenizer.json contains everything. Without it, all files of the older formats must be equal.
    for name in both[:1] if both[0] == "tokenizer.json" else both:
        texts = [(folder / name).read_bytes() for folder in (actor, policy)]
        if texts[0] == texts[1]:
            continue
        if name != "tokenizer.json" or _meaning(texts[0]) != _meaning(texts[1]):
            return f"{name} differs"
    return ""


def _meaning(text: bytes) -> dict[str, Any]:
    """Return the content of a tokenizer.json without settings of its last use (padding, truncation)."""
    return {k: v for k, v in json.loads(text).items() if k not in ("padding", "truncation", "version")}
