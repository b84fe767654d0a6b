"""Metrics of the trajectories of training steps and of validation. No torch.

Owns the counting; the controller decides when to count. Entropy, acceptance, staleness and reward all come
from the trajectories of the same step, so that they can be compared. Masked trajectories (infrastructure
failures) enter only `env/masked`, `env/retries` and `env/exit/*`.

Reads from `Trajectory.info`: submitted, changed (bool), exit_reason, tamper (str), retries (int),
sandbox_seconds (float). Every other number in `info` becomes a metric with its name, see `InfoMetrics`.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import comb, fsum

import numpy as np

from rlpipe.metrics.distributions import Histogram, Sketch
from rlpipe.metrics.statistics import cr1_error
from rlpipe.metrics.values import Last, Max, Mean, Min, Ratio, Sum, Value, stats
from rlpipe.types import Group, SpecCounts, Trajectory, TrajectoryStatus

SOLVED = 1.0  # a trajectory is solved if its reward is at least this
_WINDOW = 16  # tokens, about a short sentence
MAX_INFO = 32  # maximal number of names in `info` that become metrics
_OWN_INFO = ("submitted", "changed", "retries", "sandbox_seconds")  # become metrics with other names


def trajectory_metrics(groups: Sequence[Group], trainer_version: int) -> dict[str, Value]:
    """Compute the metrics of the groups of one training step.

    Args:
        groups: the groups about to be trained on.
        trainer_version: policy version of the trainer when the step starts.
    Returns:
        Metrics by name: critic/{score,rewards}, lengths, turns, rollout/entropy, spec/*, env/*, staleness.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    # Masked trajectories are not trained on, so they count only as masked.
    trained = _complete(trajectories)
    rewards = [t.reward for t in trained]
    sampled = [t for t in trained if t.oldest_version is not None]
    ages = [trainer_version - t.oldest_version for t in sampled]
    spans = [len({v for v in t.versions.tolist() if v >= 0}) for t in sampled]
    truncated = Mean.of(t.truncated for t in trained)
    return {
        **stats("critic/score", rewards),
        **stats("critic/rewards", rewards),
        **stats("prompt_length", (t.prompt_length for t in trained)),
        **stats("response_length", (t.response_length for t in trained)),
        **stats("num_turns", (t.num_turns for t in trained)),
        **stats("training/off_policy/trajectory_staleness", ages),
        **stats("training/off_policy/trajectory_spans", spans),
        **spec_metrics(_spec_sum(trained)),
        **_spec_range(trained),
        "response_length/clip_ratio": truncated,
        "response_length/spread": Sketch.of(t.response_length for t in trained),
        "rollout/entropy": _entropy(trained),
        "rollout/distinct_tokens": distinct_tokens(trained),
        "env/submit_rate": Mean.of(t.info.get("submitted") for t in trained),
        "env/truncated": truncated,
        "env/masked": Sum(len(trajectories) - len(trained)),
        "env/retries": Sum(sum(t.info.get("retries", 0) for t in trajectories)),
        "env/groups": Sum(len(groups)),
        "env/trajectories": Sum(len(trained)),
        **_group_outcomes(groups),
        **_tampering(trained),
        **_exits(trajectories),
        **_sandbox_seconds(trajectories),
    }


def spec_metrics(counts: SpecCounts) -> dict[str, Value]:
    """Compute acceptance metrics of speculative decoding from summed counts; {} without verify steps.

    >>> counts = SpecCounts(drafted=[4, 3], accepted=[3, 1], verify_steps=4, proposed=8)
    >>> values = spec_metrics(counts)
    >>> values["spec/acceptance_rate"].value(), values["spec/acceptance_length"].value()
    (0.5, 2.0)
    >>> values["spec/num_accepted"].counts  # verify steps that accepted 0, 1, 2 drafts
    [1, 2, 1]
    """
    if not counts.verify_steps:
        return {}
    accepted = sum(counts.accepted)
    return {
        "spec/acceptance_rate": Ratio(accepted, counts.proposed),
        "spec/acceptance_length": Ratio(accepted + counts.verify_steps, counts.verify_steps),
        "spec/verify_steps": Sum(counts.verify_steps),
        "spec/num_accepted": _num_accepted(counts),
        **{
            f"spec/acceptance_rate/depth_{k}": Ratio(accepted_at_k, reached)
            for k, (accepted_at_k, reached) in enumerate(zip(counts.accepted, counts.drafted, strict=True), 1)
        },
    }


def member_metrics(groups: Sequence[Group], members: Iterable[str]) -> dict[str, Value]:
    """Compute the metrics of each member of `env.mix`; the instance ids of a member are "MEMBER/ID"."""
    values: dict[str, Value] = {}
    for member in members:
        own = [g for g in groups if g.prompt.instance_id.partition("/")[0] == member]
        trained = _complete(t for g in own for t in g.trajectories)
        if trained:
            values[f"env/member/{member}/reward"] = Mean.of(t.reward for t in trained)
            values[f"env/member/{member}/response_length"] = Mean.of(t.response_length for t in trained)
            values[f"env/member/{member}/no_signal"] = _group_outcomes(own)["env/no_signal"]
        values[f"env/member/{member}/groups"] = Sum(len(own))
    return values


def validation_metrics(split: str, trajectories: Sequence[Trajectory], *, primary: bool) -> dict[str, Value]:
    """Compute the metrics of one held-out set. primary: whether its reward is also reported as val/reward.

    Raises ValueError when the name of the split cannot be part of a metric's name.
    """
    if not re.fullmatch(r"[\w.\-]+", split):
        raise ValueError(
            f"split {split!r} cannot be part of a metric name. Use letters, digits, '_', '-' or '.'."
        )

    done = _complete(trajectories)
    reward = Mean.of(t.reward for t in done)
    error = Last(clustered_standard_error([(t.instance_id, t.reward) for t in done]))
    passed = pass_rates((t.instance_id, t.reward or 0.0) for t in done)
    counts = _spec_sum(done)

    under = f"val/{split}"
    result: dict[str, Value] = {
        f"{under}/reward": reward,
        f"{under}/reward_se": error,
        f"{under}/solve_rate": Mean.of(t.reward >= SOLVED for t in done),
        **{f"val/{split}/pass_at_{k}": rate for k, rate in passed.items()},
        f"{under}/submit_rate": Mean.of(t.info.get("submitted") for t in done),
        f"{under}/response_length": Mean.of(t.response_length for t in done),
        f"{under}/num_turns": Mean.of(t.num_turns for t in done),
        f"{under}/acceptance_length": Ratio(sum(counts.accepted) + counts.verify_steps, counts.verify_steps),
        f"{under}/entropy": _entropy(done),
        f"{under}/instances": Sum(len({t.instance_id for t in done})),
        f"{under}/trajectories": Sum(len(done)),
        f"{under}/masked": Sum(len(trajectories) - len(done)),
    }
    if primary:
        result |= {"val/reward": reward, "val/reward_se": error}
    return result


class InfoMetrics:
    """Means of the numbers that environments give in `info`, by name: `env/info/NAME`, `val/SPLIT/info/NAME`.

    Only the first `MAX_INFO` names of a run become metrics, so that ids used as names cannot flood them. The
    first name that is left out emits an event. event: called like `MetricsBus.event`.
    """

    def __init__(self, event: Callable[..., None]) -> None:
        self._event = event
        self._names: set[str] = set()
        self._is_full = False

    def training(self, groups: Sequence[Group]) -> dict[str, Value]:
        """Return the mean of each number over the trajectories of a training step that report it."""
        trajectories = [t for g in groups for t in g.trajectories]
        return {f"env/info/{name}": mean for name, mean in self._means(trajectories).items()}

    def validation(self, split: str, trajectories: Sequence[Trajectory]) -> dict[str, Value]:
        """Return the mean of each number over the trajectories of a held-out set that report it."""
        return {f"val/{split}/info/{name}": mean for name, mean in self._means(trajectories).items()}

    def _means(self, trajectories: Sequence[Trajectory]) -> dict[str, Mean]:
        observed: dict[str, list[float]] = defaultdict(list)
        for trajectory in _complete(trajectories):
            for key, value in trajectory.info.items():
                is_number = isinstance(value, (int, float)) and abs(value) < sys.float_info.max
                if is_number and key not in _OWN_INFO:
                    observed[re.sub(r"[^\w.\-]+", "_", key) or "_"].append(float(value))
        return {name: Mean.of(values) for name, values in observed.items() if self._takes(name)}

    def _takes(self, name: str) -> bool:
        if name not in self._names and len(self._names) < MAX_INFO:
            self._names.add(name)
        if name not in self._names and not self._is_full:
            self._is_full = True
            self._event("info_names", name=name, limit=MAX_INFO, names=sorted(self._names))
        return name in self._names


def clustered_standard_error(rewards: Iterable[tuple[str, float]]) -> float | None:
    """Return the standard error of the mean reward when attempts at one instance are correlated.

    It is `cr1_error` of the residuals r_ij - mean(r), divided by N, the number of attempts; each of the G
    instances is a cluster. None with fewer than two instances.

    >>> clustered_standard_error([("a", 0.0), ("b", 1.0), ("c", 0.0), ("d", 1.0)])
    0.28867513459481287
    """
    by_instance: dict[str, list[float]] = defaultdict(list)
    for instance, reward in rewards:
        by_instance[instance].append(reward)
    n, clusters = sum(map(len, by_instance.values())), len(by_instance)
    if clusters < 2:
        return None

    mean = fsum(r for attempts in by_instance.values() for r in attempts) / n
    squares = fsum(fsum(r - mean for r in attempts) ** 2 for attempts in by_instance.values())
    return cr1_error(squares, clusters) / n


def pass_rates(rewards: Iterable[tuple[str, float]]) -> dict[int, Mean]:
    """Estimate pass@k for k = 2, 4, 8, ...: the probability that one of k attempts at an instance solves it.

        pass@k = mean over instances of 1 - C(n - c, k) / C(n, k)

    where c of n attempts are solved; unbiased (Chen et al. 2107.03374, Eq. 1). Instances with fewer than k
    attempts do not count. A k that exceeds the attempts at every instance is left out. pass@1 is solve_rate.

    >>> rates = pass_rates([("a", 1.0), ("a", 0.0), ("a", 0.0), ("b", 0.0), ("b", 0.0)])
    >>> {k: (rate.total, rate.count) for k, rate in rates.items()}
    {2: (0.6666666666666667, 2.0)}
    """
    solved: dict[str, list[bool]] = defaultdict(list)
    for instance, reward in rewards:
        solved[instance].append(reward >= SOLVED)

    rates: dict[int, Mean] = {}
    k = 2
    while counted := [attempts for attempts in solved.values() if len(attempts) >= k]:
        rates[k] = Mean.of(1 - comb(a.count(False), k) / comb(len(a), k) for a in counted)
        k *= 2
    return rates


def _complete(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    return [t for t in trajectories if t.status is TrajectoryStatus.COMPLETE]


def _entropy(trajectories: Iterable[Trajectory]) -> Mean:
    nats = tokens = 0.0
    for t in trajectories:
        nats += fsum(t.entropies[t.loss_mask].tolist())
        tokens += t.response_length
    return Mean(nats, tokens)


def distinct_tokens(trajectories: Iterable[Trajectory]) -> Mean:
    """Return the share of sampled tokens that differ from the `_WINDOW` - 1 tokens before them in their turn.

    The window makes the share independent of the length of turns; repetitive text lowers it. Turns are
    counted separately, because an agent that calls the same tool again repeats nothing within a turn.

    Source: the moving-average type-token ratio (Covington & McFall 2010), with tokens instead of words.
    """
    different = tokens = 0
    for t in trajectories:
        ids, sampled = t.token_ids, t.loss_mask
        # Turns are numbered by their first tokens; tokens that were not sampled belong to no turn.
        starts = sampled & ~np.concatenate(([False], sampled[:-1]))
        turn = np.where(sampled, np.cumsum(starts), 0)

        repeated = np.zeros(len(ids), bool)
        for distance in range(1, min(_WINDOW, len(ids))):
            same_turn = turn[distance:] == turn[:-distance]
            repeated[distance:] |= same_turn & (ids[distance:] == ids[:-distance])
        different += int(np.count_nonzero(sampled & ~repeated))
        tokens += int(np.count_nonzero(sampled))
    return Mean(different, tokens)


def _spec_sum(trajectories: Iterable[Trajectory]) -> SpecCounts:
    total = SpecCounts()
    for t in trajectories:
        total.add(t.spec)
    return total


def _spec_range(trajectories: Iterable[Trajectory]) -> dict[str, Value]:
    """Return the smallest and largest acceptance length of any trajectory (Bebop Fig. 14a)."""
    lengths = [t.spec.acceptance_length for t in trajectories if t.spec.verify_steps]
    if not lengths:
        return {}
    return {"spec/acceptance_length/min": Min.of(lengths), "spec/acceptance_length/max": Max.of(lengths)}


def _num_accepted(counts: SpecCounts) -> Histogram:
    """Count verify steps by accepted drafts. counts.accepted[k] counts steps that accepted more than k."""
    at_least = [counts.verify_steps, *counts.accepted, 0]
    edges = [k - 0.5 for k in range(len(at_least))]
    return Histogram(tuple(edges), [a - b for a, b in pairwise(at_least)])


def _group_outcomes(groups: Sequence[Group]) -> dict[str, Value]:
    # A group whose trajectories are all masked has no outcome.
    ended = [g for g in groups if g.sides()]
    rewards = [[t.reward or 0.0 for t in _complete(g.trajectories)] for g in ended]
    return {
        "env/solve_all": Mean.of(min(r) >= SOLVED for r in rewards),
        "env/solve_none": Mean.of(max(r) <= 0 for r in rewards),
        "env/no_signal": Mean.of(g.has_equal_rewards() for g in ended),
    }


def _tampering(trajectories: Sequence[Trajectory]) -> dict[str, Value]:
    graded = [t for t in trajectories if "changed" in t.info]
    # Tampering in solved trajectories matters most, because their rewards may come from it.
    solved = ["tamper" in t.info for t in graded if t.reward >= SOLVED]
    share = {"env/tamper": Mean.of("tamper" in t.info for t in graded)} if graded else {}
    return share | ({"env/tamper_solved": Mean.of(solved)} if solved else {})


def _exits(trajectories: Sequence[Trajectory]) -> dict[str, Value]:
    reasons = Counter(
        re.sub(r"[^\w.\-]+", "_", str(t.info["exit_reason"])) for t in trajectories if "exit_reason" in t.info
    )
    return {f"env/exit/{reason or 'none'}": Ratio(n, len(trajectories)) for reason, n in reasons.items()}


def _sandbox_seconds(trajectories: Sequence[Trajectory]) -> dict[str, Value]:
    seconds = [t.info["sandbox_seconds"] for t in trajectories if "sandbox_seconds" in t.info]
    if not seconds:
        return {}
    return stats("env/sandbox/seconds", seconds)
