"""The functions that define a drafter; preflight, trainer and engines look them up by `spec.drafter`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rlpipe.config.drafters import HfConfig
from rlpipe.config.sglang import SglangConfig
from rlpipe.config.spec import SpecConfig

if TYPE_CHECKING:
    import numpy as np

    from rlpipe.config.run import Config
    from rlpipe.drafts.standalone_trainer import DraftTrainer
    from rlpipe.types import Trajectory


class MakeTrainer(Protocol):
    """Builds the trainer of a draft model that has a separate directory."""

    def __call__(
        self,
        config: Config,
        start: str,
        trajectories: Sequence[Trajectory] = (),
        *,
        train_alongside: Callable[..., DraftTrainer],
    ) -> DraftTrainer:
        """Build the trainer.

        start: directory of the draft to train. If empty: the draft that the settings name, or a new draft.
        trajectories: the part of a new draft's training data that is already known. train_alongside: makes a
        trainer for a draft and its target (`actors.trainers.train_alongside`).
        """
        ...


def _accept(*_: object) -> None:
    """Accept any settings."""


@dataclass(slots=True, kw_only=True, frozen=True)
class DrafterFunctions:
    """Functions of one drafter; its properties are `config.drafters.KINDS`. Checks raise ValueError.

    guess: (tokens of the text [T], count, settings) -> the `count` tokens that are guessed to follow. For a
        drafter without a model.
    make_trainer: builds the trainer of a draft model that has a separate directory.
    check_served: refuses settings under which the drafter cannot draft for the model that generates.
    check_sglang: refuses drafts that SGLang would compute differently from the trainer. Arguments: the
        target's config.json and the server's settings.
    check_trained: refuses drafts that `mtp_adapt` cannot train. Argument: the target's config.json.
    check_cotrained: refuses settings under which the draft cannot be trained with the policy.
    """

    guess: Callable[[np.ndarray, int, SpecConfig], np.ndarray] | None = None
    make_trainer: MakeTrainer | None = None
    check_served: Callable[[Config, HfConfig], None] = _accept
    check_sglang: Callable[[SpecConfig, HfConfig, SglangConfig], None] = _accept
    check_trained: Callable[[Config, HfConfig], None] = _accept
    check_cotrained: Callable[[Config], None] = _accept
