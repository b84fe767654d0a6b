"""Expected counts from tables: the chance that each verify step starts and accepts, turn by turn."""

import numpy as np
import pytest

from rlpipe.adapt.estimates import TOKENS, estimate
from rlpipe.adapt.expectation import expected_counts, mean_overlap
from tests.helpers.trajectories import make_trajectory

pytestmark = pytest.mark.unit


def made(positions, accept, top, name="a"):
    """A trajectory of an instance, and its table of two depths."""
    trajectory = make_trajectory(np.random.default_rng(0), name=name)
    trajectory.instance_id = name
    columns = {"accept": accept, "top": top, "rejection": accept}
    return trajectory, (np.array(positions), {k: np.array(v, float) for k, v in columns.items()})


def simulated(accept, turns, samples=40_000):
    """Walk the verify steps of one sequence: mean steps, and reached and accepted by depth."""
    rng = np.random.default_rng(1)
    steps, reached, accepted = 0, np.zeros(2), np.zeros(2)
    for _ in range(samples):
        for first, stop in turns:
            t = first
            while t < stop:
                steps += 1
                kept = 0
                while kept < 2 and t + kept < stop and not np.isnan(accept[t][kept]):
                    reached[kept] += 1
                    if rng.random() >= accept[t][kept]:
                        break
                    accepted[kept] += 1
                    kept += 1
                t += kept + 1
    return steps / samples, reached / samples, accepted / samples


def test_expected_counts_are_those_of_simulated_verify_steps():
    nan = np.nan
    # Two turns: four anchors, then two. A depth beyond the end of its turn is not drafted.
    accept = [[0.5, 0.9], [0.2, 0.4], [0.8, 0.3], [0.6, nan], [0.7, 0.1], [0.3, nan]]
    trajectory, table = made([11, 12, 13, 14, 20, 21], accept, np.zeros((6, 2)))
    (counts,) = expected_counts([trajectory], [table], gamma=2, mode="rejection").values()

    steps, reached, accepted = simulated(accept, [(0, 4), (4, 6)])
    assert counts.emitted == 6
    assert counts.verify_steps == pytest.approx(steps, abs=0.02)
    assert counts.drafted == pytest.approx(reached, abs=0.02)
    assert counts.accepted == pytest.approx(accepted, abs=0.02)


def test_target_only_accepts_where_the_token_is_the_drafts_argmax():
    trajectory, table = made([5, 6, 7], np.full((3, 2), 0.5), [[1, 0], [0, 1], [1, np.nan]])
    (counts,) = expected_counts([trajectory], [table], gamma=2, mode="target_only").values()
    # The step at 5 accepts one draft and emits two tokens; the step at 7 accepts its only draft.
    assert (counts.verify_steps, counts.emitted) == (2, 3)
    assert (counts.drafted, counts.accepted) == ([2, 1], [2, 0])


def test_attempts_at_a_prompt_are_one_cluster_and_tables_without_contexts_are_left_out():
    one, table = made([3, 4], [[0.5, 0.5], [0.5, np.nan]], np.ones((2, 2)))
    other, _ = made([3], [[1, 1]], [[1, 1]], name="b")
    counts = expected_counts([one, one, other], [table, table, None], gamma=1, mode="rejection")
    assert list(counts) == ["a"] and counts["a"].emitted == 4
    assert estimate(counts, TOKENS).value == pytest.approx(4 / 3)  # 1.5 steps for two tokens
    assert mean_overlap([table, None], 2) == [0.5, 0.5] and mean_overlap([None], 1) == [None]
