"""Analysis of recorded runs: cuts with a known truth, and prediction against observation."""

import json

import numpy as np
import pytest

from rlpipe.acceptance.fixed_contexts import attribute_run, decompose_fixed
from rlpipe.metrics.rollouts import rollout_record, step_file
from rlpipe.metrics.runs import RunData, load_run
from rlpipe.report.analysis import acceptance_by, analyse, boundary, judged, lengths, speedups
from tests.helpers.recorded_runs import distributions, recorded_trajectory, recorder, tables_of, verify

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
    assert found["difference"].covers(0.0)
    assert found["difference"].se < 0.5 * found["observed"].se or found["difference"].se < 0.05
    difference = found["observed"].value - found["predicted"].value
    assert difference == pytest.approx(found["difference"].value)


def test_rates_by_depth_are_kept_over_judged():
    some = records(np.random.default_rng(1), 5, 40)
    cuts = {cut.label: cut for cut in acceptance_by(judged(some), "depth")}
    kept = [n for record in some for _, n, *_ in record["drafts"]]
    for depth in (1, 2, 3):
        reached = sum(n >= depth - 1 for n in kept)
        assert cuts[str(depth)].judged == reached
        assert cuts[str(depth)].rate == pytest.approx(sum(n >= depth for n in kept) / reached)


def test_positions_turns_and_entropy_bins_find_what_was_planted():
    [record] = records(np.random.default_rng(2), 1, 60)
    for draft in record["drafts"]:  # kept in the first 64 tokens, rejected at depth 1 afterwards
        draft[1] = 3 if draft[0] < 65 else 0
        for place in range(draft[0], draft[0] + 3):
            record["entropies"][place] = 0.05 if draft[0] < 65 else 1.5
    drafts = judged([record])
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
    assert (judged([record]).position >= last[0]).sum() >= 1
    assert (judged([short]).position > last[0] - 1).sum() == 0


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


def probed_run(tmp_path, *, entropy=0.0, mismatch=0.0, staleness=0.0, probes=8, seed=5):
    """A run whose probes move by a known law: alpha = 0.9 - 0.2 H + mismatch, over probes 0..1."""
    rng = np.random.default_rng(seed)
    shapes, metrics = [rng.uniform(0, 1.5, (60, 2)) for _ in range(6)], []
    noise = [rng.normal(0, 0.01, (60, 2)) for _ in range(6)]
    for k in range(probes):
        at = k / (probes - 1)
        lines = []
        for i, (base, jitter) in enumerate(zip(shapes, noise, strict=True)):
            p = np.full((60, 2, 3), 1 / 3)
            table = tables_of(p, p, np.zeros((60, 2), dtype=int), f"t{i}")
            table.values["target_entropy"] = base + entropy * at
            alpha = 0.9 - 0.2 * (base + entropy * at) + mismatch * at + jitter
            table.values["rejection"] = table.values["target_only"] = alpha
            lines.append(table.to_json())
        head = {"step": k + 1, "version": k, "seconds": 0.1, "fixed": 3}
        recorder().write(step_file(tmp_path / "probe", k + 1), [head, *lines])
        visited = np.mean([np.array(line["rejection"])[:, 0].mean() for line in lines[3:]])
        rates = {
            "probe/visited/current_rate": visited,
            "probe/visited/observed_rate": visited + staleness * at,
        }
        metrics.append({"training/global_step": k + 1} | rates)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (tmp_path / "config.yaml").write_text("spec: {mode: rejection, gamma: 2}\n")
    return load_run(tmp_path)


@pytest.mark.parametrize(("entropy", "mismatch"), [(0.5, 0.0), (0.0, -0.1), (0.5, -0.1)])
def test_fixed_contexts_tell_entropy_from_mismatch_for_every_rule_and_depth(tmp_path, entropy, mismatch):
    found = decompose_fixed(probed_run(tmp_path, entropy=entropy, mismatch=mismatch))
    assert set(found) == {(rule, d) for rule in ("rejection", "target_only") for d in (None, 1, 2)}
    for changes in found.values():
        last = changes[-1]
        assert last.slope.covers(-0.2)
        assert last.entropy.value == pytest.approx(-0.2 * entropy, abs=0.01)
        assert last.mismatch.value == pytest.approx(mismatch, abs=0.01)
        assert abs(last.entropy.value + last.mismatch.value - last.total.value) < 1e-9


def test_a_run_is_attributed_from_its_files(tmp_path):
    run = probed_run(tmp_path, entropy=0.5, mismatch=-0.1, staleness=-0.05)
    found = attribute_run(run)
    spans = 5 / 7  # between the means of the first and the last three of eight probes
    truth = {"entropy": -0.2 * 0.5, "mismatch": -0.1, "staleness": -0.05, "contexts": 0.0}
    for name, part in found.parts().items():
        assert part.value == pytest.approx(truth[name] * spans, abs=0.012), name
    assert abs(sum(p.value for p in found.parts().values()) - found.total.value) < 1e-9
    assert json.dumps(analyse(run))


def test_a_run_without_probes_or_rollouts_is_analysed_all_the_same(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"training/global_step": 1}\n')
    found = analyse(load_run(tmp_path))
    assert found["decomposition"] == found["attribution"] == found["fixed_contexts"] == found["length"] == {}
