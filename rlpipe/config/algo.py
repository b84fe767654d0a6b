"""The RL algorithm: advantage, policy loss, correction. Names are verl's. Imports no torch.

`advantage` and `policy_loss` are open names (verl's registries, own registrations included), so they
are strings; the trainer refuses an unknown one at launch and lists what is registered.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.config.choice import Choice


class LossAgg(Choice):
    """How token losses become one number; all are normalised over the global batch."""

    TOKEN_MEAN = "token-mean"
    TOKEN_SUM = "token-sum"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"


class KlKind(Choice):
    """Estimator of KL(policy || reference) per token; `_PLUS` has the unbiased gradient of k2."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    K3_PLUS = "k3+"
    ABS = "abs"


class Correction(Choice):
    """Importance weight pi_trainer / pi_rollout of each token, truncated from above (TIS)."""

    NONE = "none"  # metrics only
    TIS_TOKEN = "tis_token"  # per-token ratio
    TIS_SEQUENCE = "tis_sequence"  # product of the ratios of a trajectory


@dataclass(slots=True, kw_only=True)
class AlgoConfig:
    """GRPO unless told otherwise.

    advantage: a verl advantage estimator. normalize_std: divide by the group's standard deviation
        (off: Dr. GRPO); only the grpo family reads it.
    policy_loss: a verl policy loss. clip_low, clip_high: clip the ratio to [1 - low, 1 + high].
    clip_dual: dual-clip bound c > 1 for negative advantages. loss_agg: see LossAgg.
    loss_scale_factor: divisor of seq-mean-token-sum-norm, in tokens (required there, else ignored).
    kl_coef, kl_kind: penalty to the start weights (0: no reference is kept). entropy_coef: bonus.
    correction, correction_threshold: truncated importance sampling, C in min(ratio, C).
    ppo_epochs, minibatches: passes over a batch, and optimizer steps in each pass.
    skip_zero_advantage: leave out trajectories whose advantages are all 0; with a loss that is
        linear in the advantage and neither KL nor entropy term their gradient is 0, so this saves
        their compute and changes only which tokens actor/entropy and rollout_corr/* are measured on.
        Their tokens still count in the loss normalisation. Ignored when kl_coef or entropy_coef is not 0.
    """

    advantage: str = "grpo"
    normalize_std: bool = True
    policy_loss: str = "vanilla"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float = 3.0
    loss_agg: LossAgg = LossAgg.TOKEN_MEAN
    loss_scale_factor: int | None = None
    kl_coef: float = 0.0
    kl_kind: KlKind = KlKind.K3
    entropy_coef: float = 0.0
    correction: Correction = Correction.TIS_TOKEN
    correction_threshold: float = 2.0
    ppo_epochs: int = 1
    minibatches: int = 1
    skip_zero_advantage: bool = True

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "correction_threshold"):
            if getattr(self, name) <= 0:
                raise ValueError(f"algo.{name} must be positive, got {getattr(self, name)}.")
        if self.clip_dual <= 1:
            raise ValueError(f"algo.clip_dual must exceed 1, got {self.clip_dual}; 3.0 is usual.")
        if self.kl_coef < 0:
            raise ValueError(f"algo.kl_coef must be >= 0 (0 keeps no reference), got {self.kl_coef}.")
        if self.ppo_epochs < 1 or self.minibatches < 1:
            raise ValueError(
                f"algo.ppo_epochs={self.ppo_epochs} and algo.minibatches={self.minibatches} must be >= 1."
            )
        if self.loss_agg is LossAgg.SEQ_MEAN_TOKEN_SUM_NORM and not self.loss_scale_factor:
            raise ValueError(
                "algo.loss_agg=seq-mean-token-sum-norm divides by algo.loss_scale_factor, which is "
                f"{self.loss_scale_factor}: set it, for example to the longest response in tokens."
            )

    @property
    def skips_zero_advantage(self) -> bool:
        """Whether zero-advantage trajectories may be left out of the forward pass."""
        return self.skip_zero_advantage and self.kl_coef == 0 and self.entropy_coef == 0

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per batch."""
        return self.ppo_epochs * self.minibatches
