"""Every metric declared once: name, kind, unit, definition, source and producer.

Owns the names; computes and stores nothing. Flow: `MetricsBus.emit` asks `declared(name)` and refuses
what is not here, the report shows the definitions, and `python -m rlpipe.metrics.names` prints
docs/metrics.md. verl's name is used wherever verl has one (`*` in the page), so existing dashboards work.

`{k}` in a name stands for a number, any other `{word}` for one path segment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from rlpipe.metrics.distributions import SKETCH_PARTS, Histogram, Sketch
from rlpipe.metrics.values import Last, Max, Mean, Min, Ratio, Spans, Sum, Value


class Kind(StrEnum):
    """How a metric is reduced over actors and micro-batches, and thereby which value types it takes."""

    AVERAGE = "average"  # Mean or Ratio: Σ / Σ
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"
    HISTOGRAM = "histogram"  # counts between fixed bounds
    SKETCH = "sketch"  # quantiles; a record holds one number for each of SKETCH_PARTS
    SPANS = "spans"  # pieces of time; they go to the trace and never enter a record
    ANY = "any"  # a family of names whose members differ

    def accepts(self, value: Value) -> bool:
        """Whether a value of this type may be emitted under a name of this kind."""
        return isinstance(value, _TYPES[self])


_TYPES: dict[Kind, tuple[type, ...]] = {
    Kind.AVERAGE: (Mean, Ratio),
    Kind.SUM: (Sum,),
    Kind.MAX: (Max,),
    Kind.MIN: (Min,),
    Kind.LAST: (Last,),
    Kind.HISTOGRAM: (Histogram,),
    Kind.SKETCH: (Sketch,),
    Kind.SPANS: (Spans,),
    Kind.ANY: (Mean, Ratio, Sum, Max, Min, Last),
}


@dataclass(slots=True, kw_only=True, frozen=True)
class Metric:
    """One declaration.

    name: with `{placeholders}`. unit: "1" is a fraction or a pure number. definition: one sentence.
    source: verl, an equation, or ours. produced_by: component that emits it.
    """

    name: str
    kind: Kind
    unit: str
    definition: str
    source: str
    produced_by: str


@dataclass(slots=True, kw_only=True, frozen=True)
class Section:
    """Declarations under one heading of the reference page."""

    title: str
    metrics: tuple[Metric, ...]


def _section(title: str, produced_by: str, source: str, *rows: tuple[str, str, str, str]) -> Section:
    """Rows are (name, kind, unit, definition); kind "stats" stands for the three mean, max and min."""
    metrics = []
    for name, kind, unit, definition in rows:
        expanded = (
            [(f"{name}/mean", Kind.AVERAGE), (f"{name}/max", Kind.MAX), (f"{name}/min", Kind.MIN)]
            if kind == "stats"
            else [(name, Kind(kind))]
        )
        metrics += [
            Metric(name=n, kind=k, unit=unit, definition=definition, source=source, produced_by=produced_by)
            for n, k in expanded
        ]
    return Section(title=title, metrics=tuple(metrics))


SECTIONS: tuple[Section, ...] = (
    _section(
        "Reward and advantage",
        "collect",
        "verl",
        ("critic/score", "stats", "1", "Reward given by the environment, per trained trajectory."),
        ("critic/rewards", "stats", "1", "Reward that enters the advantage, per trained trajectory."),
        ("critic/advantages", "stats", "1", "Advantage per trained trajectory, after group normalisation."),
        ("critic/returns", "stats", "1", "Return per trained trajectory, where the estimator defines one."),
    ),
    _section(
        "Policy update",
        "trainer",
        "verl",
        ("actor/entropy", "average", "nat", "Entropy of the trainer's policy, per trained token."),
        ("actor/pg_loss", "average", "1", "Policy-gradient loss, aggregated as algo.loss_agg says."),
        ("actor/pg_clipfrac", "average", "1", "Share of trained tokens whose ratio is clipped above."),
        ("actor/pg_clipfrac_lower", "average", "1", "Share clipped by the dual clip (negative advantage)."),
        (
            "actor/ppo_kl",
            "average",
            "nat",
            "Mean of old minus current logprob: how far one update moves (k1 estimate of the KL).",
        ),
        ("actor/kl_loss", "average", "nat", "KL to the reference policy, before its coefficient."),
        ("actor/kl_coef", "last", "1", "Coefficient of the KL to the reference policy."),
        ("actor/loss", "average", "1", "Total loss that is differentiated."),
        ("actor/grad_norm", "average", "1", "L2 norm of the policy gradient before clipping, per update."),
        ("actor/lr", "last", "1", "Learning rate of the policy."),
        ("actor/weight_decay", "last", "1", "Weight decay of the policy."),
        ("actor/skipped_steps", "sum", "update", "Updates skipped because the gradient was not finite."),
        (
            "actor/idle_steps",
            "sum",
            "update",
            "Updates left out because the gradient was 0, as where all advantages are: weights, moments and "
            "learning rate stay.",
        ),
        ("actor/entropy_loss", "average", "nat", "Entropy bonus of the loss, before its coefficient."),
    ),
    _section(
        "Decoupled actor",
        "trainer",
        "Jackpot Eq. 6, 7; p is the policy, q the actor that generates for it",
        (
            "decoupled/kl",
            "average",
            "nat",
            "KL(p || q) over the whole vocabulary, per sampled token, when their step begins.",
        ),
        ("decoupled/reverse_kl", "average", "nat", "KL(q || p), likewise."),
        ("decoupled/overlap", "average", "1", "Σ min(p, q) over the vocabulary, per sampled token."),
        (
            "decoupled/distill_loss",
            "average",
            "nat",
            "Divergence that distils the actor (decoupled.distill_kl), aggregated as algo.loss_agg says, "
            "before its coefficient.",
        ),
        ("decoupled/pg_loss", "average", "1", "PPO loss of the actor, before its coefficient."),
        ("decoupled/pg_clipfrac", "average", "1", "Share of its tokens whose ratio is clipped above."),
        ("decoupled/ppo_kl", "average", "nat", "Mean of old minus current logprob of the actor."),
        ("decoupled/entropy", "average", "nat", "Entropy of the actor, per trained token."),
        (
            "decoupled/grad_norm",
            "average",
            "1",
            "L2 norm of the actor's gradient, PPO and distillation, before clipping, per update.",
        ),
        ("decoupled/lr", "last", "1", "Learning rate of the actor."),
        ("decoupled/skipped_steps", "sum", "update", "Updates skipped: the gradient was not finite."),
        (
            "decoupled/rollout_k3_kl",
            "average",
            "nat",
            "KL of the actor that sampled to the one that is trained (k3): its own staleness.",
        ),
        (
            "decoupled/rollout_probs_diff_max",
            "max",
            "1",
            "Largest |p_rollout - p_actor| of a trained token.",
        ),
    ),
    _section(
        "Draft update",
        "trainer",
        "ours",
        (
            "mtp/loss",
            "average",
            "1",
            "Loss of the draft (mtp.objective) per drafted token, all depths; nat for hard_ce and KL.",
        ),
        ("mtp/grad_norm", "average", "1", "L2 norm of the draft's gradient before clipping, per update."),
        ("mtp/lr", "last", "1", "Learning rate of the draft."),
        (
            "mtp/skipped_steps",
            "sum",
            "update",
            "Updates of the draft skipped: a gradient was not finite, or nothing was drafted.",
        ),
        (
            "mtp/alpha/depth_{k}",
            "average",
            "1",
            "Overlap Σ_v min(p, q) of target and draft at depth k: its acceptance rate under rejection. As "
            "all of mtp/*, teacher-forced on the batch and before the update.",
        ),
        ("mtp/draft_entropy/depth_{k}", "average", "nat", "Entropy of the draft at depth k."),
        ("mtp/target_entropy/depth_{k}", "average", "nat", "Entropy of the target there."),
        ("mtp/kl/depth_{k}", "average", "nat", "KL(target || draft) at depth k."),
        ("mtp/reverse_kl/depth_{k}", "average", "nat", "KL(draft || target) at depth k."),
        (
            "mtp/target_above/depth_{k}",
            "average",
            "1",
            "Target's mass on tokens to which it gives more than the draft.",
        ),
        (
            "mtp/draft_above/depth_{k}",
            "average",
            "1",
            "Draft's mass on tokens to which it gives more than the target.",
        ),
        (
            "mtp/top1/depth_{k}",
            "average",
            "1",
            "Share of positions where both have the same likeliest token.",
        ),
        (
            "mtp/predicted_acceptance_length",
            "average",
            "token",
            "Tokens per verify step that chain verification would emit on these sequences, in expectation.",
        ),
    ),
    _section(
        "Draft update: PPOW",
        "trainer",
        "PPOW Section 4; a window is mtp.depths drafts from one place",
        (
            "ppow/loss",
            "average",
            "1",
            "Negative objective per drafted token, KL included. As all of ppow/*, before the update, over "
            "the windows that the step drafted.",
        ),
        (
            "ppow/reward",
            "average",
            "1",
            "Reward per window: k / (1 + c k) for k accepted drafts of cost c each, and R_dist where k = 0; "
            "its expectation over the coins with ppow.expected_reward.",
        ),
        ("ppow/accepted", "average", "token", "Accepted drafts per window, before the token of the target."),
        ("ppow/rejected_windows", "average", "1", "Share of windows of which nothing is accepted."),
        (
            "ppow/close_windows",
            "average",
            "1",
            "Share of those that earn R_dist: the target finds them almost as likely as its greedy window.",
        ),
        (
            "ppow/even_windows",
            "average",
            "1",
            "Share of windows that earn what all their siblings do, and so teach nothing but the KL.",
        ),
        ("ppow/kl", "average", "nat", "KL(draft || target) per drafted token, after the drafts before it."),
        (
            "ppow/clip_fraction",
            "average",
            "1",
            "Share of drafted tokens whose ratio is clipped: 0, as windows are drafted anew for each update.",
        ),
        (
            "ppow/score",
            "average",
            "nat",
            "Score of the windows trained on: confidence times KL(target || draft), mean of their places.",
        ),
        ("ppow/hard_share", "average", "1", "Share of windows drawn by score: the curriculum."),
    ),
    _section(
        "Adaptation",
        "adapt",
        "ours",
        (
            "adapt/{domain}/{mode}/acceptance_rate",
            "average",
            "1",
            "Σ accepted / Σ drafted tokens of an engine that plays this held-out set under this mode.",
        ),
        (
            "adapt/{domain}/{mode}/acceptance_rate/depth_{k}",
            "average",
            "1",
            "Σ accepted / Σ reached at depth k, there: conditional on depth k-1 accepted.",
        ),
        (
            "adapt/{domain}/{mode}/acceptance_length",
            "average",
            "token",
            "1 + Σ accepted / Σ verify steps there, drafts behind the end of a turn included.",
        ),
        (
            "adapt/{domain}/{mode}/tokens_per_step",
            "average",
            "token",
            "Tokens that verify steps emitted within turns / Σ verify steps, there.",
        ),
        ("adapt/{domain}/{mode}/acceptance_rate_se", "last", "1", "Its standard error, clustered by prompt."),
        (
            "adapt/{domain}/{mode}/acceptance_length_se",
            "last",
            "token",
            "Its standard error, clustered by prompt.",
        ),
        (
            "adapt/{domain}/{mode}/tokens_per_step_se",
            "last",
            "token",
            "Its standard error, clustered by prompt.",
        ),
        (
            "adapt/{domain}/{mode}/tokens_per_s",
            "average",
            "token/s",
            "Tokens per second in which the engine was busy, there.",
        ),
        (
            "adapt/{domain}/alpha/depth_{k}",
            "last",
            "1",
            "Mean overlap Σ min(p, q) at depth k over all positions of what was played, teacher-forced.",
        ),
        (
            "adapt/{domain}/predicted_tokens_per_step",
            "last",
            "token",
            "Tokens per verify step that the visit recursion predicts for rejection on the same sequences.",
        ),
    ),
    _section(
        "Speculative decoding",
        "collect",
        "ours",
        (
            "spec/acceptance_rate",
            "average",
            "1",
            "Σ accepted / Σ drafted tokens, over the trained trajectories.",
        ),
        (
            "spec/acceptance_rate/depth_{k}",
            "average",
            "1",
            "Σ accepted / Σ reached at depth k: conditional on depth k-1 accepted; k = 1 is the first draft.",
        ),
        (
            "spec/acceptance_length",
            "average",
            "token",
            "Tokens per verify step, bonus included: 1 + Σ accepted / Σ verify steps, in 1..gamma+1.",
        ),
        ("spec/num_accepted", "histogram", "step", "Verify steps by the number of drafts they kept."),
        ("spec/verify_steps", "sum", "step", "Verify steps spent on the trained trajectories."),
        (
            "spec/gamma",
            "average",
            "token",
            "Drafted tokens per row and decode step, steps without drafts included.",
        ),
        (
            "spec/speedup_observed",
            "average",
            "1",
            "Adaptive gamma: time of drafted steps without drafts, by measured costs / time taken.",
        ),
        (
            "spec/speedup_predicted",
            "average",
            "1",
            "Adaptive gamma: the same, as predicted when gamma was chosen.",
        ),
    ),
    _section(
        "Probe of acceptance",
        "trainer",
        "ours",
        (
            "probe/{set}/rejection/depth_{k}",
            "average",
            "1",
            "Overlap Σ_v min(p, q), acceptance under rejection, over all contexts of a set: `fixed`, the "
            "same ones in every probe, `visited`, recorded rollouts of the step, or, where the draft is "
            "trained online, `held_out`, of the first validation. As all probe/*, by the trainer's newest "
            "target and draft before the update, teacher-forced.",
        ),
        (
            "probe/{set}/target_only/depth_{k}",
            "average",
            "1",
            "p(argmax q), acceptance under target-only, there.",
        ),
        (
            "probe/{set}/accept/depth_{k}",
            "average",
            "1",
            "min(1, q / p) of the realised token: probability that it came from an accepted draft.",
        ),
        ("probe/{set}/top/depth_{k}", "average", "1", "Share of realised tokens that are the argmax of q."),
        ("probe/{set}/target_entropy/depth_{k}", "average", "nat", "Entropy of the target there."),
        ("probe/{set}/draft_entropy/depth_{k}", "average", "nat", "Entropy of the draft there."),
        ("probe/{set}/kl/depth_{k}", "average", "nat", "KL(target || draft) there."),
        ("probe/{set}/reverse_kl/depth_{k}", "average", "nat", "KL(draft || target) there."),
        ("probe/{set}/target_above/depth_{k}", "average", "1", "Target's mass where p > q."),
        ("probe/{set}/draft_above/depth_{k}", "average", "1", "Draft's mass where q > p."),
        (
            "probe/{set}/acceptance_length/{rule}",
            "average",
            "token",
            "Tokens per verify step that chain verification would emit from a context, under rejection or "
            "target_only, in expectation and all depths within the turn.",
        ),
        (
            "probe/visited/observed_rate",
            "average",
            "1",
            "Σ kept / Σ judged drafts of depth 1 by the engine, in the recorded rollouts of the step.",
        ),
        (
            "probe/visited/current_rate",
            "average",
            "1",
            "What the newest target and draft would have kept of the same drafts, in expectation.",
        ),
        (
            "probe/staleness",
            "last",
            "1",
            "observed_rate - current_rate: 0 in expectation when engines served the newest version.",
        ),
        ("probe/staleness_se", "last", "1", "Its standard error, clustered by trajectory."),
        ("probe/contexts", "last", "context", "Contexts that the probe read, of all sets."),
    ),
    _section(
        "Rollout against trainer",
        "trainer",
        "verl",
        (
            "training/rollout_probs_diff_mean",
            "average",
            "1",
            "Mean |p_rollout - p_trainer| over trained tokens, for the version that sampled them.",
        ),
        (
            "training/rollout_probs_diff_max",
            "max",
            "1",
            "Largest |p_rollout - p_trainer| of a trained token.",
        ),
        ("training/rollout_probs_diff_std", "average", "1", "Standard deviation of |p_rollout - p_trainer|."),
        (
            "training/rollout_actor_probs_pearson_corr",
            "average",
            "1",
            "Pearson correlation of p_rollout and p_trainer over trained tokens.",
        ),
        (
            "rollout_corr/{name}",
            "any",
            "1",
            "Rollout-correction metrics under verl's names (kl, k3_kl, ppl_ratio, chi2_token, "
            "rollout_is_mean, rollout_is_eff_sample_size, ...).",
        ),
    ),
    _section(
        "Off-policy correction: OBRS",
        "trainer",
        "Jackpot Section 4; p is the target, q the rollout",
        ("rollout_corr/obrs_acceptance", "average", "1", "Share of trained tokens that were accepted."),
        (
            "rollout_corr/obrs_acceptance_prob",
            "average",
            "1",
            "Mean acceptance probability min(1, p / (lam q)): the same expectation without the draws.",
        ),
        (
            "rollout_corr/obrs_z",
            "average",
            "1",
            "Normaliser Z as used in the weights, calibration included.",
        ),
        (
            "rollout_corr/obrs_z_ratio",
            "average",
            "1",
            "Σ Z_approx / Σ Z, before calibration; Z is exact with algo.obrs.normalizer=exact, else its "
            "unbiased estimate, the acceptance probability.",
        ),
        (
            "rollout_corr/obrs_kappa",
            "average",
            "1",
            "Σ accepted / Σ Z_approx: the calibration the next batch uses.",
        ),
        (
            "rollout_corr/obrs_kl_before",
            "average",
            "nat",
            "KL(p || q) per trained token; exact with the exact normaliser, else estimated from the tokens.",
        ),
        (
            "rollout_corr/obrs_kl_after",
            "average",
            "nat",
            "KL(p || q') per trained token, q' being the distribution of accepted tokens.",
        ),
        ("rollout_corr/obrs_truncated", "average", "1", "Share of accepted tokens whose weight exceeds c1."),
    ),
    _section(
        "Staleness",
        "collect",
        "verl",
        (
            "training/off_policy/trajectory_staleness",
            "stats",
            "version",
            "Trainer version minus the oldest version in the trajectory, when it is trained on.",
        ),
        (
            "training/off_policy/trajectory_spans",
            "stats",
            "version",
            "Number of distinct policy versions that sampled one trajectory.",
        ),
        ("training/global_step", "last", "step", "Training steps done."),
        ("training/epoch", "last", "1", "Passes over the training prompts begun, as a fraction."),
    ),
    _section(
        "Selection",
        "backlog",
        "ours",
        (
            "selection/{quantity}_shift",
            "last",
            "1",
            "Length, reward or difficulty (1 - mean reward of the siblings): mean over trained minus mean "
            "over generated trajectories, in standard deviations of the generated, of the last 2,048.",
        ),
        ("selection/trained_share", "average", "1", "Share of those trajectories that were trained on."),
        ("selection/prompts_dropped", "sum", "prompt", "Prompts that ended untrained since the last step."),
        ("selection/dropped/{reason}", "sum", "prompt", "Of those, for this reason."),
        (
            "selection/prompts_unfinished",
            "last",
            "prompt",
            "Prompts admitted and neither trained nor dropped.",
        ),
        (
            "selection/oldest_prompt",
            "last",
            "version",
            "Versions since the admission of the prompt that waits longest, neither trained nor dropped.",
        ),
    ),
    _section(
        "Trajectories",
        "collect",
        "verl",
        ("prompt_length", "stats", "token", "Tokens of the opening prompt, per trained trajectory."),
        ("response_length", "stats", "token", "Sampled tokens per trained trajectory, tool output excluded."),
        ("response_length/spread", "sketch", "token", "Quantiles of the sampled tokens per trajectory."),
        (
            "response_length/clip_ratio",
            "average",
            "1",
            "Share of trained trajectories cut by a token or turn limit.",
        ),
        ("num_turns", "stats", "turn", "Generated turns per trained trajectory."),
    ),
    _section(
        "Environment",
        "collect",
        "ours",
        ("rollout/entropy", "average", "nat", "Entropy of the target while sampling, per trained token."),
        ("env/submit_rate", "average", "1", "Share of trained trajectories that submitted."),
        ("env/truncated", "average", "1", "Share of trained trajectories cut by a token or turn limit."),
        (
            "env/exit/{exit}",
            "average",
            "1",
            "Share of trajectories, masked ones included, that ended for this reason.",
        ),
        ("env/masked", "sum", "trajectory", "Trajectories masked because the infrastructure failed."),
        (
            "env/masked_share",
            "average",
            "1",
            "Share of the attempts that came back since the last step that were masked, those of groups that "
            "were given up included; run.max_masked_share bounds it over run.masked_window attempts.",
        ),
        ("env/errors", "sum", "trajectory", "Of these, attempts masked by an unexpected exception."),
        ("env/retries", "sum", "attempt", "Attempts repeated after an infrastructure failure."),
        ("env/groups", "sum", "group", "Groups trained on."),
        ("env/trajectories", "sum", "trajectory", "Trajectories trained on."),
        ("env/solve_all", "average", "1", "Share of groups in which every trajectory has reward 1 or more."),
        ("env/solve_none", "average", "1", "Share of groups in which no trajectory has reward above 0."),
        ("env/no_signal", "average", "1", "Share of groups with equal rewards, which teach nothing."),
        ("env/sandbox/seconds", "stats", "s", "Sandbox time per trajectory."),
        ("env/sandbox/memo_hit_rate", "average", "1", "Share of sandbox commands answered from memory."),
        ("env/sandbox/{name}", "any", "1", "Further counters of the sandbox (commands, timeouts, ...)."),
    ),
    _section(
        "Validation",
        "collect",
        "ours",
        ("val/reward", "average", "1", "Mean reward on the primary held-out set, T = 1."),
        (
            "val/reward_se",
            "last",
            "1",
            "Standard error of val/reward, clustered by instance: "
            "sqrt(G/(G-1) Σ_i (Σ_j r_ij - mean)^2) / N over G instances and N trajectories.",
        ),
        ("val/{split}/reward", "average", "1", "Mean reward on a held-out set, T = 1."),
        ("val/{split}/reward_se", "last", "1", "Standard error of it, clustered by instance."),
        ("val/{split}/solve_rate", "average", "1", "Share of trajectories with reward 1 or more."),
        ("val/{split}/submit_rate", "average", "1", "Share of trajectories that submitted."),
        ("val/{split}/response_length", "average", "token", "Sampled tokens per trajectory."),
        ("val/{split}/num_turns", "average", "turn", "Generated turns per trajectory."),
        ("val/{split}/acceptance_length", "average", "token", "As spec/acceptance_length, on this set."),
        ("val/{split}/entropy", "average", "nat", "As rollout/entropy, on this set."),
        ("val/{split}/instances", "sum", "instance", "Instances that entered the mean."),
        ("val/{split}/trajectories", "sum", "trajectory", "Trajectories that entered the mean."),
        ("val/{split}/masked", "sum", "trajectory", "Trajectories masked by an infrastructure failure."),
    ),
    _section(
        "Time",
        "controller",
        "verl; wait_rollout, update_weights, load_weights, validate and sandbox are ours",
        ("timing_s/step", "average", "s", "Wall-clock of the step, up to the published weights."),
        ("timing_s/wait_rollout", "average", "s", "Trainer waiting for a full batch of groups."),
        ("timing_s/old_log_prob", "average", "s", "Trainer logprobs of the batch before the update."),
        ("timing_s/ref_log_prob", "average", "s", "Reference logprobs of the batch."),
        ("timing_s/adv", "average", "s", "Advantages and packing."),
        ("timing_s/update_actor", "average", "s", "Forward, backward and optimizer step."),
        ("timing_s/update_decoupled", "average", "s", "The same of the decoupled actor."),
        ("timing_s/update_weights", "average", "s", "Publishing the new version to every engine."),
        ("timing_s/load_weights", "average", "s", "Of that, an engine taking the weights over."),
        (
            "timing_s/save_checkpoint",
            "average",
            "s",
            "What training stood still for a checkpoint: copying, and waiting for the one before.",
        ),
        ("timing_s/write_checkpoint", "average", "s", "Writing a checkpoint, beside the steps."),
        ("timing_s/validate", "average", "s", "Validation on the held-out sets, when it was done."),
        ("timing_s/probe", "average", "s", "Reading the probe set, when it was read."),
        (
            "timing_s/gen",
            "average",
            "s",
            "Wall-clock a group took to generate; overlaps the trainer's phases when asynchronous.",
        ),
        ("timing_s/reward", "average", "s", "Scoring, where it is not part of the episode."),
        ("timing_s/sandbox", "average", "s", "Wall-clock a group spent in its environment."),
    ),
    _section(
        "Performance",
        "controller",
        "verl; tokens_per_s/rollout and rollout_utilization are ours",
        (
            "perf/throughput",
            "average",
            "token/s",
            "Tokens of the step's trajectories, context included, per second of the step.",
        ),
        ("perf/time_per_step", "average", "s", "Wall-clock of the step."),
        ("perf/total_num_tokens", "last", "token", "Tokens of the step's trajectories, context included."),
        ("perf/train_tokens", "sum", "token", "Tokens with a gradient."),
        (
            "perf/tokens_per_s/rollout",
            "average",
            "token/s",
            "Tokens an engine generates per second in which it was busy.",
        ),
        ("perf/tokens_per_s/train", "average", "token/s", "Tokens trained on per second of the update."),
        (
            "perf/rollout_utilization",
            "average",
            "1",
            "Busy seconds of the engines / seconds they existed, over the step.",
        ),
    ),
    _section(
        "Timeline",
        "actors",
        "ours",
        (
            "perf/utilisation/rollout",
            "average",
            "1",
            "Share of the time in which a rollout worker was generating for at least one trajectory.",
        ),
        (
            "perf/utilisation/env",
            "average",
            "1",
            "Share of the time in which an environment was working for at least one trajectory.",
        ),
        (
            "perf/utilisation/trainer",
            "average",
            "1",
            "Share of the time in which the trainer was in a training step; the rest it waited or synced.",
        ),
        ("trace/{actor}", "spans", "s", "What an actor did and when: trace.json.gz, for Perfetto."),
    ),
    _section(
        "Rollout and weights",
        "controller",
        "ours",
        ("rollout/running", "last", "request", "Requests being decoded when the step ended."),
        ("rollout/waiting", "last", "request", "Requests waiting when the step ended."),
        ("rollout/server/{k}/running", "last", "request", "Requests the server of worker k was decoding."),
        ("rollout/server/{k}/waiting", "last", "request", "Requests waiting for that server to be replaced."),
        ("rollout/server/{k}/restarts", "last", "1", "How often that server was replaced since the start."),
        ("rollout/generated_tokens", "sum", "token", "Tokens generated in the step, trained on or not."),
        ("rollout/prefill_tokens", "sum", "token", "Tokens prefilled in the step."),
        ("rollout/aborted", "sum", "request", "Requests aborted in the step."),
        ("buffer/{name}", "any", "group", "Group buffer: ready, in flight, dropped, retried, ..."),
        ("batch/{name}", "any", "1", "Batcher: micro-batches, padding share, tokens per micro-batch, ..."),
        ("weights/bytes", "last", "byte", "Bytes of one published version, as sent to an engine."),
        ("weights/version", "last", "version", "Policy version the engines serve."),
        ("weights/{name}", "any", "1", "Further figures of the weight sync and its canary."),
    ),
)


_extensions: list[Metric] = []


class Level(StrEnum):
    """How much an event matters to a reader."""

    INFO = "info"
    WARNING = "warning"
    FAULT = "fault"


# Kinds with an agreed meaning. An event is often raised on a failure path, so an unknown kind is recorded
# (as info, unless a level is given), never refused.
EVENTS: dict[str, tuple[Level, str]] = {
    "start": (Level.INFO, "The run began: recipe, cluster, pid."),
    "end": (Level.INFO, "The run ended: outcome = done, stopped, interrupted or failed."),
    "injection": (Level.WARNING, "Rollouts are disturbed on purpose, by these settings of `injection`."),
    "resumed": (Level.INFO, "Training continues from a checkpoint: step, path."),
    "phase": (Level.INFO, "What the run is busy with now: message. Shown by the console."),
    "checkpoint": (Level.INFO, "A checkpoint was written: step, path, seconds."),
    "checkpoint_failed": (
        Level.FAULT,
        "A checkpoint could not be written, the run goes on and the one of step `stands` holds: step, error.",
    ),
    "checkpoint_corrupt": (
        Level.FAULT,
        "A checkpoint was set aside as step_N.corrupt, the one before it is used: step, reason.",
    ),
    "ledger_in_memory": (
        Level.FAULT,
        "The disk is full, or the file locked: the ledger goes on in memory and into the next checkpoint: "
        "error.",
    ),
    "ledger_damaged": (
        Level.FAULT,
        "ledger.sqlite was damaged and set aside; the copy of the newest checkpoint is used: error, aside.",
    ),
    "odd_lines": (
        Level.WARNING,
        "Lines of the record files are not what they should be and are left out: lines (file:number), count.",
    ),
    "selection_bias": (
        Level.WARNING,
        "Trained trajectories differ from generated ones more than chance allows: quantity, shift (in "
        "standard deviations), trained, generated.",
    ),
    "adapt_data": (Level.INFO, "What adaptation trains on: trajectories, sampled_tokens, truncated."),
    "attempt_masked": (
        Level.FAULT,
        "Something other than the model failed in an attempt, at the 1st, 2nd, 4th, 8th, ... time of its "
        "kind: attempt, reason, error, place (file:line), times.",
    ),
    "run_stopped": (Level.FAULT, "Too many attempts were masked (run.max_masked_share): verdict."),
    "prompts_dropped": (Level.WARNING, "Admitted prompts were given up: count, reason."),
    "nonfinite_metric": (
        Level.WARNING,
        "Metrics were NaN or infinite and are null in the record: step, names.",
    ),
    "sink_slow": (Level.WARNING, "A sink fell behind; records are dropped while its queue is full: sink."),
    "sink_disabled": (
        Level.WARNING,
        "A sink failed repeatedly and is off for the rest of the run: sink, error.",
    ),
    "disk_full": (Level.FAULT, "A sink found no room on the disk: records are lost until it has some: sink."),
    "close_failed": (Level.WARNING, "A component did not close cleanly: error."),
    "rollout_worker_died": (Level.FAULT, "A rollout worker died and was replaced: worker, restarts, error."),
    "rollout_worker_hung": (
        Level.FAULT,
        "A rollout worker did not answer in cluster.hang_s seconds and was killed: worker, seconds.",
    ),
    "server_died": (
        Level.FAULT,
        "An SGLang server ended, or did not start: version it served, error, worker. It is replaced, up to "
        "rollout.sglang.max_restarts times between two weight updates.",
    ),
    "server_hung": (
        Level.FAULT,
        "An SGLang server lives and does not answer; it is killed and replaced: version, error, worker.",
    ),
    "server_restarted": (
        Level.INFO,
        "Another server took the place of one: version it serves, restarts since the start, seconds, worker.",
    ),
    "broadcast_failed": (
        Level.WARNING,
        "A server did not get its weights by the trainer's broadcast, and is given them alone: version, "
        "error, worker.",
    ),
    "weights_lost": (
        Level.FAULT,
        "A server had to be replaced and its trainer, which had the weights, was lost as well: the next one "
        "serves version 0 until weights are published: version, error, worker.",
    ),
    "trainer_died": (
        Level.FAULT,
        "A trainer rank died: another trainer continues from the newest checkpoint: error.",
    ),
    "trainer_hung": (
        Level.FAULT,
        "A trainer rank did not answer in cluster.hang_s seconds; all were killed: method, seconds.",
    ),
    "trainer_restarted": (
        Level.WARNING,
        "Another trainer was built in the place of a lost one; `resumed` follows when there is a checkpoint: "
        "restarts, and the step at which the first was lost.",
    ),
    "replay_equal": (Level.INFO, "The trainer told of every step what was recorded, to the last bit: steps."),
    "replay_differs": (
        Level.WARNING,
        "At this step the trainer first told something else than was recorded: step, equal steps before it, "
        "differing metrics, names of the first, one example, settings of the trainer that changed.",
    ),
    "alarm": (
        Level.WARNING,
        "A rule of metrics.alarms began to fail: alarm, metric, value, limit, see (docs/alarms.md).",
    ),
    "recording_off": (
        Level.WARNING,
        "Rollouts and probes could not be written and are no longer recorded: file, error.",
    ),
    "alarm_over": (Level.INFO, "It holds again: alarm."),
    "advice": (Level.WARNING, "What the run's numbers advise, in words: rule, text."),
    "canary_failed": (
        Level.FAULT,
        "An engine does not hold the weights that were published: version, attempt, what, worker.",
    ),
    "speculation_disabled": (
        Level.FAULT,
        "A draft could not be updated; its engine serves without drafts: version, what, worker.",
    ),
}


def metrics() -> Iterator[Metric]:
    """All declarations, in page order; those of extensions come last."""
    for section in SECTIONS:
        yield from section.metrics
    yield from _extensions


def declare(metric: Metric) -> None:
    """Declare a metric of an extension (an own environment, reward or policy loss) before emitting it.

    Raises ValueError when the name is taken by a different declaration.
    """
    taken = [known for known in metrics() if known.name == metric.name]
    if taken and taken[0] != metric:
        raise ValueError(f"metric {metric.name!r} is already declared as {taken[0]}. Choose another name.")
    if not taken:
        _extensions.append(metric)
        declared.cache_clear()
        _index.cache_clear()


@cache
def declared(name: str) -> Metric:
    """The declaration a name falls under; an exact one wins over a pattern, an earlier over a later.

    Raises ValueError with the remedy when there is none.

    >>> declared("spec/acceptance_rate/depth_2").kind
    <Kind.AVERAGE: 'average'>
    """
    exact, patterns = _index()
    if name in exact:
        return exact[name]
    for pattern, metric in patterns:
        if pattern.fullmatch(name):
            return metric
    raise ValueError(
        f"metric {name!r} is not declared. Declare it once, with unit and definition, in "
        "rlpipe/metrics/names.py (SECTIONS; `declare` in an extension), or correct its spelling."
    )


@cache
def _index() -> tuple[dict[str, Metric], list[tuple[re.Pattern[str], Metric]]]:
    exact: dict[str, Metric] = {}
    patterns: list[tuple[re.Pattern[str], Metric]] = []
    for metric in metrics():
        if "{" in metric.name:
            literal = re.escape(metric.name).replace(r"\{", "{").replace(r"\}", "}")
            regex = re.sub(r"\{(\w+)\}", lambda m: r"\d+" if m[1] == "k" else r"[\w.\-]+", literal)
            patterns.append((re.compile(regex), metric))
        else:
            exact[metric.name] = metric
            if metric.kind is Kind.SKETCH:
                exact |= {f"{metric.name}/{part}": metric for part in SKETCH_PARTS}
    return exact, patterns


def reference_page() -> str:
    """docs/metrics.md, generated: every declaration in one table per section."""
    parts = ", ".join(f"`name/{part}`" for part in SKETCH_PARTS)
    lines = [
        "# Metrics",
        "",
        "Generated from `rlpipe/metrics/names.py` by `python -m rlpipe.metrics.names > docs/metrics.md`; "
        "edit there.",
        "",
        "`metrics.jsonl` has one object per line: `training/global_step`, `time` (seconds since 1970) and "
        "the metrics below. A metric that was not observed in a step is absent; one that was NaN or "
        "infinite is `null`. When a step has several lines (late validation, a resumed run) the later line "
        "wins, name by name.",
        "",
        "Kinds say how the parts from actors and micro-batches are reduced: *average* is Σ / Σ, never a "
        "mean of means; *last* keeps the latest reading. A *histogram* is recorded as "
        '`{"edges": [n + 1], "counts": [n]}`; a *sketch* as one number for each of '
        f"{parts}, quantiles within 1%; *spans* are in `trace.json.gz` alone. "
        "Names marked `*` are verl's.",
    ]
    for section in SECTIONS:
        lines += ["", f"## {section.title}", "", f"Produced by: {section.metrics[0].produced_by}. "]
        lines[-1] += f"Source: {section.metrics[0].source}."
        lines += ["", "| name | kind | unit | definition |", "|---|---|---|---|"]
        for m in section.metrics:
            star = "\\*" if m.source == "verl" else ""
            lines.append(f"| `{m.name}`{star} | {m.kind} | {m.unit} | {m.definition} |")
    lines += [
        "",
        "## Events",
        "",
        "`events.jsonl` has one object per line: `time`, `kind`, `level` and fields.",
    ]
    lines += ["", "| kind | level | meaning |", "|---|---|---|"]
    lines += [f"| `{kind}` | {level} | {meaning} |" for kind, (level, meaning) in EVENTS.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(reference_page(), end="")
