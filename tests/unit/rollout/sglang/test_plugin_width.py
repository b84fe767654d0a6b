"""The plugin's choice of widths on a played server: what it costs to learn, and that it pays."""

import importlib
import random
import sys

import pytest

from rlpipe.spec.gamma import AdaptiveGamma
from tests.helpers.cli import ROOT

pytestmark = pytest.mark.unit
DEEPEST = 3
KNOWN, UNKNOWN = (
    (0.93, 0.92, 0.9),
    (0.45, 0.5, 0.5),
)  # acceptance of prompts the draft was trained for, or not


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

    def __init__(self, width, policy):
        self.now, self._chance, self._widths = (
            0.0,
            random.Random(0),
            width.Widths(DEEPEST, policy, self._clock),
        )

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
        return 0.025 * (1.25 + 0.25 * width) + 0.0008 * count * (1.15 + 1.4 * width)

    def _accepted(self, width, acceptance):
        kept = 0
        while kept < width and self._chance.random() < acceptance[kept]:
            kept += 1
        return kept


def seconds_by_cell(width, policy):
    """The load of all cells, each after two runs of itself; long tails, the same lengths for every policy."""
    server, seconds = Server(width, policy), []
    for batch in (1, 8, 64):
        for acceptance in (KNOWN, UNKNOWN):
            chance = random.Random(batch)
            lengths = [min(256, 8 + round(chance.lognormvariate(3.3, 1))) for _ in range(max(24, 3 * batch))]
            runs = [server.play(lengths, batch, acceptance) for _ in range(5)]
            seconds.append(sum(runs[2:]))
    return seconds


def test_it_is_near_the_best_width_in_every_cell_and_above_each_over_the_whole_load(width):
    adaptive = seconds_by_cell(width, AdaptiveGamma)
    fixed = [seconds_by_cell(width, lambda _, g=gamma: Fixed(g)) for gamma in range(DEEPEST + 1)]
    ratios = [min(rows) / mine for *rows, mine in zip(*fixed, adaptive, strict=True)]
    print("best fixed / adaptive by cell", [round(ratio, 3) for ratio in ratios])
    best = {min(range(DEEPEST + 1), key=lambda g: fixed[g][cell]) for cell in range(len(adaptive))}
    assert len(best) > 2  # the cells want different widths
    assert min(ratios) > 0.95 and sum(adaptive) < min(map(sum, fixed))


def test_a_slow_memory_is_caught(width):
    """Power: what one prompt's drafts were worth must not rule the next one's."""

    class Slow(AdaptiveGamma):
        MEMORY = 65_536

    adaptive, slow = seconds_by_cell(width, AdaptiveGamma), seconds_by_cell(width, Slow)
    assert sum(slow) > 1.02 * sum(adaptive)
