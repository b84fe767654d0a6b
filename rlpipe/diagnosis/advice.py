"""Advice: sentences that suggest a change of settings, based on a run's recent metrics.

Owns the rules. Each rule is a function of the run's setup and records, and returns a sentence with a number
and a setting, or None. Flow: the controller passes every record to `Advisor.see`, which emits an `advice`
event when a rule begins to apply; the report calls `advise_run`, which also reads the recorded rollouts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from operator import mul
from statistics import fmean
from typing import Any

from rlpipe.config.run import ClusterMode, Config
from rlpipe.diagnosis.breakdown import lookups
from rlpipe.diagnosis.step_times import STEP_SECONDS, step_seconds
from rlpipe.metrics.rollouts import read_rollouts
from rlpipe.metrics.runs import RunData

Records = Sequence[Mapping[str, Any]]

RECENT = 10  # records over which a metric is averaged
MARGIN = 0.03  # relative gain that is worth a sentence
UNTRAINED_RATE = 0.03  # acceptance rate; identity projections reach 0.01, a closed-form fit more than 0.3
UNTRAINED_STEPS = 500  # verify steps before a layer is called untrained
LOOKUP_HINT = "a lookup learns nothing, so use a draft that does (docs/drafters.md)"


@dataclass(slots=True, kw_only=True)
class Setup:
    """The settings that the rules read.

    mode, gamma, adaptive, suffix: settings of `spec`.
    depths, objective: settings of `draft`.
    mtp: whether drafts come from the checkpoint's MTP layer.
    lookup: whether drafts are looked up, so that there is no draft model to train.
    online: whether the draft is trained during the run.
    max_staleness, filter_equal_rewards, filter_limit: settings of `pipeline`.
    workers, max_new_tokens, max_context: settings of `rollout`.
    inline: whether the run is one process, which can have only one rollout worker (`cluster.mode`).
    draft_cost: cost of one draft pass, in plain decode steps.
    env_threads: `env.threads`, the environment threads of a rollout worker.
    max_turns: setting of `env`.
    """

    mode: str
    gamma: int
    adaptive: bool
    suffix: int
    depths: int
    objective: str
    mtp: bool
    lookup: bool
    online: bool
    max_staleness: int
    filter_equal_rewards: bool
    filter_limit: int
    workers: int
    inline: bool
    max_new_tokens: int
    max_context: int
    draft_cost: float
    env_threads: int
    max_turns: int

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Setup:
        """Read a parsed config.yaml; missing settings get the defaults of a new run."""
        config = asdict(Config())
        for name in ("spec", "draft", "pipeline", "rollout", "env", "cluster"):
            config[name] |= settings.get(name) or {}
        advice = config["metrics"]["advice"] | ((settings.get("metrics") or {}).get("advice") or {})

        return cls(
            mode=str(config["spec"]["mode"]),
            gamma=config["spec"]["gamma"],
            adaptive=config["spec"]["adaptive"],
            suffix=config["spec"]["suffix"],
            depths=config["draft"]["depths"],
            objective=str(config["draft"]["objective"]),
            mtp=str(config["spec"]["drafter"]) == "mtp",
            lookup=str(config["spec"]["drafter"]) == "suffix",
            online=str(config["draft"]["train"])
            in ("online", "ppow"),  # "ppow": in runs older than draft.objective
            max_staleness=config["pipeline"]["max_staleness"],
            filter_equal_rewards=config["pipeline"]["filter_equal_rewards"],
            filter_limit=config["pipeline"]["filter_limit"],
            workers=config["rollout"]["workers"],
            inline=str(config["cluster"]["mode"]) == ClusterMode.INLINE,
            max_new_tokens=config["rollout"]["max_new_tokens"],
            max_context=config["rollout"]["max_context"],
            draft_cost=advice["draft_cost"],
            env_threads=config["env"]["threads"],
            max_turns=config["env"]["max_turns"],
        )


def advise(setup: Setup, records: Records) -> dict[str, str]:
    """Return the sentence of every rule that applies at the end of these records, by the rule's name."""
    sentences = {name: rule(setup, records) for name, rule in RULES.items()}
    return {name: text for name, text in sentences.items() if text}


def advise_run(run: RunData) -> dict[str, str]:
    """Return the sentence of every rule that applies at the end of a run, by the rule's name."""
    setup = Setup.from_settings(run.settings)
    sentences = advise(setup, run.records)
    drafter = better_drafter(setup, read_rollouts(run.path, last=RECENT))
    return sentences | ({"better_drafter": drafter} if drafter else {})


class Advisor:
    """Emits an event when a rule begins to apply, and again only after it has ceased to apply.

    event: called like `MetricsBus.event`.
    """

    def __init__(self, setup: Setup, event: Callable[..., None]) -> None:
        self._setup, self._event = setup, event
        self._records: deque[Mapping[str, Any]] = deque(maxlen=20 * RECENT)
        self._step_seconds: dict[str, float] = {}  # only the first record of an engine has them
        self._holding: set[str] = set()

    def see(self, record: Mapping[str, Any]) -> None:
        """Evaluate the rules on a committed record."""
        self._records.append(record)
        self._step_seconds |= {name: x for name, x in record.items() if name.startswith(STEP_SECONDS)}
        advice = advise(self._setup, [self._step_seconds, *self._records])
        for name in advice.keys() - self._holding:
            self._event("advice", rule=name, step=record.get("training/global_step"), text=advice[name])
        self._holding = set(advice)


def _values(records: Records, name: str) -> list[float]:
    return [r[name] for r in records if isinstance(r.get(name), (int, float))]


def _mean(records: Records, name: str, count: int = RECENT) -> float | None:
    """Return the mean of the last values; None below three values (below one for rarely measured metrics)."""
    values = _values(records, name)[-count:]
    enough = 1 if name.startswith("probe/") else 3
    return fmean(values) if len(values) >= enough else None


def better_rule(setup: Setup, records: Records) -> str | None:
    """Compare rejection with target-only by predicted lengths on the same contexts (Bebop Fig. 13, Eq. 48).

    >>> lengths = {"rejection": 3.21, "target_only": 3.0}
    >>> record = {f"probe/fixed/acceptance_length/{rule}": x for rule, x in lengths.items()}
    >>> better_rule(Setup.from_settings({"spec": {"mode": "target_only"}}), [record])
    'rejection would beat target-only by 7% here (3.21 against 3.00 tokens per step): set spec.mode=rejection'
    """
    alternatives = {"target_only": "rejection", "rejection": "target_only", "block": "target_only"}
    names = {"rejection": "rejection", "target_only": "target-only", "block": "block verification"}
    if setup.mode not in alternatives:
        return None

    # Block verification accepts at least as much as rejection, so the prediction for rejection is used.
    other, current = alternatives[setup.mode], setup.mode if setup.mode != "block" else "rejection"
    under = "probe/fixed/acceptance_length"
    other_length, length = (_mean(records, f"{under}/{rule}", 3) for rule in (other, current))
    if other_length is None or length is None:
        return None

    gain = other_length / length - 1
    if gain < MARGIN:
        return None
    return (
        f"{names[other]} would beat {names[setup.mode]} by {gain:.0%} here ({other_length:.2f} against "
        f"{length:.2f} tokens per step): set spec.mode={other}"
    )


def better_gamma(setup: Setup, records: Records) -> str | None:
    """Compare values of gamma by tokens per cost, (1 + sum_{k <= gamma} reach_k) / cost(gamma).

    reach_k is the share of verify steps that accept depth k, the product of the conditional rates. Depths
    above gamma are assumed to have the last of these rates. The cost is measured for some batch sizes; a
    gamma must be better for all of them. Without measurements, the cost is 1 + draft_cost gamma. This assumes
    that verifying gamma + 1 tokens takes as long as one token, which holds if decoding is memory-bound.

    Source: Leviathan et al., Thm 3.8.
    """
    if setup.adaptive or setup.mode not in ("rejection", "target_only", "block"):
        return None
    rates = []
    for depth in range(1, setup.gamma + 1):
        rate = _mean(records, f"spec/acceptance_rate/depth_{depth}")
        if rate is None:
            return None
        rates.append(rate)

    # Compute the tokens per cost of every gamma up to one more than the run's, for each batch size.
    gammas = range(setup.gamma + 2)
    tokens = list(accumulate(accumulate([*rates, rates[-1]], mul, initial=1.0)))
    measured = _measured_costs(records)
    costs = [[_interpolated(points, gamma) for gamma in gammas] for points in measured.values()]
    costs = costs or [[1 + setup.draft_cost * gamma for gamma in gammas]]
    speeds = [[count / cost for count, cost in zip(tokens, by_gamma, strict=True)] for by_gamma in costs]

    gains = {gamma: [speed[gamma] / speed[setup.gamma] - 1 for speed in speeds] for gamma in gammas}
    best = max(gammas, key=lambda gamma: min(gains[gamma]))
    if min(gains[best]) < MARGIN:
        return None

    basis = f"if a draft costs {setup.draft_cost:g} decode steps"
    if measured:
        largest = max(gamma for points in measured.values() for gamma, _ in points)
        sizes = _range([str(batch) for batch in measured])
        basis = f"by the step times measured at batch size {sizes} and gamma 0 to {largest}"
    if best == 0:
        tokens_per_cost = _range([f"{speed:.2f}" for speed in sorted(s[setup.gamma] for s in speeds)])
        return (
            f"speculation costs more than it brings: {tokens_per_cost} tokens per unit of decoding against 1 "
            f"{basis}: set spec.mode=none, or adapt the draft (recipe mtp_adapt)"
        )
    size = "large" if best < setup.gamma else "small"
    gain = _range([f"{gain:.0%}" for gain in sorted(gains[best])])
    return (
        f"gamma is too {size}: {best} instead of {setup.gamma} would decode {gain} faster {basis}: set "
        f"spec.gamma={best}{_with_depths(setup, best)}, or spec.adaptive=true to measure; this run.dir "
        "continues with it"
    )


def _measured_costs(records: Records) -> dict[int, list[tuple[int, float]]]:
    """Return (gamma, cost of a step in steps without drafts) in order of gamma, by batch size.

    Only batch sizes with a measured step without drafts and another one with drafts are returned.
    """
    costs: dict[int, list[tuple[int, float]]] = {}
    seconds = step_seconds(records)
    for batch, gamma in sorted(seconds):
        if (batch, 0) in seconds:
            costs.setdefault(batch, []).append((gamma, seconds[batch, gamma] / seconds[batch, 0]))
    return {batch: points for batch, points in costs.items() if len(points) > 1}


def _interpolated(points: Sequence[tuple[int, float]], at: int) -> float:
    """Interpolate linearly between points (x, y) in order of x.

    Beyond the last point, continue the last line, but do not let it fall.

    >>> _interpolated([(0, 1.0), (1, 1.5), (3, 2.0)], 2), _interpolated([(0, 1.0), (1, 1.5), (3, 2.0)], 5)
    (1.75, 2.5)
    """
    lines = list(pairwise(points))
    (x0, y0), (x1, y1) = next((line for line in lines if at <= line[1][0]), lines[-1])
    return max(y0 + (at - x0) * (y1 - y0) / (x1 - x0), y1 if at > x1 else 0.0)


def _range(values: Sequence[str]) -> str:
    return values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def _with_depths(setup: Setup, gamma: int) -> str:
    """Return a text with the value of draft.depths that belongs to gamma; "" if it need not change."""
    if not setup.mtp or setup.depths == gamma:
        return ""
    return f" and draft.depths={gamma}" + ("" if setup.online else " (where the draft is trained)")


def better_drafter(setup: Setup, rollouts: Iterable[Mapping[str, Any]]) -> str | None:
    """Compare the run's drafts with lookups of equal length at the same verify steps, by tokens per cost.

    A lookup needs no draft pass. So it is faster if (1 + accepted lookups) (1 + draft_cost gamma) exceeds
    1 + accepted drafts, beyond chance.
    """
    if not setup.mtp or setup.mode not in ("rejection", "target_only", "block"):
        return None
    cost = 1 + setup.draft_cost * setup.gamma
    if (found := lookups(rollouts, setup.gamma, longest=setup.suffix, cost=cost)) is None:
        return None

    gain = cost * found["lookup"].value / found["drafts"].value - 1
    if gain < MARGIN or found["difference"].low <= 0:
        return None
    return (
        f"lookups would draft better than the MTP layer: {found['lookup'].value:.2f} tokens per verify step "
        f"instead of {found['drafts'].value:.2f}, without draft passes, {gain:.0%} faster if a draft costs "
        f"{setup.draft_cost:g} decode steps: set spec.drafter=suffix"
    )


def better_objective(setup: Setup, records: Records) -> str | None:
    """Advise end-to-end TV instead of hard CE, if the run verifies by rejection or block.

    In every study of rlpipe, end-to-end TV was better than hard CE: recipes/smollm_adapt/study.md,
    recipes/mtp_adapt.
    """
    rate = _mean(records, "spec/acceptance_rate")
    if not setup.online or setup.objective != "hard_ce" or setup.mode not in ("rejection", "block"):
        return None
    if rate is None or len(_values(records, "spec/acceptance_rate")) < RECENT:
        return None
    return (
        f"the draft learns from sampled tokens (draft.objective=hard_ce) and {rate:.0%} of its tokens are "
        "accepted; end-to-end total variation, whose teacher is the target's distribution, had more accepted "
        "in every study: set draft.objective=e2e_tv"
    )


def stale_draft(setup: Setup, records: Records) -> str | None:
    """Find a draft that became worse on fixed contexts, by more than entropy explains.

    This rule assumes that 0.1 nat of entropy explains one point of acceptance. This is cautious, because 0.6
    to 0.8 points are measured for rejection. `decomposition` measures the run's slope.
    """
    rule = "target_only" if setup.mode == "target_only" else "rejection"
    alpha = _values(records, f"probe/fixed/{rule}/depth_1")
    entropy = _values(records, "probe/fixed/target_entropy/depth_1")
    if len(alpha) < 2 or len(entropy) != len(alpha):
        return None

    change = alpha[-1] - alpha[0]
    unexplained = change + 0.1 * max(0.0, entropy[-1] - entropy[0])
    if unexplained > -MARGIN:
        return None
    hint = (
        "raise draft.lr" if setup.online else "set draft.train=online, or adapt it again (recipe mtp_adapt)"
    )
    if setup.lookup:
        hint = LOOKUP_HINT
    return (
        f"the draft no longer fits its target: acceptance on fixed contexts moved by {change:+.1%}, "
        f"{unexplained:+.1%} of it not by entropy: {hint}"
    )


def stale_engine(setup: Setup, records: Records) -> str | None:
    """Find engines that accept fewer of their drafts than the newest version would, beyond chance."""
    gaps, errors = (_values(records, f"probe/{name}")[-5:] for name in ("staleness", "staleness_se"))
    if len(gaps) < 3 or len(errors) != len(gaps):
        return None

    # Readings are independent, so the squares of their errors add up.
    gap, se = fmean(gaps), (sum(e * e for e in errors) ** 0.5) / len(errors)
    if gap > -MARGIN or gap > -3 * se:
        return None
    return (
        f"engines accept {-gap:.1%} less of their drafts than the newest weights would, so the served "
        f"weights are stale: {staleness_hint(setup)}"
    )


def staleness_hint(setup: Setup) -> str:
    """Return what to do about stale engines; a staleness limit of 0 cannot be lowered."""
    lower = f"lower pipeline.max_staleness={setup.max_staleness}, and " if setup.max_staleness else ""
    return f"{lower}look for canary_failed in events.jsonl"


def untrained_layer(setup: Setup, records: Records) -> str | None:
    """Find an MTP layer that drafts no better than chance, because it was initialized and never trained.

    A layer trained on any text has several times this acceptance.
    """
    rate = _mean(records, "spec/acceptance_rate")
    steps = sum(_values(records, "spec/verify_steps"))
    if not setup.mtp or rate is None or rate >= UNTRAINED_RATE or steps < UNTRAINED_STEPS:
        return None
    return (
        f"only {rate:.1%} of the drafts are accepted in {steps:,.0f} verify steps: the MTP layer looks "
        "untrained. Graft a fitted one (rlpipe graft MODEL OUT), adapt it (recipe mtp_adapt), or set "
        "spec.mode=none"
    )


def no_speedup(setup: Setup, records: Records) -> str | None:
    """Find steps with drafts that are measured to be slower than steps without."""
    observed = _mean(records, "spec/speedup_observed")
    if observed is None or observed >= 1 - MARGIN:
        return None
    return f"decoding with drafts takes {1 / observed - 1:.0%} longer than without: set spec.mode=none"


def few_env_threads(setup: Setup, records: Records) -> str | None:
    """Find attempts that wait for an environment's thread much longer than they use it, with idle engines.

    A wait of less than 5 s does not count, because on a busy machine every thread is slow.
    """
    waiting, running = (_mean(records, name) for name in ("timing_s/sandbox", "env/sandbox/seconds/mean"))
    busy = _mean(records, "perf/utilisation/rollout")
    if waiting is None or running is None or busy is None:
        return None
    if waiting < max(2 * running, running + 5) or busy > 0.7:
        return None
    return (
        f"an attempt waits {waiting - running:.1f} s for one of env.threads={setup.env_threads} and "
        f"runs {running:.1f} s in it, while engines are idle {1 - busy:.0%} of the time: raise env.threads"
    )


def equal_groups(setup: Setup, records: Records) -> str | None:
    """Find groups without signal, which a filter could replace by rolling out other prompts.

    If nearly all groups have equal rewards, the filter would reach its limit; the run then needs other
    prompts (see `problems`).
    """
    share = _mean(records, "env/no_signal")
    if share is None or setup.filter_equal_rewards or not 0.4 <= share <= 1 - 1 / setup.filter_limit:
        return None
    return (
        f"{share:.0%} of the last groups had equal rewards and taught nothing: set "
        f"pipeline.filter_equal_rewards=true, which rolls out others in their place "
        f"({1 / (1 - share):.1f} times the rollouts for a step of full signal)"
    )


def few_workers(setup: Setup, records: Records) -> str | None:
    """Find a trainer that waits for busy engines, so that more engines would shorten the step.

    The gain is an upper bound: it assumes that rollouts scale with the engines, and that the machine has
    capacity.
    """
    waiting, step = (_mean(records, f"timing_s/{name}") for name in ("wait_rollout", "step"))
    busy = _mean(records, "perf/utilisation/rollout")
    if waiting is None or not step or busy is None:
        return None

    share = waiting / step
    if share < 0.5 or busy < 0.7:
        return None
    gain = 1 / (1 - share / (setup.workers + 1)) - 1
    where = "set cluster=ray and " if setup.inline else ""
    return (
        f"the trainer waits for rollouts {share:.0%} of a step while the engines generate {busy:.0%} of the "
        f"time: {where}raise rollout.workers={setup.workers} where processors or GPUs are free for it; "
        f"one more brings up to {gain:.0%} more steps per hour"
    )


def cut_answers(setup: Setup, records: Records) -> str | None:
    """Find runs in which most attempts end at a limit, so that unfinished answers are rewarded."""
    share = _mean(records, "env/truncated")
    if share is None or share < 0.5:
        return None
    return (
        f"{share:.0%} of the attempts were cut off by a limit before they ended: raise "
        f"rollout.max_new_tokens={setup.max_new_tokens} (of a turn), "
        f"rollout.max_context={setup.max_context} (of prompt and answers) or "
        f"env.max_turns={setup.max_turns}, unless the task is meant to be that short"
    )


RULES: dict[str, Callable[[Setup, Records], str | None]] = {
    "better_rule": better_rule,
    "better_gamma": better_gamma,
    "better_objective": better_objective,
    "stale_draft": stale_draft,
    "stale_engine": stale_engine,
    "untrained_layer": untrained_layer,
    "no_speedup": no_speedup,
    "few_env_threads": few_env_threads,
    "equal_groups": equal_groups,
    "few_workers": few_workers,
    "cut_answers": cut_answers,
}
