"""Settings of the RL algorithm: advantage, policy loss, correction. Names are verl's. Imports no torch.

`advantage` and `policy_loss` are strings, because they name entries of verl's registries or a user's
functions. The trainer refuses an unknown name at launch and lists the registered names.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpipe.config.choice import Choice
from rlpipe.config.limits import at_least, positive
from rlpipe.config.user_code import absolute


class LossAgg(Choice):
    """How token losses are aggregated into one number; all rules normalise over the global batch.

    GRPO in Bebop Eq. 3 is SEQ_MEAN_TOKEN_MEAN, 1/G sum_i 1/|y_i| sum_t. The default differs, because in that
    formula a token has less weight in a long answer than in a short answer (DAPO, arXiv 2503.14476).
    """

    TOKEN_MEAN = "token-mean"
    TOKEN_SUM = "token-sum"
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"


class Credit(Choice):
    """The reward with which the tokens of a turn are credited; see `rlpipe.algo.advantage`."""

    EPISODE = "episode"  # the reward of the full trajectory
    TURN = "turn"  # the sum of the rewards of this turn and all later turns


class KlKind(Choice):
    """Estimator of KL(policy || reference) per token; K3_PLUS has k2's gradient, which is unbiased."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    K3_PLUS = "k3+"
    ABS = "abs"


class Correction(Choice):
    """How the loss corrects for tokens that another policy sampled. r = pi_trainer / pi_rollout."""

    NONE = "none"  # no correction, only metrics
    TIS_TOKEN = "tis_token"  # truncated importance sampling: each token has weight min(r, C)
    TIS_SEQUENCE = "tis_sequence"  # the same with the product of the ratios of a trajectory
    ICEPOP = "icepop"  # weight r if it is between two bounds, else 0
    OBRS = "obrs"  # accepts tokens with probability min(1, r / lam), then reweights them (Jackpot)
    OBRS_MASK = "obrs_mask"  # the biased rejection of obrs without its weights (Jackpot Tables 6, 7)
    OBRS_WEIGHT = "obrs_weight"  # the weights of obrs without its rejection, also biased
    USER = "user"  # a user's correction, named by algo.user_correction

    @property
    def is_obrs(self) -> bool:
        """Whether this is OBRS, or a part of OBRS."""
        return self in (Correction.OBRS, Correction.OBRS_MASK, Correction.OBRS_WEIGHT)


class Proximal(Choice):
    """The proximal policy: the denominator of PPO's ratio. A correction weighs tokens relative to it."""

    START = "start"  # the policy at the start of the batch: decoupled PPO if a correction weighs tokens
    CURRENT = "current"  # the current policy, detached: the clip has no effect (Jackpot App. 10.1)
    ROLLOUT = "rollout"  # the policy that sampled: coupled PPO, which needs no weights


class MaskRule(Choice):
    """Which tokens are masked, based on verl's estimators of the divergence between rollout and trainer.

    The estimate is per token, or per trajectory by sum, mean or maximum over its tokens. With x = log r, k1
    is -x and has two bounds; k2 = x^2 / 2 and k3 = e^x - 1 - x have one bound.
    """

    NONE = "none"
    TOKEN_K1 = "token_k1"
    TOKEN_K2 = "token_k2"
    TOKEN_K3 = "token_k3"
    SEQ_SUM_K1 = "seq_sum_k1"
    SEQ_SUM_K2 = "seq_sum_k2"
    SEQ_SUM_K3 = "seq_sum_k3"
    SEQ_MEAN_K1 = "seq_mean_k1"
    SEQ_MEAN_K2 = "seq_mean_k2"
    SEQ_MEAN_K3 = "seq_mean_k3"
    SEQ_MAX_K2 = "seq_max_k2"
    SEQ_MAX_K3 = "seq_max_k3"


class ObrsTarget(Choice):
    """The target policy to which the accepted tokens are reweighted."""

    CURRENT = "current"  # the policy being updated
    REFERENCE = "reference"  # the proximal policy, which is the current one if a batch has one optimizer step


class ObrsNormalizer(Choice):
    """How the normaliser Z, the accepted probability mass, is computed."""

    TOPK = "topk"  # sum over the candidates (as in the paper), which is never too large
    TOPK_TAIL = "topk_tail"  # this sum plus a bound for other tokens: never too small, 1 for equal policies
    EXACT = "exact"  # sum over the full vocabulary, for checks: engines send V numbers for each token


class ObrsCalibration(Choice):
    """What calibrates kappa, a common factor of the normalisers in a batch; `exact` needs no calibration."""

    NONE = "none"
    ACCEPTED = "accepted"  # share of accepted tokens (as in the paper)
    PROBABILITY = "probability"  # mean acceptance probability, which has the same expectation with less noise


@dataclass(slots=True, kw_only=True)
class ObrsConfig:
    """Settings of optimal budgeted rejection sampling, for correction=obrs."""

    lam: float = 1.0
    """Lambda in the acceptance probability min(1, p / (lam q)). With 1, all tokens are accepted if the
    policies are equal. With larger values, tokens are rejected even then, and the distribution of accepted
    tokens is closer to the target."""

    c1: float = 3.0
    """Bound of the weight Z max(lam, p / q)."""

    c2: float = 3.0
    """Bound of p_proximal / p_target. This ratio is 1 unless the target is the current policy and a batch has
    several optimizer steps."""

    top_k: int = 20
    """Number of candidate tokens that the engine returns with each sampled token."""

    target: ObrsTarget = ObrsTarget.CURRENT
    """See `ObrsTarget`."""

    normalizer: ObrsNormalizer = ObrsNormalizer.TOPK_TAIL
    """See `ObrsNormalizer`."""

    calibration: ObrsCalibration = ObrsCalibration.PROBABILITY
    """See `ObrsCalibration`."""

    def __post_init__(self) -> None:
        positive(self, "algo.obrs", "lam", remedy="1.0 is usual")
        remedy = "a smaller bound scales down tokens on which the policies agree; 3.0 is usual"
        at_least(1, self, "algo.obrs", "c1", "c2", remedy=remedy)
        at_least(1, self, "algo.obrs", "top_k", remedy="20 is usual")


@dataclass(slots=True, kw_only=True)
class AlgoConfig:
    """Settings of the algorithm; the defaults are GRPO."""

    advantage: str = "grpo"
    """A verl advantage estimator, or a user's function: path/to/file.py:NAME or module:NAME."""

    normalize_std: bool = True
    """Divide by the group's standard deviation (false: Dr. GRPO). Only the grpo family uses this setting."""

    credit: Credit = Credit.EPISODE
    """See `Credit`. `turn` is for environments that reward individual turns."""

    policy_loss: str = "vanilla"
    """A verl policy loss, or a user's function; see `rlpipe.algo.user_functions`."""

    clip_low: float = 0.2
    """Clip the ratio to at least 1 - clip_low."""

    clip_high: float = 0.2
    """Clip the ratio to at most 1 + clip_high."""

    clip_dual: float = 3.0
    """Dual-clip bound c > 1 for negative advantages."""

    loss_agg: LossAgg = LossAgg.TOKEN_MEAN
    """See `LossAgg`."""

    loss_scale_factor: int | None = None
    """Divisor of seq-mean-token-sum-norm, in tokens; required for it, ignored otherwise."""

    kl_coef: float = 0.0
    """Weight of the KL penalty relative to the initial policy; with 0, no reference policy is in memory."""

    kl_kind: KlKind = KlKind.K3
    """Estimator of the KL penalty. See `KlKind`."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    correction: Correction = Correction.TIS_TOKEN
    """See `Correction`."""

    correction_threshold: float = 2.0
    """The bound C of TIS, or the upper bound of IcePop."""

    correction_low: float = 0.5
    """Lower bound of IcePop."""

    user_correction: str = ""
    """The function or class of correction=user, as module:NAME or path/to/file.py:NAME; see
    `rlpipe.algo.rule`."""

    proximal: Proximal = Proximal.START
    """See `Proximal`."""

    mask: MaskRule = MaskRule.NONE
    """Mask that is applied in addition to the correction. See `MaskRule`."""

    mask_high: float | None = None
    """Upper bound of the mask's statistic; for k1, the upper bound of pi_rollout / pi_trainer."""

    mask_low: float | None = None
    """For k1, the lower bound of pi_rollout / pi_trainer; by default 1 / mask_high."""

    obrs: ObrsConfig = field(default_factory=ObrsConfig)
    """Settings of correction=obrs."""

    ppo_epochs: int = 1
    """Number of passes over a batch."""

    minibatches: int = 1
    """Number of optimizer steps in each pass."""

    skip_zero_advantage: bool = True
    """Leave out trajectories with only zero advantages. If the loss is linear in the advantage and has no KL
    or entropy term, their gradient is 0. So this saves compute, and changes only the tokens on which
    actor/entropy and rollout_corr/* are measured. Their tokens still count in the loss normalisation. Ignored
    if kl_coef or entropy_coef is not 0."""

    def __post_init__(self) -> None:
        self.correction, self.credit = Correction(self.correction), Credit(self.credit)
        self.advantage, self.policy_loss = absolute(self.advantage), absolute(self.policy_loss)
        self.user_correction = absolute(self.user_correction)
        positive(self, "algo", "clip_low", "clip_high", "correction_threshold", "correction_low")
        if self.clip_dual <= 1:
            raise ValueError(f"algo.clip_dual must exceed 1, got {self.clip_dual}; 3.0 is usual.")
        at_least(0, self, "algo", "kl_coef", remedy="0 keeps no reference")
        at_least(1, self, "algo", "ppo_epochs", "minibatches")

        # Refuse settings that contradict each other.
        if self.loss_agg is LossAgg.SEQ_MEAN_TOKEN_SUM_NORM and not self.loss_scale_factor:
            raise ValueError(
                "algo.loss_agg=seq-mean-token-sum-norm divides by algo.loss_scale_factor, which is "
                f"{self.loss_scale_factor}: set it, for example to the longest response in tokens."
            )
        if (self.correction is Correction.USER) != bool(self.user_correction):
            raise ValueError(
                f"algo.correction={self.correction} with algo.user_correction={self.user_correction!r}: a "
                "correction of yours needs both algo.correction=user and "
                "algo.user_correction=my_code.py:NAME."
            )

        if self.correction is Correction.ICEPOP and self.correction_low > self.correction_threshold:
            raise ValueError(
                f"algo.correction=icepop keeps ratios from algo.correction_low={self.correction_low} to "
                f"algo.correction_threshold={self.correction_threshold}, an empty interval: swap them."
            )

        if self.proximal is Proximal.ROLLOUT and self.correction is not Correction.NONE:
            raise ValueError(
                f"algo.proximal=rollout has the importance ratio in PPO's own, and algo.correction="
                f"{self.correction} would apply it again: set algo.correction=none or algo.proximal=start."
            )

        if self.correction.is_obrs and self.loss_agg is LossAgg.SEQ_MEAN_TOKEN_MEAN:
            raise ValueError(
                f"algo.correction={self.correction} with algo.loss_agg={self.loss_agg}: the mean over a "
                "sequence counts only the tokens it keeps, so a sequence would weigh the same however few "
                "they are. Set algo.loss_agg=token-mean."
            )
        self._check_mask()

    def _check_mask(self) -> None:
        """Refuse missing bounds, and bounds that do not fit the mask's statistic. Raises ValueError."""
        if self.mask is MaskRule.NONE:
            if self.mask_high is not None or self.mask_low is not None:
                raise ValueError(
                    f"algo.mask_high={self.mask_high} and algo.mask_low={self.mask_low} bound nothing with "
                    "algo.mask=none: choose a rule, for example algo.mask=seq_mean_k3."
                )
            return

        if self.mask_high is None or self.mask_high <= 0:
            raise ValueError(f"algo.mask={self.mask} needs algo.mask_high > 0, got {self.mask_high}.")

        # Only k1 has two bounds, on the ratio pi_rollout / pi_trainer.
        ratio = self.mask.value.endswith("k1")
        if self.mask_low is not None and not (ratio and 0 < self.mask_low <= self.mask_high):
            remedy = (
                "choose it from 0 to algo.mask_high" if ratio else "remove it: this statistic has one bound"
            )
            raise ValueError(f"algo.mask_low={self.mask_low} does not fit algo.mask={self.mask}: {remedy}.")

        if ratio and self.mask_low is None and self.mask_high < 1:
            raise ValueError(
                f"algo.mask_high={self.mask_high} is below 1 / algo.mask_high, the default lower bound: "
                "set algo.mask_low."
            )

    @property
    def skips_zero_advantage(self) -> bool:
        """Whether zero-advantage trajectories may be left out of the forward pass."""
        return self.skip_zero_advantage and self.kl_coef == 0 and self.entropy_coef == 0

    @property
    def optimizer_steps(self) -> int:
        """Number of optimizer steps per batch."""
        return self.ppo_epochs * self.minibatches

    @property
    def needs_start_logprobs(self) -> bool:
        """Whether the trainer needs a forward pass over a batch before its first optimizer step.

        With a single optimizer step it is not needed, because that step's forward pass computes the logprobs.
        """
        return self.proximal is Proximal.START and self.optimizer_steps > 1
