"""The split of acceptance has one definition: what a run emits is what its summary and plots say."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isfinite

import numpy as np
import pytest

from rlpipe.config.run import Config
from rlpipe.diagnosis.acceptance_split import MAX_STALENESS, OVERALL, STEP, early_steps, of_run
from rlpipe.diagnosis.analysis import analyse
from rlpipe.diagnosis.explanation import excursion, explain_acceptance, points
from rlpipe.diagnosis.monitor import Monitor
from rlpipe.metrics.runs import load_run
from rlpipe.report.figures import figures
from tests.helpers.planted_runs import planted_run

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A run whose draft goes stale while entropy falls, as a trainer before this split left it."""
    return planted_run(tmp_path_factory.mktemp("runs") / "run", 0, mismatch=-0.1, entropy=-0.3)


def monitor_of(run, steps=60):
    config = Config()
    config.run.steps = steps
    return Monitor(config, run.path, lambda *_, **__: None)


def emitted(monitor, records):
    """What a controller would commit at each of these steps."""
    return {r[STEP]: {n: v.value() for n, v in monitor.split(r).items()} for r in records}


def test_the_parts_add_up_at_every_step_and_depth_from_the_end_of_the_early_phase_on(planted):
    splits = of_run(planted)
    assert splits.depths == [OVERALL, 1, 2] and splits.at(1, 22) is None
    for depth in splits.depths:
        for step in range(23, 61):
            split = splits.at(depth, step)
            assert sum(part.value for part in split.causes().values()) == pytest.approx(split.total.value)
            assert all(part.low <= part.value <= part.high for part in split.parts.values())
    assert set(splits.at(1).parts) == {"total", "entropy", "mismatch", "staleness", "contexts"}


@pytest.mark.parametrize(("lag", "stays"), [(0.0, False), (-0.2, True)])
def test_engines_with_the_newest_weights_have_no_staleness_unless_it_is_clear(tmp_path, lag, stays):
    run = planted_run(tmp_path / "run", 1, staleness=lag)
    measured = of_run(run).at(1)
    fresh = [record | {MAX_STALENESS: 0} for record in run.records]
    split = of_run(replace(run, records=fresh)).at(1)
    assert measured.parts["staleness"].value != 0
    if stays:
        assert split.parts == measured.parts
        return

    zero = split.parts["staleness"]
    assert zero.low == zero.value == zero.high == 0
    width = split.parts["contexts"].high - split.parts["contexts"].low
    assert width < measured.parts["contexts"].high - measured.parts["contexts"].low
    assert sum(part.value for part in split.causes().values()) == pytest.approx(split.total.value)


def test_a_resumed_run_emits_what_an_uninterrupted_one_does_and_the_report_computes_the_same(planted):
    monitor = monitor_of(planted)
    records = planted.records
    (planted.path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records[:41]))
    monitor.resume_after(60)  # all probes are there; the records until step 40
    later = emitted(monitor, records[41:])
    splits = of_run(planted)
    (planted.path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert len(later) == 20
    for step, values in later.items():
        for depth, suffix in ((OVERALL, ""), (1, "/depth_1"), (2, "/depth_2")):
            for part, interval in splits.at(depth, step).parts.items():
                name = f"acceptance_split/{part}{suffix}"
                found = [values[n] for n in (name, f"{name}/low", f"{name}/high")]
                assert found == pytest.approx([interval.value, interval.low, interval.high]), (step, name)


def test_the_summary_and_the_plots_have_the_numbers_that_were_emitted(planted):
    split, text = of_run(planted).at(1), explain_acceptance(planted).text
    size, ends = (
        100 * abs(split.total.value),
        sorted(100 * abs(x) for x in (split.total.low, split.total.high)),
    )
    assert f"fell by {size:.1f} [{ends[0]:.1f}, {ends[1]:.1f}] points from steps 1-20 to 51-60" in text
    by_depth, over_time = (
        next(f for f in figures([planted]) if f.title.startswith(f"Change of the acceptance rate{title}"))
        for title in (", by depth", " since")
    )
    for name, label in (("total", "change"), ("entropy", "entropy"), ("mismatch", "fit of the draft")):
        part = split.parts[name]
        (bar,) = [trace for trace in by_depth.traces if trace["name"] == label]
        at = bar["y"].index("depth 1")
        ends = [bar["x"][at] - bar["error_x"]["arrayminus"][at], bar["x"][at] + bar["error_x"]["array"][at]]
        assert [bar["x"][at], *ends] == pytest.approx([part.value, part.low, part.high], abs=1e-5)
        assert name == "total" or points(part) in text
        (curve,) = [trace for trace in over_time.traces if trace["name"] == label]
        overall = of_run(planted).at(OVERALL).parts[name]
        assert (curve["x"][-1], curve["y"][-1]) == (60, pytest.approx(overall.value, abs=1e-5))
    assert "from steps 1-20 to 51-60" in by_depth.note


def test_a_run_that_is_made_longer_keeps_its_early_phase(planted):
    short = replace(planted, settings={"run": {"steps": 30}}, records=planted.records[:31])
    assert (early_steps(30), of_run(short).early, early_steps(12), early_steps(1000)) == (10, 10, 6, 20)
    emitted_then = [r | {"acceptance_split/early_steps": 10.0} for r in short.records]
    longer = replace(planted, records=[*emitted_then, *planted.records[31:]])
    assert of_run(longer).early == 10 and of_run(longer).at(1).early == (1, 10)


def test_depths_that_change_at_a_resume_leave_the_split_of_those_before(planted):
    splits = of_run(planted)
    tables = splits._first[1]
    for table in tables:
        wider = {n: np.concatenate([c, c[:, :1]], 1) for n, c in table.values.items()}
        table.values = wider
    splits.probed(61, tables)
    assert splits.at(1) is not None


def dip(values, noise=0.004):
    """A run directory with these rates at depth 1, without probes."""
    rng = np.random.default_rng(3)

    def write(path):
        path.mkdir()
        rows = [
            {
                STEP: step,
                "time": float(step),
                "spec/acceptance_rate": rate - 0.03,
                "spec/acceptance_rate/depth_1": rate + noise * rng.standard_normal(),
                "rollout/entropy": 0.5 + 0.05 * rng.standard_normal(),
            }
            for step, rate in enumerate(values, 1)
        ]
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (path / "config.yaml").write_text(f"run: {{steps: {len(values)}}}\nspec: {{mode: rejection}}\n")
        return load_run(path)

    return write


def test_an_excursion_inside_a_third_is_reported_and_noise_is_none(tmp_path):
    """0.976, down to 0.871 around step 14, then 0.938: its thirds differ by less than a point."""
    rates = [0.976] * 10 + [0.93, 0.90, 0.88, 0.871, 0.871, 0.88, 0.90, 0.93] + [0.96] * 12
    run = dip(rates)(tmp_path / "dip")
    text = excursion(run, of_run(run).at(1), of_run(run))
    assert "it fell to 0.88" in text and "(steps 12 to 16, -9." in text and "rose again" in text
    assert "parts at step 16 that are clear of 0 and at least 1.5 points: fit of the draft -" in text
    flat = dip([0.95] * 30, noise=0.03)
    found = [flat(tmp_path / f"flat{n}") for n in range(20)]
    assert sum(bool(excursion(run, of_run(run).at(1), of_run(run))) for run in found) <= 2


def test_a_run_without_probes_leaves_all_that_entropy_does_not_explain_to_the_draft(tmp_path):
    run = dip([0.9] * 15 + [0.8] * 15)(tmp_path / "run")
    split = of_run(run).at(1)
    assert set(split.parts) == {"total", "entropy", "mismatch"} and split.parts["mismatch"].high < -0.05
    assert isfinite(split.parts["mismatch"].low) and list(split.slopes) == ["between steps"]


def test_analyse_gives_the_split_as_plain_data(planted):
    found = json.loads(json.dumps(analyse(planted)))["split"]
    assert list(found) == ["overall", "depth 1", "depth 2"]
    total = of_run(planted).at(1).total
    assert found["depth 1"]["parts"]["total"] == {"value": total.value, "low": total.low, "high": total.high}
