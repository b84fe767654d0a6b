"""Analysis of recorded runs with a known truth."""

import json

import numpy as np
import pytest

from rlpipe.diagnosis.analysis import analyse
from rlpipe.diagnosis.fixed_contexts import decompose_fixed
from rlpipe.metrics.rollouts import step_file
from rlpipe.metrics.runs import load_run
from tests.helpers.recorded_runs import recorder, tables_of

pytestmark = pytest.mark.unit


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
        assert last.slope.interval.covers(-0.2)
        assert last.entropy.value == pytest.approx(-0.2 * entropy, abs=0.01)
        assert last.mismatch.value == pytest.approx(mismatch, abs=0.01)
        assert abs(last.entropy.value + last.mismatch.value - last.total.value) < 1e-9


def test_a_run_without_probes_or_rollouts_is_analysed_all_the_same(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"training/global_step": 1}\n')
    found = analyse(load_run(tmp_path))
    assert found["split"] == found["fixed_contexts"] == found["length"] == {}
