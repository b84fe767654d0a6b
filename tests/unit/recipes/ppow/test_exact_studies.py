"""The studies of the exact gradient: arms in a world that is enumerated, and figures of planted cells."""

from __future__ import annotations

import pytest
import torch

from recipes.ppow import exact, tables

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def world():
    patch = pytest.MonkeyPatch()
    patch.setattr(tables, "START_STEPS", 20)
    yield tables.World(3)
    patch.undo()


@pytest.mark.parametrize(("arm", "low", "high"), [("exact_window", 0.97, 1), ("ppow", 0.3, 0.95)])
def test_only_the_exact_arm_follows_the_gradient_of_the_expected_acceptance(world, arm, low, high):
    """Cosine of the mean over 100 steps' samples with the gradient by enumeration."""
    weights, generator = world.start.clone().requires_grad_(), torch.Generator().manual_seed(0)
    (wanted,) = torch.autograd.grad(world.accepted(weights), weights)
    found = torch.zeros_like(wanted)
    for _ in range(100):
        found -= torch.autograd.grad(tables.ARMS[arm](world, weights, generator), weights)[0]
    assert low < torch.cosine_similarity(found.flatten(), wanted.flatten(), dim=0) < high


def test_arms_are_compared_at_equal_seeds_and_an_edge_rate_is_said():
    cells = {
        arm: [{"held_out": base + seed + shift * seed, "seconds": 2.0} for seed in range(3)]
        for arm, base, shift in (("exact_window", 0.5, 0.0), ("e2e_tv", 0.25, 0.0), ("ppow", 0.0, 0.1))
    }
    table = exact.summary(cells, start=0.0)
    assert table["exact_window"]["minus e2e_tv"] == [0.25, 0.25, 0.25]  # whatever the seeds have in common
    value, low, high = table["exact_window"]["minus ppow"]
    assert value == pytest.approx(0.4) and low < 0.4 < high

    rates = {"lr": dict.fromkeys(cells, 1e-3), "edge": {"exact_window": True, "e2e_tv": False, "ppow": False}}
    lines = exact.markdown({"start": 0.0, "table": table} | rates).splitlines()
    assert lines[2].startswith("| exact_window | 0.001 (edge) | 1.500 | +0.250 [+0.250, +0.250] |")
    assert lines[3].startswith("| e2e_tv | 0.001 | 1.250") and lines[-1].startswith("| start | | 0.000")
