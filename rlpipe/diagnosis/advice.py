"""Advice in words: what a run's own numbers say should be set otherwise.

Owns the rules and their words; each is a function of recent records (and of the run's settings) that returns
a sentence with the figure and the setting, or None. Flow: the controller shows every record to `Advisor.see`,
which raises an `advice` event when a rule begins to speak; the report calls `advise` on a finished run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rlpipe.config.run import Config

Records = Sequence[Mapping[str, Any]]

RECENT = 10  # records a figure is a mean of
MARGIN = 0.03  # relative gain that is worth a word


@dataclass(slots=True, kw_only=True)
class Setup:
    """What a run is set to. draft_cost: of one draft pass, in plain decode steps. env_threads: a worker's."""

    mode: str
    gamma: int
    adaptive: bool
    online: bool
    max_staleness: int
    draft_cost: float
    env_threads: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Setup:
        """From config.yaml, parsed; what it does not say is as in a new run."""
        config = asdict(Config())
        for name in ("spec", "mtp", "pipeline", "env"):
            config[name] |= settings.get(name) or {}
        advice = config["metrics"]["advice"] | ((settings.get("metrics") or {}).get("advice") or {})
        return cls(
            mode=str(config["spec"]["mode"]),
            gamma=config["spec"]["gamma"],
            adaptive=config["spec"]["adaptive"],
            online=str(config["mtp"]["train"]) in ("online", "ppow"),  # ppow: a run from before mtp.objective
            max_staleness=config["pipeline"]["max_staleness"],
            draft_cost=advice["draft_cost"],
            env_threads=config["env"]["threads"],
        )


def advise(setup: Setup, records: Records) -> dict[str, str]:
    """Every sentence that holds for the end of these records, by the name of its rule."""
    said = {name: rule(setup, records) for name, rule in RULES.items()}
    return {name: text for name, text in said.items() if text}


class Advisor:
    """Speaks once when a rule begins to hold, and again only after it did not. event: `MetricsBus.event`."""

    def __init__(self, setup: Setup, event: Callable[..., None]) -> None:
        self._setup, self._event = setup, event
        self._records: deque[Mapping[str, Any]] = deque(maxlen=20 * RECENT)
        self._speaking: set[str] = set()

    def see(self, record: Mapping[str, Any]) -> None:
        """Take a committed record into account."""
        self._records.append(record)
        said = advise(self._setup, list(self._records))
        for name in said.keys() - self._speaking:
            self._event("advice", rule=name, step=record.get("training/global_step"), text=said[name])
        self._speaking = set(said)


def _values(records: Records, name: str) -> list[float]:
    return [r[name] for r in records if isinstance(r.get(name), (int, float))]


def _mean(records: Records, name: str, count: int = RECENT) -> float | None:
    """Mean of the last values; None before there are three (or one, for what is measured rarely)."""
    seen = _values(records, name)[-count:]
    enough = 1 if name.startswith("probe/") else 3
    return fmean(seen) if len(seen) >= enough else None


def better_rule(setup: Setup, records: Records) -> str | None:
    """Rejection against target-only, from predicted lengths on the same contexts (Bebop Fig. 13, Eq. 48).

    >>> lengths = {"rejection": 3.21, "target_only": 3.0}
    >>> record = {f"probe/fixed/acceptance_length/{rule}": x for rule, x in lengths.items()}
    >>> better_rule(Setup.of({"spec": {"mode": "target_only"}}), [record])
    'rejection would beat target-only by 7% here (3.21 against 3.00 tokens per step): set spec.mode=rejection'
    """
    under = "probe/fixed/acceptance_length"
    lengths = {rule: _mean(records, f"{under}/{rule}", 3) for rule in ("rejection", "target_only")}
    other = {"target_only": "rejection", "rejection": "target_only", "block": "target_only"}.get(setup.mode)
    if other is None or None in lengths.values():
        return None
    mine = lengths["target_only" if setup.mode == "target_only" else "rejection"]
    gain = lengths[other] / mine - 1
    if gain < MARGIN:
        return None
    names = {"rejection": "rejection", "target_only": "target-only", "block": "block verification"}
    return (
        f"{names[other]} would beat {names[setup.mode]} by {gain:.0%} here ({lengths[other]:.2f} against "
        f"{mine:.2f} tokens per step): set spec.mode={other}"
    )


def better_gamma(setup: Setup, records: Records) -> str | None:
    """gamma by tokens per cost, (1 + sum_{k <= gamma} reach_k) / (1 + draft_cost gamma).

    reach_k: share of verify steps that accept depth k, the product of the conditional rates; beyond gamma it
    falls on by the last of them. Cost as in Leviathan et al. Thm 3.8, verification of gamma + 1 tokens
    costing as much as of one: where decoding is bound by memory.
    """
    if setup.adaptive or setup.mode not in ("rejection", "target_only", "block"):
        return None
    rates = [_mean(records, f"spec/acceptance_rate/depth_{k}") for k in range(1, setup.gamma + 1)]
    if None in rates:
        return None
    reach, worth = 1.0, {0: 1.0}
    tokens = 1.0
    for gamma in range(1, setup.gamma + 2):
        reach *= rates[min(gamma, setup.gamma) - 1]
        tokens += reach
        worth[gamma] = tokens / (1 + setup.draft_cost * gamma)
    best = max(worth, key=worth.__getitem__)
    gain = worth[best] / worth[setup.gamma] - 1
    if gain < MARGIN:
        return None
    if best == 0:
        return (
            f"speculation costs more than it brings: {worth[setup.gamma]:.2f} tokens per unit of decoding "
            "against 1: set spec.mode=none, or adapt the draft (recipe mtp_adapt)"
        )
    size = "large" if best < setup.gamma else "small"
    return (
        f"gamma is too {size}: {best} instead of {setup.gamma} would decode {gain:.0%} faster if a draft "
        f"costs {setup.draft_cost:g} decode steps: set spec.gamma={best}, or spec.adaptive=true to measure"
    )


def stale_draft(setup: Setup, records: Records) -> str | None:
    """On fixed contexts the draft fits worse than at first, by more than entropy explains.

    Entropy's part is taken at one point of acceptance per 0.1 nat, on the cautious side of what is measured
    for rejection (0.6 to 0.8 points); `decomposition` measures the run's own.
    """
    rule = "target_only" if setup.mode == "target_only" else "rejection"
    alpha = _values(records, f"probe/fixed/{rule}/depth_1")
    entropy = _values(records, "probe/fixed/target_entropy/depth_1")
    if len(alpha) < 2 or len(entropy) != len(alpha):
        return None
    change = alpha[-1] - alpha[0]
    rest = change + 0.1 * max(0.0, entropy[-1] - entropy[0])
    if rest > -MARGIN:
        return None
    remedy = "raise mtp.lr" if setup.online else "set mtp.train=online, or adapt it again (recipe mtp_adapt)"
    return (
        f"the draft no longer fits its target: acceptance on fixed contexts moved by {change:+.1%}, "
        f"{rest:+.1%} of it not by entropy: {remedy}"
    )


def stale_engine(setup: Setup, records: Records) -> str | None:
    """Engines accept less than the newest version would on the same drafts, by more than chance."""
    gap, error = (_values(records, f"probe/{name}")[-5:] for name in ("staleness", "staleness_se"))
    if len(gap) < 3 or len(error) != len(gap):
        return None
    mean, se = fmean(gap), (sum(e * e for e in error) ** 0.5) / len(error)
    if mean > -MARGIN or mean > -3 * se:
        return None
    return (
        f"engines keep {-mean:.1%} less of their drafts than the newest weights would: versions lag. Lower "
        f"pipeline.max_staleness={setup.max_staleness}, and look for canary_failed in events.jsonl"
    )


def no_speedup(setup: Setup, records: Records) -> str | None:
    """Measured: drafted steps are slower than plain ones would be."""
    observed = _mean(records, "spec/speedup_observed")
    if observed is None or observed >= 1 - MARGIN:
        return None
    return f"decoding with drafts takes {1 / observed - 1:.0%} longer than without: set spec.mode=none"


def few_env_threads(setup: Setup, records: Records) -> str | None:
    """Attempts queue for a thread of the environment far longer than they are in one, and engines are idle.

    A queue of less than 5 s is no sign of it: on a busy machine every thread is slow.
    """
    waited, ran = (_mean(records, name) for name in ("timing_s/sandbox", "env/sandbox/seconds/mean"))
    busy = _mean(records, "perf/utilisation/rollout")
    if None in (waited, ran, busy) or waited < max(2 * ran, ran + 5) or busy > 0.7:
        return None
    return (
        f"an attempt waits {waited - ran:.1f} s for one of env.threads={setup.env_threads}, is {ran:.1f} s "
        f"in it, while engines are idle {1 - busy:.0%} of the time: raise env.threads"
    )


RULES: dict[str, Callable[[Setup, Records], str | None]] = {
    "better_rule": better_rule,
    "better_gamma": better_gamma,
    "stale_draft": stale_draft,
    "stale_engine": stale_engine,
    "no_speedup": no_speedup,
    "few_env_threads": few_env_threads,
}
