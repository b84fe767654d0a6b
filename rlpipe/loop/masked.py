"""Masked attempts: their reports and counts, and the rule that ends a run with too many of them.

An attempt is masked when something other than the model failed: the sandbox, the machine, or an environment
that raised an exception. It has no reward and is never trained on. One failing attempt never ends a run. A
run ends if the share of masked attempts among the last `run.masked_window` reaches `run.max_masked_share`,
because its steps would train on almost no data.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from rlpipe.metrics.values import Ratio, Sum, Value
from rlpipe.types import Trajectory, TrajectoryStatus


class MaskedAttempts:
    """Counts every finished attempt, whether it will be trained on or not.

    stop_reason: why the run must stop, or None.

    event: see `MetricsBus.event`. It is called with `attempt_masked` at the 1st, 2nd, 4th, 8th, ... failure
    of each kind and source line, so that a failure in every attempt does not flood the log.
    """

    def __init__(self, share: float, window: int, event: Callable[..., None]) -> None:
        self._share, self._window_size, self._event = share, window, event
        self._window: deque[str] = deque(maxlen=window)  # the cause; empty: the attempt was not masked
        self._times: Counter[tuple[str, str]] = Counter()
        self._masked = self._errors = self._attempts = 0  # since the last metrics
        self.stop_reason: str | None = None

    def see(self, trajectories: Iterable[Trajectory]) -> None:
        """Count attempts for the rule, and report why masked ones failed."""
        trajectories = list(trajectories)
        self.report(trajectories)

        for t in trajectories:
            masked = t.status is TrajectoryStatus.MASKED
            self._window.append(t.info.get("error", "unknown") if masked else "")
            self._attempts += 1
            self._masked += masked
            self._errors += masked and t.info.get("exit_reason") == "error"

        # Keep the first reason, even if later attempts succeed.
        self.stop_reason = self.stop_reason or self._reason_to_stop()

    def report(self, trajectories: Iterable[Trajectory]) -> None:
        """Report why masked attempts failed without counting them, as in a validation."""
        for t in trajectories:
            if t.status is not TrajectoryStatus.MASKED:
                continue

            kind, place = t.info.get("exit_reason", "unknown"), t.info.get("place", "")
            self._times[kind, place] += 1
            times = self._times[kind, place]
            # True for powers of two.
            if times & (times - 1) == 0:
                error = t.info.get("error", "")
                self._event(
                    "attempt_masked",
                    attempt=t.trajectory_id,
                    reason=kind,
                    error=error,
                    place=place,
                    times=times,
                )

    def _reason_to_stop(self) -> str | None:
        """Return the reason to stop the run; None if there is none, or too few attempts have finished."""
        causes = Counter(filter(None, self._window))
        masked, window = causes.total(), len(self._window)
        if window < self._window_size or masked < self._share * window:
            return None

        cause, times = causes.most_common(1)[0]
        return (
            f"{masked} of the last {window} attempts were masked (run.max_masked_share={self._share}), "
            f"{times} of them by: {cause}. Correct it (attempt_masked in events.jsonl has its location) and "
            "run again; it continues from the last step that was trained."
        )

    def metrics(self) -> dict[str, Value]:
        """Return the counts since the last call."""
        values = {
            "env/masked_share": Ratio(self._masked, self._attempts),
            "env/errors": Sum(self._errors),
        }
        self._masked = self._errors = self._attempts = 0
        return values
