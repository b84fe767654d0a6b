"""What an evaluation says: figures, paired changes, metrics that are declared, a file that keeps it."""

import json

import pytest

from rlpipe.adapt.estimates import PromptCounts
from rlpipe.adapt.evaluation import DomainEvaluation, Evaluation, ModeCounts
from rlpipe.adapt.run import evaluations, remove_evaluations, write_results
from rlpipe.config.run import Config
from rlpipe.metrics.bus import MetricsBus
from rlpipe.types import SpecCounts

pytestmark = pytest.mark.unit


def made(step, accepted):
    """One domain, two prompts with four verify steps each at gamma 2."""
    counts = {
        f"p{i}": PromptCounts(
            spec=SpecCounts(drafted=[4, n], accepted=[n, n], verify_steps=4, proposed=8), emitted=4 + 2 * n
        )
        for i, n in enumerate(accepted)
    }
    played = {"rejection": ModeCounts(counts=counts, tokens=100, seconds=0.5)}
    forced = {"alpha": [0.5, 0.25], "predicted": 2.0}
    domain = DomainEvaluation(in_domain=True, by_mode=played, teacher_forced=forced)
    return Evaluation(step=step, gamma=2, temperature=1.0, domains={"swe.held": domain})


def test_every_metric_is_declared_and_is_a_ratio_of_sums():
    with MetricsBus([]) as bus:
        bus.emit(0, made(0, [1, 3]).metrics())
        record = bus.commit(0)
    assert record["adapt/swe.held/rejection/acceptance_rate"] == 0.5
    assert record["adapt/swe.held/rejection/acceptance_rate/depth_2"] == 1.0
    assert record["adapt/swe.held/rejection/tokens_per_s"] == 200
    assert record["adapt/swe.held/alpha/depth_2"] == 0.25
    assert record["adapt/swe.held/rejection/acceptance_rate_se"] > 0


def test_an_evaluation_survives_its_file(tmp_path):
    one = made(3, [2, 4])
    one.write(tmp_path / "deep" / "step_3.json")
    assert Evaluation.read(tmp_path / "deep" / "step_3.json") == one


def test_results_pair_later_evaluations_with_the_first(tmp_path):
    made(0, [1, 2]).write(evaluations(tmp_path) / "step_0.json")
    made(10, [2, 3]).write(evaluations(tmp_path) / "step_10.json")
    write_results(Config(), tmp_path)
    text = (tmp_path / "results.json").read_text()
    found = json.loads(text)["evaluations"]
    assert list(found) == ["0", "10"]
    value, error, change, change_error = found["10"]["swe.held"]["rejection"]["acceptance_rate"]
    assert (value, change, change_error) == (0.625, 0.25, 0.0) and error > 0
    assert len(found["0"]["swe.held"]["rejection"]["acceptance_rate"]) == 2


def test_evaluations_that_no_checkpoint_covers_are_forgotten(tmp_path):
    for step in (0, 5, 10):
        made(step, [1]).write(evaluations(tmp_path) / f"step_{step}.json")
    remove_evaluations(tmp_path, 5)
    assert sorted(f.stem for f in evaluations(tmp_path).iterdir()) == ["step_0", "step_5"]
    remove_evaluations(tmp_path, None)
    assert list(evaluations(tmp_path).iterdir()) == []
