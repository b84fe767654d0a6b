"""The summary names what was planted in a run, is never sure of anything else, and says it in numbers."""

import re

import pytest

from rlpipe.cli.main import main
from rlpipe.diagnosis.explanation import explain_acceptance
from rlpipe.diagnosis.summary import summarize
from rlpipe.metrics.rollouts import step_files
from rlpipe.metrics.statistics import wilson
from tests.helpers.planted_runs import PLANTED, planted_run

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("cause", PLANTED)
def test_the_planted_cause_is_named_and_no_other_with_confidence(tmp_path, cause):
    name, planted = PLANTED[cause]
    for seed in range(2):
        found = summarize(planted_run(tmp_path / str(seed), seed, **planted)).findings
        assert name in {f.name for f in found if f.sure or name == "nothing"}, (seed, found)
        assert {f.name for f in found if f.sure} <= {name}, (seed, found)


def test_steps_alone_never_give_a_cause_for_certain(tmp_path):
    run = planted_run(tmp_path / "run", 3, entropy=0.5)
    for file in (run.path / "probe").iterdir():
        file.unlink()
    (found,) = summarize(run).findings
    assert found.name == "entropy" and not found.sure and "probes" in found.text


def test_every_part_is_named_with_its_interval_and_the_steps_that_it_compares(tmp_path):
    run = planted_run(tmp_path / "run", 0, staleness=-0.1)
    (text,) = (text for label, text in summarize(run).lines if label == "Why acceptance moved")
    assert "lag further behind" in text and "from steps 1-20 to 51-60" in text
    for part in ("entropy of the target", "fit of the draft", "staleness of the engines", "other contexts"):
        assert re.search(rf"{part} [+-][\d.]+ \[[+-][\d.]+, [+-][\d.]+\] points", text), part


def test_a_slope_that_an_intervention_measured_replaces_those_of_the_run(tmp_path):
    run = planted_run(tmp_path / "run", 0, entropy=0.5)
    told = {}
    for slope in ([], [-0.25, -0.27, -0.23], [0.0, -0.01, 0.01]):
        run.settings["metrics"] = {"probe": {"slope": slope}}
        told[str(slope)] = explain_acceptance(run)
    without, right, flat = told.values()
    assert without.name == right.name == "entropy" and right.sure and "by intervention" not in without.text
    assert "measured by intervention, -0.250 [-0.270, -0.230] per nat" in right.text
    assert flat.name != "entropy"  # 13 points fewer, and entropy does not account for them
    for file in (run.path / "probe").iterdir():
        file.unlink()
    alone = explain_acceptance(run)  # settings still have the flat slope: steps leave the whole change
    assert alone.hint == ""  # probes are on by default
    assert alone.name == "unexplained" and "measured by intervention leaves" in alone.text and not alone.sure


def test_a_short_run_says_what_it_takes_to_know_why(tmp_path):
    run = planted_run(tmp_path / "run", 0, entropy=0.5)
    del run.records[12:]
    for file in (run.path / "probe").iterdir():
        file.unlink()
    (text,) = (text for label, text in summarize(run).lines if label == "Why acceptance moved")
    assert "an early phase of 20 steps with drafts, and 3 more. A certain cause needs 6 probes" in text
    assert text.startswith("Acceptance rate 0.")


def cut_after(run, step):
    """Leave of a run what it had after `step` steps."""
    del run.records[step + 1 :]
    for number, file in step_files(run.path / "probe"):
        if number > step:
            file.unlink()


@pytest.mark.parametrize(
    ("planned", "every", "hint"),
    [
        (60, 5, "continue this run to step 26: "),
        (24, 5, "set run.steps=26 and continue this run to step 26: "),
        (60, 0, "set metrics.probe.every=5"),
    ],
)
def test_a_run_with_few_probes_has_a_split_and_learns_at_which_step_there_are_enough(
    tmp_path, planned, every, hint
):
    run = planted_run(tmp_path / "run", 0, mismatch=-0.3)
    cut_after(run, 24)  # probes of steps 1, 6, 11, 16 and 21
    run.settings["run"]["steps"] = planned
    run.settings["metrics"] = {"probe": {"every": every}}
    run.records[-1]["acceptance_split/early_steps"] = 12
    found = explain_acceptance(run)
    assert found.name == "draft_stale" and not found.sure and found.hint.startswith(hint)
    assert "In parts (95%): " in found.text and "needs 6 probes, and there are 5" in found.text
    assert ("there will be 6 by step 26 (metrics.probe.every=5)" in found.text) == (every > 0)


def test_a_part_that_is_clear_but_small_is_not_denied(tmp_path):
    text = explain_acceptance(planted_run(tmp_path / "run", 0, mismatch=-0.015)).text
    assert re.search(r"fit of the draft -[01]\.\d \[-[\d.]+, -[\d.]+\] points", text), text
    assert "part is both clear of 0 and at least 1.5 points" in text


def test_no_hint_names_settings_that_the_run_has(tmp_path):
    run = planted_run(tmp_path / "run", 0, entropy=0.5)
    assert "draft.objective=e2e_tv" in explain_acceptance(run).hint
    run.settings["draft"] = {"train": "online", "objective": "e2e_tv"}
    assert explain_acceptance(run).hint == ""


def test_analyse_prints_the_lines_that_stand_at_the_top_of_the_report(tmp_path, capsys):
    run = planted_run(tmp_path / "run", 0, mismatch=-0.1)
    assert main(["analyse", str(run.path)]) == 0
    assert summarize(run).text() in capsys.readouterr().out
    assert "set draft.train=online" in summarize(run).text().replace("Set", "set")
    assert main(["analyse", str(tmp_path / "nothing")]) == 2


def test_an_interval_of_none_solved_is_not_of_width_0():
    assert wilson(0.0, 8).high == pytest.approx(0.3244, abs=1e-4)
    assert wilson(1.0, 8).low == pytest.approx(1 - 0.3244, abs=1e-4)


def test_a_summary_exists_after_any_number_of_probes(tmp_path):
    run = planted_run(tmp_path / "run", 0, entropy=0.5)
    files, names = sorted((run.path / "probe").iterdir()), set()
    for last in reversed(files):
        names |= {f.name for f in summarize(run).findings}
        last.unlink()
    assert "entropy" in names and len(files) > 6


def test_settings_that_changed_at_a_resume_are_named_with_the_step(tmp_path):
    run = planted_run(tmp_path / "run", 0)
    assert "Settings changed" not in dict(summarize(run).lines)
    run.events += [
        {"kind": "start", "changed": {"spec.gamma": "3 -> 4"}},
        {"kind": "resumed", "step": 40},
        {"kind": "start"},
        {"kind": "resumed", "step": 50},
    ]
    (text,) = (text for label, text in summarize(run).lines if label == "Settings changed")
    assert text.startswith("After step 40: spec.gamma 3 -> 4. Read acceptance by depth")
    assert "50" not in text
