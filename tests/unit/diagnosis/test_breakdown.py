"""Cuts of recorded runs with a known truth, and prediction against observation."""

import numpy as np
import pytest

from rlpipe.diagnosis.breakdown import acceptance_by, boundary, lengths, lookups, speedups, verified_in
from rlpipe.metrics.rollouts import rollout_record
from rlpipe.metrics.runs import RunData
from tests.helpers.recorded_runs import distributions, recorded_trajectory, tables_of, verify

pytestmark = pytest.mark.unit


def records(rng, number, contexts, sharpness=0.6, rule="rejection", depths=3):
    found = []
    for i in range(number):
        p = distributions(rng, contexts, depths)
        q = sharpness * p + (1 - sharpness) * distributions(rng, contexts, depths)
        _, steps = verify(rng, p, q, rule)
        found.append(rollout_record(recorded_trajectory(steps, depths), i + 1, 0))
    return found


@pytest.mark.parametrize("rule", ["rejection", "target_only"])
def test_observed_and_predicted_length_agree_within_their_error(rule):
    found = lengths(records(np.random.default_rng(0), 40, 50, rule=rule))
    assert found["verify_steps"] == 2000
    assert found["difference"].interval.covers(0.0)
    assert found["difference"].se < 0.5 * found["observed"].se or found["difference"].se < 0.05
    difference = found["observed"].value - found["predicted"].value
    assert difference == pytest.approx(found["difference"].value)


def test_rates_by_depth_are_kept_over_judged():
    some = records(np.random.default_rng(1), 5, 40)
    cuts = {cut.label: cut for cut in acceptance_by(verified_in(some), "depth")}
    kept = [n for record in some for _, n, *_ in record["drafts"]]
    for depth in (1, 2, 3):
        reached = sum(n >= depth - 1 for n in kept)
        assert cuts[str(depth)].verified == reached
        assert cuts[str(depth)].rate == pytest.approx(sum(n >= depth for n in kept) / reached)


def test_positions_turns_and_entropy_bins_find_what_was_planted():
    [record] = records(np.random.default_rng(2), 1, 60)
    for draft in record["drafts"]:  # kept in the first 64 tokens, rejected at depth 1 afterwards
        draft[1] = 3 if draft[0] < 65 else 0
        for place in range(draft[0], draft[0] + 3):
            record["entropies"][place] = 0.05 if draft[0] < 65 else 1.5
    drafts = verified_in([record])
    position = {cut.label: cut.rate for cut in acceptance_by(drafts, "position")}
    assert position["0-31"] == position["32-63"] == 1.0 and position["96-127"] == 0.0
    entropy = {cut.label: cut.rate for cut in acceptance_by(drafts, "entropy")}
    assert entropy == {"0.01-0.1": 1.0, "1-2": 0.0}
    assert [cut.label for cut in acceptance_by(drafts, "turn")] == ["0"]
    assert acceptance_by(drafts, "kind")[0].label == ""


def test_drafts_behind_the_end_of_a_turn_are_left_out():
    [record] = records(np.random.default_rng(3), 1, 10)
    last = record["drafts"][-1]
    last[1] = 3
    cut = record["tokens"][: last[0] + 1]  # the turn ends with the first accepted draft
    short = record | {"tokens": cut, "policy_versions": [[-1, 1], [0, len(cut) - 1]]}
    assert (verified_in([record]).position >= last[0]).sum() >= 1
    assert (verified_in([short]).position > last[0] - 1).sum() == 0


def test_the_boundary_is_the_margin_between_the_two_rules():
    rng = np.random.default_rng(4)
    p = distributions(rng, 500, 2)
    better = tables_of(p, 0.95 * p + 0.05 * distributions(rng, 500, 2), np.zeros((500, 2), dtype=int))
    peaks = np.eye(6)[p.argmax(-1)]
    worse = tables_of(0.9 * peaks + 0.1 / 6, 0.5 * peaks + 0.5 / 6, np.zeros((500, 2), dtype=int))
    for table, sign in ((better, 1), (worse, -1)):
        for row in boundary([table]):
            assert np.sign(row["margin"]) == sign
            assert row["margin"] == pytest.approx(row["outside"] - row["tv"])


def test_observed_speed_up_is_against_the_baseline():
    name = "perf/tokens_per_s/rollout"
    settings = {"spec": {"mode": "rejection", "gamma": 3}}
    rows = [{name: 300.0, "training/global_step": i, "spec/acceptance_length": 3.0} for i in range(5)]
    plain = [{name: 150.0, "training/global_step": i} for i in range(5)]
    run = RunData(path=None, name="a", records=rows, settings=settings)
    found = speedups(run, 0.1, RunData(path=None, name="b", records=plain))
    assert found["observed"] == 2.0 and found["predicted"] == pytest.approx(3.0 / 1.3)


def record_of(tokens, drafts, prompt=3):
    """A record of one turn; drafts: [position, accepted]."""
    return {
        "tokens": tokens,
        "policy_versions": [[-1, prompt], [0, len(tokens) - prompt]],
        "drafts": [[position, accepted, [], [], []] for position, accepted in drafts],
    }


def test_lookups_are_accepted_as_far_as_the_target_sampled_what_followed_before():
    repeats = record_of([7, 8, 9] * 4, [[4, 0], [6, 1], [11, 0]])  # the last turn ends after one token
    new = record_of(list(range(12)), [[4, 2], [8, 1]])
    found = lookups([repeats, new, {"drafts": None}], gamma=2, longest=3)
    assert found["lookup"].value == pytest.approx(1 + (2 + 2 + 1) / 5)
    assert found["drafts"].value == pytest.approx(1 + (1 + 3) / 5)
    assert found["difference"].value == pytest.approx((5 - 4) / 5)
    assert found["lookup"].low < found["lookup"].value  # two trajectories: an interval
    assert lookups([repeats], gamma=2, longest=3) is None
