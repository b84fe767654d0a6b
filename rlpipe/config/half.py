"""Which half of the loop runs, and what a half does without. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlpipe.config.choice import Choice
from rlpipe.config.injection import InjectionConfig
from rlpipe.config.pipeline import Stale

if TYPE_CHECKING:
    from rlpipe.config.run import Config


class Half(Choice):
    """Which half of the loop runs."""

    BOTH = "both"
    ROLLOUT = "rollout"  # batches are played and scored with fixed weights and dumped; no trainer is built
    TRAIN = "train"  # the batches of a dump are trained on, in its order; no engine is built

    @property
    def rolls(self) -> bool:
        """Whether engines and environments run."""
        return self is not Half.TRAIN

    @property
    def trains(self) -> bool:
        """Whether a trainer runs."""
        return self is not Half.ROLLOUT


def of_half(config: Config) -> Config:
    """The settings a half goes by: without what needs the other one.

    No validation (it needs engines, and weights that change) and, without a trainer, no probe. What a dump
    holds was selected when it was made: all of it is trained on, in its order.
    """
    half = config.run.half
    if half is Half.BOTH:
        return config
    settings: dict[str, Any] = {"val": replace(config.val, every=0)}
    if half is Half.ROLLOUT:
        probe = replace(config.metrics.probe, every=0)
        settings["metrics"] = replace(config.metrics, probe=probe)
    else:
        order = {"stale": Stale.WAIT, "oversample": 1.0, "filter_equal_rewards": False}
        settings["pipeline"] = replace(config.pipeline, **order)
        settings["injection"] = InjectionConfig()
    return replace(config, **settings)
