"""Alarm rules, which docs/alarms.md explains and `rlpipe.diagnosis.alarms` applies. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpipe.config.choice import Choice
from rlpipe.config.limits import at_least

DRAFT_HARMED = "draft_harmed"  # the only alarm that changes a run: it ends the training of the draft


class AlarmTest(Choice):
    """How a metric is compared with the threshold of a rule."""

    ABOVE = "above"  # value > threshold
    BELOW = "below"  # value < threshold
    SPIKE = "spike"  # value > threshold * median of the last `over` values
    RISE = "rise"  # value > threshold * median of the run's first `over` values
    DROP = "drop"  # value < threshold * median of the run's first `over` values
    DECLINE = "decline"  # value < median of the run's first `over` values - threshold
    FALL = "fall"  # value < threshold * the run's highest value so far
    DIVERGE = "diverge"  # value grew by more than threshold since the metric `against` had its highest value


@dataclass(slots=True, kw_only=True)
class AlarmRule:
    """One alarm: a metric, its test and threshold."""

    metric: str
    """Name of the metric in metrics.jsonl."""

    test: AlarmTest = AlarmTest.ABOVE
    """See `AlarmTest`."""

    threshold: float = 0.0
    """See `AlarmTest`."""

    over: int = 10
    """Number of values from which a median is computed."""

    patience: int = 1
    """Number of successive observations that must fail before the alarm is raised."""

    against: str = ""
    """The other metric of test=diverge."""

    enabled: bool = True
    """False disables the rule."""

    def __post_init__(self) -> None:
        self.test = AlarmTest(self.test)
        if not self.metric:
            raise ValueError("an alarm rule watches no metric. Set its `metric`, or enabled=false.")

        if self.patience < 1 or self.over < 1:
            raise ValueError(
                f"alarm on {self.metric!r}: patience={self.patience} and over={self.over} must be 1 or more."
            )

        if (self.test is AlarmTest.DIVERGE) != bool(self.against):
            raise ValueError(
                f"alarm on {self.metric!r}: `against` names the other metric of test=diverge and nothing "
                f"else; got test={self.test}, against={self.against!r}."
            )


def _rule(metric: str, test: AlarmTest, threshold: float, **options: int | str) -> AlarmRule:
    """Return a rule. The arguments are positional, so that each rule fits in one line of the table."""
    return AlarmRule(metric=metric, test=test, threshold=threshold, **options)


def default_rules() -> dict[str, AlarmRule]:
    """Return the default alarm rules by name; docs/alarms.md has a section for each."""
    above, below, spike = AlarmTest.ABOVE, AlarmTest.BELOW, AlarmTest.SPIKE
    rise, drop, fall = AlarmTest.RISE, AlarmTest.DROP, AlarmTest.FALL
    stale = "training/off_policy/trajectory_staleness/mean"

    return {
        "logprob_mismatch": _rule("training/rollout_probs_diff_mean", above, 0.05, patience=3),
        "rollout_kl": _rule("rollout_corr/k3_kl", above, 0.1, patience=3),
        "ratio_tail": _rule("rollout_corr/chi2_token", above, 5.0, patience=3),
        "policy_kl": _rule("actor/ppo_kl", above, 0.2),
        "entropy_collapse": _rule("rollout/entropy", drop, 0.2, patience=3),
        "entropy_decline": _rule("rollout/entropy", AlarmTest.DECLINE, 1.0, patience=3),
        "repetition": _rule("rollout/distinct_tokens", drop, 0.8, patience=3),
        "entropy_explosion": _rule("rollout/entropy", rise, 4.0, patience=3),
        "gradient_spike": _rule("actor/grad_norm", spike, 10.0, over=20),
        "skipped_updates": _rule("actor/skipped_steps", above, 0.0, patience=3),
        "reward_hacking": _rule(
            "critic/rewards/mean", AlarmTest.DIVERGE, 0.15, against="val/reward", patience=2
        ),
        "length_collapse": _rule("response_length/mean", drop, 0.3, patience=5),
        "truncation": _rule("response_length/clip_ratio", above, 0.5, patience=5),
        "no_signal": _rule("env/no_signal", above, 0.9, patience=5),
        "tamper": _rule("env/tamper_solved", above, 0.0),
        "staleness": _rule(stale, above, 4.0, patience=3),
        "acceptance_drop": _rule("spec/acceptance_rate", drop, 0.8, patience=5),
        "kernels_failed": _rule("spec/verified_without_kernels", above, 0.0),
        DRAFT_HARMED: _rule("probe/held_out/acceptance_length/rejection", fall, 0.95, patience=2),
        "draft_stale": _rule("probe/staleness", below, -0.1, patience=2),
        # The times of asynchronous steps alternate by a factor of ten.
        "slow_step": _rule("timing_s/step", spike, 15.0, over=20),
    }


@dataclass(slots=True, kw_only=True)
class AdviceConfig:
    """Settings of the advice that a run derives from its metrics."""

    enabled: bool = True
    """Write advice in plain text (events of kind `advice`)."""

    draft_cost: float = 0.1
    """Cost of one draft pass, in decode steps without drafts, for advice on drafts. Advice on gamma uses it
    only if the engine measures no `spec/step_seconds/...`. `scripts/bench` measures it."""

    def __post_init__(self) -> None:
        remedy = "it is the time of a draft pass over that of a decode step, e.g. 0.1"
        at_least(0, self, "metrics.advice", "draft_cost", remedy=remedy)


@dataclass(slots=True, kw_only=True)
class AlarmsConfig:
    """The alarms of a run and their rules."""

    enabled: bool = True
    """False disables all alarms."""

    stall_minutes: float = 30.0
    """Minutes without a finished step after which the alarm `stall` is raised; 0: never. The first step may
    take three times as long."""

    rules: dict[str, AlarmRule] = field(default_factory=default_rules)
    """Rules by name; for example `metrics.alarms.rules.policy_kl.threshold=0.5` changes a threshold."""

    def __post_init__(self) -> None:
        at_least(0, self, "metrics.alarms", "stall_minutes", remedy="0 is never")
