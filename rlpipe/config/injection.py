"""Settings that inject failures of asynchronous RL at scale, each by a known amount. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rlpipe.config.limits import at_least, share


@dataclass(slots=True, kw_only=True)
class InjectionConfig:
    """Failures to inject, all off by default. They affect training rollouts only, never validation."""

    stale_steps: int = 0
    """Age, in training steps, of the weights with which rollouts decode, in addition to the staleness that
    pipeline.max_staleness allows. Engines store as many copies of the weights in memory."""

    weight_noise: float = 0.0
    """Relative standard deviation of normal noise on every weight of the rollout engine, sampled again for
    each policy version. 0.001 has about the effect of rounding to bfloat16. Logprobs are computed with the
    noisy weights."""

    slow_env_share: float = 0.0
    """Share of episodes with a wait before each answer of their environment."""

    slow_env_seconds: float = 0.0
    """Seconds of this wait."""

    long_turn_share: float = 0.0
    """Share of turns that decode additional tokens, which are then discarded. This takes the time of long
    answers, but has no effect on the policy."""

    long_turn_tokens: int = 0
    """Number of these additional tokens, if they fit into the context."""

    def __post_init__(self) -> None:
        amounts = ("stale_steps", "weight_noise", "slow_env_seconds", "long_turn_tokens")
        at_least(0, self, "injection", *amounts, remedy="0 is off")
        share(self, "injection", "slow_env_share", "long_turn_share")

        # A share without an amount has no effect, and an amount without a share has none either.
        for part, amount in (
            ("slow_env_share", "slow_env_seconds"),
            ("long_turn_share", "long_turn_tokens"),
        ):
            how_many, how_much = getattr(self, part), getattr(self, amount)
            if bool(how_many) != bool(how_much):
                raise ValueError(
                    f"injection.{part}={how_many} and injection.{amount}={how_much} do nothing without each "
                    "other: set both, or neither."
                )

    def active(self) -> dict[str, float]:
        """Return the settings that are on, by name; empty in an ordinary run."""
        return {name: value for name, value in asdict(self).items() if value}

    @property
    def changes_weights(self) -> bool:
        """Whether rollouts decode with weights that are not the trainer's newest."""
        return bool(self.stale_steps or self.weight_noise)
