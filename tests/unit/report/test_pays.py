"""Whether drafts pay: step times of the machine against the acceptance of a run."""

import json
from pathlib import Path

import pytest

from rlpipe.metrics.bus import STEP
from rlpipe.metrics.runs import RunData, load_run
from rlpipe.report.pays import pays, pays_table, run_pays

pytestmark = pytest.mark.unit
COSTS = {(1, 0): 10.0, (1, 1): 12.0, (1, 3): 15.0, (8, 0): 20.0, (8, 1): 45.0, (8, 3): 60.0}


def recorded(path: Path, metrics: dict[str, float]) -> RunData:
    path.mkdir()
    lines = [json.dumps({STEP: step, "time": float(step), **metrics}) for step in (1, 2)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return load_run(path)


def test_tokens_and_costs_decide_by_batch_and_gamma():
    rows = {(row.batch, row.gamma): row for row in pays(COSTS, [0.5, 0.4, 0.5])}
    assert rows[1, 3].tokens == pytest.approx(1 + 0.5 + 0.2 + 0.1)
    assert (rows[1, 1].outcome, rows[8, 1].outcome) == ("pays", "does not pay")
    assert rows[1, 1].measured == pytest.approx(0.5) and 0.4 < rows[1, 3].measured < 0.5
    assert rows[8, 1].needed is None  # a draft that costs more than a step never pays


@pytest.mark.parametrize("batch", [1, 8])
def test_acceptance_as_needed_is_even(batch):
    costs = {key: value for key, value in COSTS.items() if key[0] == batch and key[1] != 1}
    (row,) = pays(costs, [0.0] * 3)
    assert row.needed is not None
    (even,) = pays(costs, [row.needed] * 3)
    assert even.gain == pytest.approx(1) and even.outcome == "even"


def test_a_gamma_deeper_than_what_was_drafted_is_left_out():
    assert {row.gamma for row in pays(COSTS, [0.5])} == {1}


def test_a_run_shows_the_table_where_it_has_times_and_acceptance(tmp_path):
    acceptance = {f"spec/acceptance_rate/depth_{k}": 0.5 for k in (1, 2, 3)}
    times = {f"spec/step_seconds/batch_{b}/gamma_{g}": s / 1000 for (b, g), s in COSTS.items()}
    run = recorded(tmp_path / "both", acceptance | times)
    assert len(run_pays(run)) == 4
    text = pays_table(run)
    assert "does not pay" in text and "never" in text
    for part in (acceptance, times):
        assert pays_table(recorded(tmp_path / str(len(part)), part)) == ""
