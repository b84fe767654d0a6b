"""PPOW's tables in worlds that are enumerated: sampled figures against enumeration."""

from __future__ import annotations

import pytest
import torch

from recipes.ppow import tables, windows
from recipes.ppow.tables import ANCHORS, DEPTHS, World

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def world():
    patch = pytest.MonkeyPatch()
    patch.setattr(tables, "START_STEPS", 10)
    yield World(5)
    patch.undo()


def test_one_candidate_accepts_what_enumeration_says_and_more_accept_more(world, monkeypatch):
    """n = 8 x 800 windows: five standard errors are .08."""
    monkeypatch.setattr(windows, "REPEATS", 800)
    found = [windows.candidates(world, world.start, count, seed=0) for count in (1, 2, 4)]
    assert found[0] == pytest.approx(world.accepted(world.start).item(), abs=0.08)
    assert found[0] + 0.1 < found[1] < found[2] - 0.05


def test_windows_by_inverse_cdf_accept_what_enumeration_says(world):
    uniforms = torch.rand(2, ANCHORS, 800, DEPTHS, generator=torch.Generator().manual_seed(1))
    accepted, nabla = windows.drafted(world, world.start, uniforms)
    assert accepted.mean().item() == pytest.approx(world.accepted(world.start).item(), abs=0.08)
    assert nabla.min() >= -1e-6

    # Easy windows of the start are those that its own draft has accepted in full.
    found = windows.hardness(world, {"start": world.start}, seed=1)["start"]
    assert found[0] == DEPTHS and found[2] < DEPTHS - 1


def test_adaw_prefers_anchors_with_large_scores_and_even_windows_none(world):
    def chosen(hard: float) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        found = [windows.choose(world, world.start, generator, hard) for _ in range(300)]
        return torch.cat(found).bincount(minlength=ANCHORS) / (300 * ANCHORS)

    even, hard = chosen(0.0), chosen(1.0)
    assert (even - 1 / ANCHORS).abs().max() < 0.04
    assert (hard - even).abs().max() > 0.03  # the deviation of a difference is .009


def test_only_windows_without_an_accepted_draft_earn_the_proximity_reward(world):
    def reward(proximity: float) -> float:
        generator = torch.Generator().manual_seed(2)
        steps = [windows.ppow_step(world, world.start, generator, proximity=proximity) for _ in range(10)]
        return sum(reward for _, reward, _ in steps) / 10

    assert 0.003 < reward(0.5) - reward(0.0) < 0.5

    greedy = windows.greedy_logprobs(world)
    every = world.logprobs(None, world.windows).gather(-1, world.windows[..., None])[..., 0]
    assert (greedy[:, 0] >= every[..., 0].amax(-1) - 1e-6).all()


def test_chains_behind_one_root_are_level_by_level():
    assert windows.chains(2).parents == (-1, 0, 0, 1, 2, 3, 4)
