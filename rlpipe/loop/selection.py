"""The selection-bias meter: do the trajectories that are trained on look like those that were generated?

Every rule that drops finished trajectories (pipeline.stale=drop, oversample, filters, failures) may favour
short, easy or successful ones. Training on the remaining ones is then training on a different task. Over a
window of trajectories that were trained or dropped, the shift of a quantity x is

    (mean of x over trained - mean of x over generated) / standard deviation of x over generated

for the response length, the reward and the difficulty (1 - mean reward of the siblings). Masked trajectories
have no reward and are excluded. With n trained of N generated, a random choice has a shift with standard
deviation sqrt(1/n - 1/N). A shift beyond four standard deviations and of at least 0.1 causes a warning, once
for each quantity.
Groups without an advantage that a filter dropped (`equal rewards`) are counted but not compared, because they
are chosen by reward on purpose.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from math import fsum, sqrt

from rlpipe.metrics.values import Last, Ratio, Sum, Value
from rlpipe.types import Group, Trajectory, TrajectoryStatus

WINDOW = 2048  # trajectories
FEWEST = 64  # generated trajectories before a warning; at least 8 of them must be dropped
QUANTITIES = ("length", "reward", "difficulty")
SHIFT, SIGMAS = 0.1, 4.0


class SelectionMeter:
    """The meter, which the backlog calls when prompts end. event: called with warnings (kind, fields)."""

    def __init__(self, event: Callable[..., None]) -> None:
        self._event = event
        # For each trajectory: whether it was trained on, and its QUANTITIES.
        self._seen: deque[tuple[bool, tuple[float, float, float]]] = deque(maxlen=WINDOW)
        self._dropped: Counter[str] = Counter()  # dropped prompts since the last metrics
        self._warned: set[str] = set()  # quantities whose bias was reported

    def trained(self, group: Group) -> None:
        """Record that a prompt was trained on."""
        self._add(group, group.trajectories, trained=True)

    def lost(self, group: Group, trajectories: Iterable[Trajectory]) -> None:
        """Record that finished trajectories of a group were dropped. group: has all siblings."""
        self._add(group, trajectories, trained=False)

    def dropped(self, reason: str) -> None:
        """Record that a prompt ended untrained."""
        self._dropped[reason] += 1

    def metrics(self, *, unfinished: int, oldest: int) -> dict[str, Value]:
        """Return the metrics of the step, and report a bias when there is one.

        unfinished: number of prompts in flight. oldest: versions since the admission of the oldest of them.
        """
        kept = [values for trained, values in self._seen if trained]
        every = [values for _, values in self._seen]

        values: dict[str, Value] = {
            "selection/trained_share": Ratio(len(kept), len(every)),
            "selection/prompts_dropped": Sum(sum(self._dropped.values())),
            "selection/prompts_unfinished": Last(unfinished),
            "selection/oldest_prompt": Last(oldest),
        }
        values |= {f"selection/dropped/{_slug(why)}": Sum(n) for why, n in self._dropped.items()}

        self._dropped.clear()

        # One shift per quantity, over the trajectories in the window.
        for place, name in enumerate(QUANTITIES):
            shift = _shift([v[place] for v in kept], [v[place] for v in every])
            values[f"selection/{name}_shift"] = Last(shift)
            self._report(name, shift, kept=len(kept), every=len(every))

        return values

    def _report(self, name: str, shift: float | None, *, kept: int, every: int) -> None:
        if shift is None or every < FEWEST or every - kept < FEWEST // 8 or name in self._warned:
            return

        # Warn if the shift is larger than a random choice of as many trajectories would give.
        if abs(shift) > max(SHIFT, SIGMAS * sqrt(1 / kept - 1 / every)):
            self._warned.add(name)
            self._event("selection_bias", quantity=name, shift=round(shift, 3), trained=kept, generated=every)

    def _add(self, group: Group, trajectories: Iterable[Trajectory], *, trained: bool) -> None:
        rewards = [t.reward for t in group.trajectories if t.status is TrajectoryStatus.COMPLETE]
        for t in trajectories:
            if t.status is TrajectoryStatus.COMPLETE:
                difficulty = 1 - fsum(rewards) / len(rewards)
                self._seen.append((trained, (float(t.response_length), float(t.reward), difficulty)))


def _shift(kept: list[float], every: list[float]) -> float | None:
    """Compute the module docstring's shift; 0 when all values are equal, None when `kept` is empty.

    >>> _shift([1.0, 1.0], [1.0, 1.0, 3.0, 3.0])
    -1.0
    """
    if not kept:
        return None

    mean = fsum(every) / len(every)
    spread = sqrt(fsum((x - mean) ** 2 for x in every) / len(every))
    return (fsum(kept) / len(kept) - mean) / spread if spread else 0.0


def _slug(reason: str) -> str:
    return "_".join(reason.split())
