"""Planted speeds come out as planted: the harness of the benches on a clock that the test moves."""

import importlib
import importlib.util
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.unit
FILE = Path(__file__).resolve().parents[3] / "scripts" / "bench" / "harness.py"


def load():
    spec = importlib.util.spec_from_file_location("bench_harness", FILE)
    module = sys.modules["bench_harness"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


harness = load()


class Machine:
    """A clock that arms move: each takes its seconds, times the slowness of the machine at that moment."""

    def __init__(self, slowness=lambda now: 1.0):
        self.now, self.order, self._slowness = 0.0, [], slowness

    def arm(self, name, seconds, work=None):
        def run():
            self.order.append(name)
            self.now += seconds * self._slowness(self.now)
            return work

        return run

    def clock(self):
        return self.now


def test_planted_speeds_come_out_as_planted():
    machine = Machine()
    arms = {"ours": machine.arm("ours", 0.5, work=100), "theirs": machine.arm("theirs", 2.0, work=100)}
    samples = harness.take_turns(arms, 5, clock=machine.clock)
    assert samples.rates("ours") == pytest.approx([200] * 5)
    assert samples.rates("theirs") == pytest.approx([50] * 5)
    assert samples.ratio("theirs", "ours") == pytest.approx(4)
    assert samples.ratios([("theirs", "ours"), ("theirs", "not run")]) == {"theirs / ours": 4.0}


def test_a_machine_that_slows_down_by_half_moves_the_ratio_by_a_hundredth_at_most():
    machine = Machine(slowness=lambda now: 1 + now / 60)
    arms = {"ours": machine.arm("ours", 0.5), "theirs": machine.arm("theirs", 1.0)}
    samples = harness.take_turns(arms, 20, clock=machine.clock)
    assert samples.seconds["ours"][-1] > 1.4 * samples.seconds["ours"][0]
    assert samples.ratio("theirs", "ours") == pytest.approx(2, rel=0.01)
    # The same arms one after the other, as they must not run, tell another story.
    machine = Machine(slowness=lambda now: 1 + now / 60)
    alone = [
        harness.take_turns({"arm": machine.arm("arm", s)}, 20, clock=machine.clock).seconds["arm"]
        for s in (0.5, 1.0)
    ]
    assert harness.paired_ratio(alone[1], alone[0]) > 2.2


def test_a_disturbance_of_some_rounds_does_not_move_the_ratio():
    machine = Machine(slowness=lambda now: 5.0 if 4 < now < 12 else 1.0)
    arms = {"ours": machine.arm("ours", 0.5), "theirs": machine.arm("theirs", 1.0)}
    assert harness.take_turns(arms, 9, clock=machine.clock).ratio("theirs", "ours") == pytest.approx(2)


def test_arms_that_do_unequal_work_are_compared_by_their_rates():
    machine = Machine()
    arms = {"ours": machine.arm("ours", 1.0, work=300), "theirs": machine.arm("theirs", 0.5, work=50)}
    assert harness.take_turns(arms, 3, clock=machine.clock).ratio("theirs", "ours") == pytest.approx(3)


def test_the_warm_up_is_not_counted_and_the_order_is_reversed_every_other_round():
    machine = Machine(slowness=lambda now: 100.0 if now < 1 else 1.0)
    arms = {name: machine.arm(name, 1.0) for name in ("a", "b")}
    samples = harness.take_turns(arms, 2, warm_up=1, clock=machine.clock)
    assert samples.seconds == {"a": [1.0, 1.0], "b": [1.0, 1.0]}
    assert machine.order == ["b", "a", "a", "b", "b", "a"]


@pytest.mark.parametrize(("repeats", "seconds"), [(0, 1.0), (3, 0.0)])
def test_no_speed_is_made_up(repeats, seconds):
    machine = Machine()
    with pytest.raises(ValueError, match=r"repeats|took 0\.0 s"):
        harness.take_turns({"arm": machine.arm("arm", seconds)}, repeats, clock=machine.clock)


def served(batch, count, speed, rng=None):
    """Requests of a planted server: `batch` at once, each at `speed` tokens/s; of 100 tokens without rng."""
    free, spans = [0.0] * batch, []
    for _ in range(count):
        tokens = 100 if rng is None else int(rng.integers(50, 150))
        free.sort()
        start = free[0]
        free[0] = start + tokens / speed
        spans.append(harness.Span(start, free[0], tokens))
    return spans


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_a_full_batch_has_the_rate_that_was_planted(batch):
    for rng in (None, np.random.default_rng(0)):
        rate = harness.full_batch_rate(served(batch, 4 * batch, 25.0, rng), batch)
        assert rate == pytest.approx(25.0 * batch), rng


def test_requests_that_all_run_at_once_have_no_rate_of_a_smaller_batch():
    # 32 requests on a server of 64 rows: they end together, and once read as 31 million tokens/s at batch 8.
    together = [harness.Span(0.0, 4.0 + i * 1e-6, 200) for i in range(32)]
    with pytest.raises(ValueError, match="more than 8 requests ran at once"):
        harness.full_batch_rate(together, 8)


def test_too_few_requests_have_no_rate():
    with pytest.raises(ValueError, match="queue twice as many"):
        harness.full_batch_rate(served(8, 12, 25.0), 8)


def test_calls_fill_the_budget():
    machine = Machine()
    calls = harness.calls_for(machine.arm("arm", 0.01), 0.25, clock=machine.clock)
    assert calls == 25
    arm = harness.repeated(machine.arm("arm", 0.01), calls)
    assert harness.take_turns({"arm": arm}, 1, clock=machine.clock).rates("arm") == pytest.approx([100])


class PollingArm:
    """Starts a program that writes a byte to a file every 10 ms; a run waits for ten more."""

    def __init__(self, file):
        self._file = file
        loop = "while :; do printf x >> $0; sleep 0.01; done"
        self._program = subprocess.Popen(["sh", "-c", loop, str(file)])

    def run(self):
        written = self._file.stat().st_size if self._file.exists() else 0
        while not self._file.exists() or self._file.stat().st_size < written + 10:
            time.sleep(0.01)

    def close(self):
        self._program.kill()


def test_an_arm_and_what_it_started_do_nothing_between_its_turns(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FILE.parent)
    arm = importlib.import_module("harness").ArmProcess(partial(PollingArm, tmp_path / "written"))
    try:
        arm.run()
        after = (tmp_path / "written").stat().st_size
        time.sleep(0.3)
        assert (tmp_path / "written").stat().st_size == after
        arm.run()
    finally:
        arm.close()
    assert (tmp_path / "written").stat().st_size >= after + 10
