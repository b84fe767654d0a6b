"""Searches a finished run for known problems, except acceptance (see `explanation`).

Owns the rules, their thresholds, messages and hints. A rule reads the records of the full run, and reports
only problems that are well beyond chance. In contrast, `alarms` and `advice` are evaluated during the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from rlpipe.diagnosis.held_out import held_out_sets
from rlpipe.diagnosis.regression import contrast, thirds
from rlpipe.metrics.runs import RunData
from rlpipe.metrics.statistics import Interval

MIN_STEPS = 24  # smallest number of values from which a metric's change is computed
ENDS = 10  # number of steps that are averaged for "at first" and "at the end"
REWARD = "critic/rewards/mean"
LOST = (
    "rollout_worker_died",
    "rollout_worker_hung",
    "server_died",
    "server_hung",
    "trainer_died",
    "trainer_hung",
)


@dataclass(slots=True, frozen=True, kw_only=True)
class Finding:
    """One conclusion about a run.

    name: name of the cause.
    text: the conclusion with its numbers.
    hint: the setting to change; "" if there is none.
    sure: whether the data allow no other conclusion.
    """

    name: str
    text: str
    hint: str = ""
    sure: bool = True


@dataclass(slots=True, frozen=True)
class Problem:
    """A row of `PROBLEMS`.

    find: returns the text of the finding; None if the run does not have the problem.
    hint: the setting to change.
    sure: returns whether the data allow no other conclusion.
    """

    name: str
    find: Callable[[RunData], str | None]
    hint: str
    sure: Callable[[RunData], bool] = lambda run: True


def problems_of(run: RunData) -> Iterator[Finding]:
    """Yield every problem in `PROBLEMS` that the run has, in the order of the table."""
    for problem in PROBLEMS:
        if text := problem.find(run):
            yield Finding(name=problem.name, text=text, hint=problem.hint, sure=problem.sure(run))


# --- values that the rules read --------------------------------------------------------------------


def change_of(run: RunData, name: str) -> Interval | None:
    """Return the change of a metric's mean from first to last third; None for fewer than 24 values."""
    values = np.array(run.series(name)[1])
    return contrast(values, thirds(len(values))) if len(values) >= MIN_STEPS else None


def ends_of(run: RunData, name: str) -> tuple[float, float] | None:
    """Return a metric's means over the first and the last steps; None for fewer than two values."""
    values = run.series(name)[1]
    count = min(ENDS, len(values) // 2)
    return (fmean(values[:count]), fmean(values[-count:])) if count else None


def late(run: RunData, name: str) -> float:
    """Return a metric's mean over the last steps; 0 without values."""
    values = run.series(name)[1][-ENDS:]
    return fmean(values) if values else 0.0


# --- the rules -------------------------------------------------------------------------------------


def _disk_full(run: RunData) -> str | None:
    """Report if the disk was full during the run."""
    full = [
        e for e in run.events if e.get("kind") == "disk_full" or "No space left" in str(e.get("error", ""))
    ]
    if not full:
        return None
    return (
        f"The disk was full ({len(full)} events, the first: {full[0]['kind']}): records or checkpoints are "
        "missing."
    )


def _dying_processes(run: RunData) -> str | None:
    lost = [e for e in run.events if e.get("kind") in LOST]
    if len(lost) < 3:
        return None
    error = str(lost[-1].get("error", ""))[:160] or "no error was given"
    return f"Processes were lost {len(lost)} times, last {lost[-1]['kind']}: {error}."


def _broken_environment(run: RunData) -> str | None:
    """Report if at least a tenth of the attempts were masked."""
    share = fmean(run.series("env/masked_share")[1] or [0.0])
    if share < 0.1:
        return None
    error = next((str(e.get("error")) for e in run.events if e.get("kind") == "attempt_masked"), "see Events")
    return (
        f"{share:.0%} of the attempts were masked because something other than the model failed: "
        f"{error[:160]}."
    )


def _unstable_updates(run: RunData) -> str | None:
    """Report skipped updates, or large gradients together with a falling reward."""
    norms, skipped = run.series("actor/grad_norm")[1], sum(run.series("actor/skipped_steps")[1])
    usual = median(norms) if norms else 0.0
    spikes = sum(norm > 10 * usual for norm in norms) if usual else 0

    # Large gradients are a problem only if the reward also fell.
    reward = change_of(run, REWARD)
    fell = reward is not None and reward.high < 0
    if skipped < 3 and not (spikes >= 3 and fell):
        return None
    return (
        f"Updates were unstable: {skipped:.0f} skipped as not finite, {spikes} with ten times the usual "
        "gradient."
    )


def _reward_hacking(run: RunData) -> str | None:
    tamper = late(run, "env/tamper_solved")
    if tamper <= 0.02:
        return None
    return (
        f"{tamper:.0%} of the solved attempts touch what a grader could be cheated with: reward may be "
        "hacked."
    )


def _held_out_left_behind(run: RunData) -> str | None:
    """Report if the training reward rises beyond chance, but the held-out reward does not."""
    train = change_of(run, REWARD)
    held_out = next((s.change for s in held_out_sets(run) if s.change is not None), None)
    if _reward_hacking(run) or train is None or held_out is None:
        return None
    if train.low <= 0.05 or held_out.high >= train.low:
        return None
    return (
        f"Training reward moved by {train.value:+.2f} and the held-out one by {held_out.value:+.2f}, less "
        "beyond chance: the policy memorises its prompts, or exploits their grader."
    )


def _too_easy(run: RunData) -> str | None:
    return _no_signal(run, "all solved") if _mostly_solved(run) else None


def _too_hard(run: RunData) -> str | None:
    return None if _mostly_solved(run) else _no_signal(run, "none solved")


def _no_signal(run: RunData, outcome: str) -> str | None:
    share = late(run, "env/no_signal")
    if len(run.series("env/no_signal")[1]) < ENDS or share < 0.8:
        return None
    return f"{share:.0%} of the last groups had equal rewards, most of them {outcome}: they teach nothing."


def _mostly_solved(run: RunData) -> bool:
    return late(run, "env/solve_all") > late(run, "env/solve_none")


def _majority(run: RunData) -> bool:
    """Return whether more than half of the last groups were solved in all attempts, or in none."""
    return max(late(run, "env/solve_all"), late(run, "env/solve_none")) > 0.5


def _entropy_collapse(run: RunData) -> str | None:
    """Report if the entropy fell to a fifth without a gain of reward."""
    entropy, reward = ends_of(run, "rollout/entropy"), change_of(run, REWARD)
    if entropy is None or entropy[1] > 0.2 * entropy[0]:
        return None
    # Low entropy is no problem if the reward rises, or if the policy solves nearly everything.
    if reward is None or reward.low > 0 or late(run, REWARD) > 0.9:
        return None
    return (
        f"Entropy collapsed from {entropy[0]:.2f} to {entropy[1]:.2f} nat a token without a gain of reward: "
        "exploration ended."
    )


def _cut_by_limits(run: RunData) -> str | None:
    share = late(run, "env/truncated")
    if share < 0.5:
        return None
    return f"{share:.0%} of the last attempts were cut by a limit of tokens or turns before they ended."


PROBLEMS = (
    Problem(
        "disk_full",
        _disk_full,
        "free disk space or move run.dir, then run the same command again: it continues",
    ),
    Problem(
        "dying_processes",
        _dying_processes,
        "look at the errors under Events; memory is the usual reason",
    ),
    Problem(
        "broken_environment",
        _broken_environment,
        "mend the environment: masked attempts cost their time and teach nothing",
    ),
    Problem("unstable_updates", _unstable_updates, "lower trainer.lr, or trainer.clip_grad"),
    Problem(
        "reward_hacking",
        _reward_hacking,
        "read those trajectories (they are marked in the viewer) and close the hole in the grader",
    ),
    Problem(
        "held_out_left_behind",
        _held_out_left_behind,
        "read solved trajectories, add prompts, or stop at the best held-out checkpoint",
    ),
    Problem("too_easy", _too_easy, "take harder prompts", sure=_majority),
    Problem("too_hard", _too_hard, "take easier prompts, or raise pipeline.group_size", sure=_majority),
    Problem("entropy_collapse", _entropy_collapse, "lower trainer.lr, or raise algo.clip_high"),
    Problem(
        "cut_by_limits",
        _cut_by_limits,
        "raise rollout.max_new_tokens and env.max_turns, or take shorter tasks",
    ),
)
