"""Fig. 9b's correlation: of planted pairs, and the committed one from the results it names."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from recipes.mtp_adapt import throughput

pytestmark = pytest.mark.unit


def test_the_committed_correlation_is_that_of_the_results_it_reads():
    file = Path(throughput.__file__).parent / "results/throughput.json"
    committed, found = json.loads(file.read_text()), throughput.pairs()
    assert committed["pairs"] == found and len(found) == len({pair["pair"] for pair in found}) == 9
    for name, some in {"r": found, "r, trained models": found[:-1]}.items():
        gains, speeds = ([pair[key] for pair in some] for key in ("gain", "speed"))
        assert committed[name][0] == pytest.approx(statistics.correlation(gains, speeds), abs=1e-3)


def test_the_interval_holds_the_true_correlation_of_samples_as_often_as_it_says():
    """400 samples of 12 pairs with r = .6: coverage within three standard errors of 95%."""
    rng, covered = np.random.default_rng(0), 0
    for _ in range(400):
        x = rng.normal(size=12)
        y = 0.6 * x + 0.8 * rng.normal(size=12)
        _, low, high = throughput.correlation(x, y)
        covered += low < 0.6 < high
    assert abs(covered / 400 - 0.95) < 3 * (0.95 * 0.05 / 400) ** 0.5
