"""The plugin's choice of widths on a played server: what it costs to learn, and that it pays."""

import importlib
import random
import sys

import numpy as np
import pytest

from rlpipe.config.cuda_graphs import captured_batches
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.rollout.sglang.arguments import start_seconds
from rlpipe.spec.gamma import AdaptiveGamma, rare_sizes
from tests.helpers.cli import ROOT

pytestmark = pytest.mark.unit
DEEPEST = 3
KNOWN, UNKNOWN = (0.98, 0.97, 0.98), (0.25, 0.22, 0.45)  # prompts the draft was trained for, or not: measured


@pytest.fixture
def width(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "sglang_env" / "plugin"))
    yield importlib.import_module("rlpipe_sglang.width")
    for name in [name for name in sys.modules if name.startswith("rlpipe_sglang")]:
        del sys.modules[name]


class Fixed:
    """A policy that never changes its mind."""

    def __init__(self, gamma):
        self._gamma = gamma

    def choose(self, _):
        return self._gamma

    def observe(self, *_):
        pass

    timed = measured = observe


class Server:
    """Steps that cost what those of a small model on two cores do, to within a noise of 5%."""

    def __init__(self, width, policy, seed=0):
        self.now, self._chance = 0.0, random.Random(seed)
        self._widths = width.Widths(DEEPEST, policy, self._clock)

    def _clock(self):
        return self.now

    def play(self, lengths, batch, acceptance):
        """Seconds that turns of these lengths take, so many at once."""
        began, waiting, running = self.now, list(lengths), []
        while waiting or running:
            if waiting and len(running) < batch:
                joining = [waiting.pop() for _ in range(min(batch - len(running), len(waiting)))]
                running += [length - 1 for length in joining]
                self.now += 0.02 + 0.02 * len(joining)
                self._widths.disturbed()
            count = len(running)
            width = self._widths.get_steps_for_batch(count)
            self.now += self._cost(count, width) * self._chance.lognormvariate(0, 0.05)
            kept = [self._accepted(width, acceptance) for _ in running]
            self._widths.on_verify_complete(kept, count)
            running = [left for left in (n - k - 1 for n, k in zip(running, kept, strict=True)) if left > 0]
        return self.now - began

    def _cost(self, count, width):
        return 0.015 * (1 + 0.25 * width) + 0.00065 * count * (1 + 0.75 * width)

    def _accepted(self, width, acceptance):
        kept = 0
        while kept < width and self._chance.random() < acceptance[kept]:
            kept += 1
        return kept


def seconds_by_cell(width, policy, seed):
    """Seconds of two runs of each cell, behind prompts of the other kind: [cell][run].

    Long tails, the same lengths for every policy. The server has met every batch size before.
    """
    server, seconds = Server(width, policy, seed), []
    for batch in (1, 2, 4, 8, 16, 32, 64):
        server.play([64] * batch, batch, KNOWN)
    for batch in (1, 8, 64):
        for acceptance in (UNKNOWN, KNOWN):
            chance = random.Random(batch)
            lengths = [min(256, 8 + round(chance.lognormvariate(2.5, 1))) for _ in range(max(16, 2 * batch))]
            seconds.append([server.play(lengths, batch, acceptance) for _ in range(2)])
    return np.array(seconds)


@pytest.fixture
def ratios(width):
    """How fast a policy's second runs are against the best fixed width, by cell, and the whole load."""

    def played(policy):
        return sum(seconds_by_cell(width, policy, seed) for seed in range(6))

    fixed = np.array([played(lambda _, gamma=gamma: Fixed(gamma)) for gamma in range(DEEPEST + 1)])
    assert len(set(fixed[..., 1].argmin(0))) > 1  # cells want different widths

    def of(policy):
        mine = played(policy)
        return (fixed[..., 1].min(0) / mine[:, 1]).min(), fixed.sum((1, 2)).min() / mine.sum()

    return of


def test_it_is_near_the_best_width_in_every_cell_and_above_each_over_the_whole_load(ratios):
    cell, whole = ratios(AdaptiveGamma)
    assert cell > 0.95 and whole > 1.05, (cell, whole)


def test_a_policy_that_learns_slowly_is_caught(ratios):
    """Power: what one prompt's drafts were worth must not rule the next one's."""
    for mistake in (
        {"SURPRISE": 1e9},
        {"SURPRISE": 1e9, "MEMORY": 65_536},
        {"RECENT": 2048},
        {"BUDGET": 1e-5},
    ):
        cell, whole = ratios(type("Mistaken", (AdaptiveGamma,), mistake))
        assert cell < 0.95 or whole < 1.05, (mistake, cell, whole)


def test_rare_widths_are_captured_at_few_sizes_that_leave_a_third_of_the_rows_empty_at_most(width):
    sizes = captured_batches(256, drafts=True)
    policy = width.Widths(DEEPEST, AdaptiveGamma, rare_sizes=rare_sizes)
    policy.set_cuda_graph_bs(sizes)
    captured = {step: policy.cuda_graph_bs_for_step(step) for step in policy.candidate_steps}
    assert captured[DEEPEST] == sizes and len(sizes) == 51
    for step in range(DEEPEST):
        few = captured[step]
        assert len(few) == 16 and few[-1] == 256
        for batch in range(1, 257):
            padded = min(size for size in few if size >= batch)
            assert padded - batch <= padded / 3
    policy.set_cuda_graph_bs(None)
    assert policy.cuda_graph_bs_for_step(0) is None


def test_a_start_waits_for_the_graphs_of_all_widths():
    config, adaptive = RolloutConfig(max_running=256), SpecConfig(gamma=DEEPEST, adaptive=True)
    config.sglang.start_timeout = 300.0
    assert start_seconds(config, adaptive, on_gpu=True) == 300 + 0.5 * 4 * DEEPEST * 16
    assert start_seconds(config, adaptive, on_gpu=False) == 300
    assert start_seconds(config, SpecConfig(gamma=DEEPEST), on_gpu=True) == 300
