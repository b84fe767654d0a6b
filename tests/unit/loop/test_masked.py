"""The rule by which attempts that fail end a run, and what is said of them."""

import pytest

from rlpipe.loop.masked import MaskedAttempts
from rlpipe.types import Trajectory, TrajectoryStatus

pytestmark = pytest.mark.unit


def attempts(*errors):
    """One attempt for each error; None is one that was played."""
    return [
        Trajectory(
            trajectory_id=f"t{n}",
            group_id="g",
            instance_id="i",
            status=TrajectoryStatus.COMPLETE if error is None else TrajectoryStatus.MASKED,
            info={} if error is None else {"exit_reason": "error", "error": error, "place": "suite.py:7"},
        )
        for n, error in enumerate(errors)
    ]


def watched(share, window):
    events = []
    return MaskedAttempts(share, window, lambda kind, **fields: events.append((kind, fields))), events


def test_the_rule_waits_for_a_full_window_and_forgets_what_left_it():
    rule, _ = watched(0.5, 4)
    rule.see(attempts("a", "a", "a"))
    assert rule.stop_reason is None, "three attempts are not four"
    rule, _ = watched(0.5, 4)
    rule.see(attempts("a", None, None, None))
    rule.see(attempts("a"))
    assert rule.stop_reason is None, "the first failure has left the window"


def test_the_verdict_names_share_setting_and_commonest_cause_and_stands():
    rule, _ = watched(0.5, 4)
    rule.see(attempts("disk full", "disk full", "odd", None))
    assert rule.stop_reason.startswith(
        "3 of the last 4 attempts were masked (run.max_masked_share=0.5), 2 of them by: disk full."
    )
    first = rule.stop_reason
    rule.see(attempts(None, None, None, None))
    assert rule.stop_reason == first


def test_a_share_of_one_stops_only_when_all_fail():
    rule, _ = watched(1.0, 3)
    rule.see(attempts("a", "a", None, "a", "a"))
    assert rule.stop_reason is None
    rule.see(attempts("a"))
    assert rule.stop_reason


def test_a_fault_in_every_attempt_is_reported_a_few_times_with_its_place():
    rule, events = watched(1.0, 1000)
    rule.see(attempts(*["disk full"] * 100))
    assert [fields["times"] for _, fields in events] == [1, 2, 4, 8, 16, 32, 64]
    assert events[0] == (
        "attempt_masked",
        {"attempt": "t0", "reason": "error", "error": "disk full", "place": "suite.py:7", "times": 1},
    )


def test_validations_are_reported_and_do_not_count():
    rule, events = watched(0.5, 2)
    rule.report(attempts("a", "a"))
    assert len(events) == 2 and rule.stop_reason is None
    assert rule.metrics()["env/masked_share"].value() is None


def test_metrics_count_since_the_last_step():
    rule, _ = watched(1.0, 100)
    rule.see(attempts("a", None, None, None))
    first, second = rule.metrics(), rule.metrics()
    assert first["env/masked_share"].value() == 0.25 and first["env/errors"].value() == 1
    assert second["env/masked_share"].value() is None and second["env/errors"].value() == 0
