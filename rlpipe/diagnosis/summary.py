"""The summary of a run: what came out, what bound it, why acceptance moved, and what to set.

Owns the reading of everything except acceptance, which `explanation` has. Flow: RunData -> `summarize` ->
lines for the top of the report and for `rlpipe analyse`. Rules here look at a finished run; `alarms` and
`advice` have those that are evaluated while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from statistics import fmean, median

import numpy as np

from rlpipe.diagnosis.advice import Setup, advise
from rlpipe.diagnosis.decomposition import RATE
from rlpipe.diagnosis.explanation import PROBES, Finding, explain_acceptance, thirds
from rlpipe.diagnosis.held_out import HeldOut, held_out_sets
from rlpipe.diagnosis.regression import contrast
from rlpipe.diagnosis.two_slopes import MIN_STEPS
from rlpipe.metrics.runs import RunData
from rlpipe.metrics.statistics import Interval

ENDS = 10  # steps that "at first" and "at the end" stand for
REWARD = "critic/rewards/mean"
EXPLAINED = ("stale_draft", "stale_engine")  # of acceptance: explanation.py has the one statement


@dataclass(slots=True, frozen=True, kw_only=True)
class Summary:
    """lines: (label, sentence), in order. findings: what they rest on, the surest first."""

    lines: list[tuple[str, str]]
    findings: list[Finding]

    def text(self) -> str:
        """For a terminal."""
        return "\n".join(f"{label}: {sentence}" for label, sentence in self.lines)

    def html(self) -> str:
        """For the top of the page; "" when nothing is known."""
        items = "".join(f"<dt>{escape(label)}</dt><dd>{escape(words)}</dd>" for label, words in self.lines)
        return f'<section class="summary" id="summary"><dl>{items}</dl></section>' if items else ""


def summarize(run: RunData) -> Summary:
    """Everything that can be said for this run; without records, only what its events say."""
    sets = held_out_sets(run)
    findings = list(_problems(run, sets))
    lines = [
        ("Reward", _reward(run)),
        *((f"Reward, {s.name}" if s.name != "held-out" else "Held-out", _held_out(s)) for s in sets),
        ("Throughput", _throughput(run)),
    ]
    bound = _bound(run)
    lines.append(("Bound by", bound.text if bound else ""))
    if bound and bound.remedy:
        findings.append(bound)
    if why := explain_acceptance(run):
        findings.append(why)
        text = ("" if why.sure or why.name == "nothing" else "Not certain. ") + why.text
        lines.append(("Why acceptance moved", text))
    elif ends := _ends(run, RATE):
        text = (
            f"Acceptance rate {ends[0]:.3f} → {ends[1]:.3f}. To say why takes {MIN_STEPS} steps with drafts, "
            f"or {PROBES} probes (metrics.probe.every)."
        )
        lines.append(("Why acceptance moved", text))
    lines += [("Problem" if f.sure else "Look at", f.text) for f in findings if f not in (bound, why)]
    advised = advise(Setup.of(run.settings), run.records)
    changes = [f.remedy for f in findings if f.remedy]
    changes += [text for name, text in advised.items() if name not in EXPLAINED]
    lines += [("What to change", f"{text[0].upper()}{text[1:]}.") for text in changes]
    if run.records and not changes:
        lines.append(("What to change", "Nothing that these numbers call for."))
    findings.sort(key=lambda f: not f.sure)
    return Summary(lines=[line for line in lines if line[1]], findings=findings)


def _ends(run: RunData, name: str) -> tuple[float, float] | None:
    """Means at first and at the end; None below two values."""
    values = run.series(name)[1]
    count = min(ENDS, len(values) // 2)
    return (fmean(values[:count]), fmean(values[-count:])) if count else None


def _late(run: RunData, name: str, default: float = 0.0) -> float:
    values = run.series(name)[1][-ENDS:]
    return fmean(values) if values else default


def _change(run: RunData, name: str) -> Interval | None:
    """Last third minus first, with its interval; None below 24 values."""
    values = np.array(run.series(name)[1])
    if len(values) < MIN_STEPS:
        return None
    return contrast(values, thirds(len(values)))


# --- numbers ---------------------------------------------------------------------------------------


def _reward(run: RunData) -> str:
    if (ends := _ends(run, REWARD)) is None:
        return ""
    change = _change(run, REWARD)
    said = f"Training reward {ends[0]:.3f} → {ends[1]:.3f} over {run.steps} steps"
    if change is None:
        return f"{said}; too few for an interval."
    words = "rose" if change.low > 0 else "fell" if change.high < 0 else "did not move beyond chance"
    return (
        f"{said}. It {words} between its first and last third: {change.value:+.3f} "
        f"[{change.low:+.3f}, {change.high:+.3f}]."
    )


def _held_out(found: HeldOut) -> str:
    def one(value: Interval, step: int) -> str:
        return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}] at step {step}"

    if found.change is None:
        return one(found.last, found.steps[1]) + ", the only reading."
    words = (
        "a gain beyond chance"
        if found.change.low > 0
        else "a loss beyond chance"
        if found.change.high < 0
        else "no change beyond chance"
    )
    return (
        f"{one(found.first, found.steps[0])} → {one(found.last, found.steps[1])}: {words}, "
        f"{found.change.value:+.3f} [{found.change.low:+.3f}, {found.change.high:+.3f}]."
    )


def _throughput(run: RunData) -> str:
    seconds, tokens, lengths, speed = (
        run.series(name)[1]
        for name in (
            "timing_s/step",
            "perf/throughput",
            "spec/acceptance_length",
            "perf/tokens_per_s/rollout",
        )
    )
    parts = [f"{median(seconds):.1f} s a step"] if seconds else []
    parts += [f"{median(tokens):,.0f} tokens/s trained on (context included)"] if tokens else []
    parts += [f"{median(speed):,.0f} tokens/s generated by a busy engine"] if speed else []
    parts += [f"{median(lengths):.2f} tokens per verify step"] if lengths else []
    return "Medians: " + ", ".join(parts) + "." if parts else ""


PHASES = {
    "timing_s/wait_rollout": ("generation", "the trainer waits for rollouts"),
    "timing_s/update_actor": ("trainer", "the update of the policy"),
    "timing_s/update_weights": ("weight_sync", "publishing weights"),
    "timing_s/save_checkpoint": ("checkpoints", "saving checkpoints"),
}


def _bound(run: RunData) -> Finding | None:
    """The largest phase of a step; where it waits for rollouts, whether engine or environment is slow."""
    whole = sum(run.series("timing_s/step")[1])
    if not whole:
        return None
    shares = {name: sum(run.series(name)[1]) / whole for name in PHASES}
    phase = max(shares, key=shares.__getitem__)
    name, words = PHASES[phase]
    share = f"{words}, {shares[phase]:.0%} of the step's time"
    if name == "generation" and shares[phase] > 0.3:
        busy, env = (_late(run, f"perf/utilisation/{who}") for who in ("rollout", "env"))
        played, taken = (_late(run, f"timing_s/{what}") for what in ("sandbox", "gen"))
        if busy < 0.5 and env > max(0.6, busy) and played > 0.5 * taken:
            gain = 1 / (1 - shares[phase] * (1 - busy)) - 1
            return Finding(
                name="slow_environment",
                text=f"Environments: {share}; engines generate {busy:.0%} of the time, "
                f"environments work {env:.0%}.",
                remedy="raise env.threads or make the environment faster: engines that never wait for it "
                f"would bring up to {gain:.0%} more steps per hour",
            )
        return Finding(name=name, text=f"Generation: {share}; engines generate {busy:.0%} of the time.")
    if name in ("weight_sync", "checkpoints") and shares[phase] > 0.3:
        remedy = (
            "save less often (run.save_every)"
            if name == "checkpoints"
            else "see docs/clusters.md on weight updates"
        )
        return Finding(
            name=name, text=f"{words.capitalize()}, {shares[phase]:.0%} of the step's time.", remedy=remedy
        )
    return Finding(name=name, text=f"Mostly {share}.")


# --- problems --------------------------------------------------------------------------------------


def _problems(run: RunData, sets: list[HeldOut]) -> Iterator[Finding]:
    """What went wrong beside acceptance."""
    rules: tuple[Callable[[RunData, list[HeldOut]], Finding | None], ...] = (
        _disk,
        _dying,
        _masked,
        _unstable,
        _hacking,
        _no_signal,
        _collapse,
        _cut,
    )
    yield from filter(None, (rule(run, sets) for rule in rules))


def _disk(run: RunData, sets: list[HeldOut]) -> Finding | None:
    full = [
        e for e in run.events if e.get("kind") == "disk_full" or "No space left" in str(e.get("error", ""))
    ]
    if not full:
        return None
    text = (
        f"The disk was full ({len(full)} events, the first: {full[0]['kind']}): records or "
        "checkpoints are missing."
    )
    return Finding(
        name="disk_full",
        text=text,
        remedy="free disk space or move run.dir, then run the same command again: it continues",
    )


def _dying(run: RunData, sets: list[HeldOut]) -> Finding | None:
    kinds = (
        "rollout_worker_died",
        "rollout_worker_hung",
        "server_died",
        "server_hung",
        "trainer_died",
        "trainer_hung",
    )
    lost = [e for e in run.events if e.get("kind") in kinds]
    if len(lost) < 3:
        return None
    last = lost[-1]
    text = (
        f"Processes were lost {len(lost)} times, last {last['kind']}: "
        f"{str(last.get('error', ''))[:160] or 'no error was given'}."
    )
    return Finding(
        name="dying_processes",
        text=text,
        remedy="look at the errors under Events; memory is the usual reason",
    )


def _masked(run: RunData, sets: list[HeldOut]) -> Finding | None:
    share = fmean(run.series("env/masked_share")[1] or [0.0])
    if share < 0.1:
        return None
    error = next((str(e.get("error")) for e in run.events if e.get("kind") == "attempt_masked"), "see Events")
    text = (
        f"{share:.0%} of the attempts were masked because something other than the model failed: "
        f"{error[:160]}."
    )
    return Finding(
        name="broken_environment",
        text=text,
        remedy="mend the environment: masked attempts cost their time and teach nothing",
    )


def _unstable(run: RunData, sets: list[HeldOut]) -> Finding | None:
    norms, skipped = run.series("actor/grad_norm")[1], sum(run.series("actor/skipped_steps")[1])
    change, usual = _change(run, REWARD), median(norms) if norms else 0.0
    spikes = sum(norm > 10 * usual for norm in norms) if usual else 0
    if skipped < 3 and not (spikes >= 3 and change is not None and change.high < 0):
        return None
    text = (
        f"Updates were unstable: {skipped:.0f} skipped as not finite, {spikes} with ten times the "
        "usual gradient."
    )
    return Finding(name="unstable_updates", text=text, remedy="lower trainer.lr, or trainer.clip_grad")


def _hacking(run: RunData, sets: list[HeldOut]) -> Finding | None:
    train = _change(run, REWARD)
    tamper = _late(run, "env/tamper_solved")
    held = next((s.change for s in sets if s.change is not None), None)
    if tamper > 0.02:
        return Finding(
            name="reward_hacking",
            text=(
                f"{tamper:.0%} of the solved attempts touch what a grader could be cheated with: reward may "
                "be hacked."
            ),
            remedy="read those trajectories (they are marked in the viewer) and close the hole in the grader",
        )
    if train is None or held is None or train.low <= 0.05 or held.high >= train.low:
        return None
    return Finding(
        name="held_out_left_behind",
        text=f"Training reward moved by {train.value:+.2f} and the held-out one by {held.value:+.2f}, less "
        "beyond chance: the policy learns its prompts by heart, or cheats their grader.",
        remedy="read solved trajectories, add prompts, or stop at the best held-out checkpoint",
    )


def _no_signal(run: RunData, sets: list[HeldOut]) -> Finding | None:
    if len(run.series("env/no_signal")[1]) < ENDS or _late(run, "env/no_signal") < 0.8:
        return None
    solved, none = _late(run, "env/solve_all"), _late(run, "env/solve_none")
    name, words = ("too_easy", "all solved") if solved > none else ("too_hard", "none solved")
    remedy = "take harder prompts" if solved > none else "take easier prompts, or raise pipeline.group_size"
    text = (
        f"{_late(run, 'env/no_signal'):.0%} of the last groups had equal rewards, most of them "
        f"{words}: they teach nothing."
    )
    return Finding(name=name, text=text, remedy=remedy, sure=max(solved, none) > 0.5)


def _collapse(run: RunData, sets: list[HeldOut]) -> Finding | None:
    entropy, reward = _ends(run, "rollout/entropy"), _change(run, REWARD)
    if (
        entropy is None
        or entropy[1] > 0.2 * entropy[0]
        or reward is None
        or reward.low > 0
        or _late(run, REWARD) > 0.9
    ):
        return None
    text = (
        f"Entropy collapsed from {entropy[0]:.2f} to {entropy[1]:.2f} nat a token without a gain of "
        "reward: exploration ended."
    )
    return Finding(name="entropy_collapse", text=text, remedy="lower trainer.lr, or raise algo.clip_high")


def _cut(run: RunData, sets: list[HeldOut]) -> Finding | None:
    share = _late(run, "env/truncated")
    if share < 0.5:
        return None
    text = f"{share:.0%} of the last attempts were cut by a limit of tokens or turns before they ended."
    return Finding(
        name="cut_by_limits",
        text=text,
        remedy="raise rollout.max_new_tokens and env.max_turns, or take shorter tasks",
    )
