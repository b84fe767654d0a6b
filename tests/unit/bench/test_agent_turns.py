"""The bench of agents' turns finds the speeds and the idle time that are planted in its workers."""

import gzip
import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
FOLDER = Path(__file__).resolve().parents[3] / "scripts" / "bench"


@pytest.fixture(scope="module")
def bench():
    path, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    spec = importlib.util.spec_from_file_location("bench_agent_turns", FOLDER / "agent_turns.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name == "harness":
            del sys.modules[name]


class Planted:
    """A worker that takes planted seconds on the test's clock, and is busy for a planted part of them."""

    def __init__(self, clock, seconds, busy):
        self._clock, self._seconds, self._busy, self.played = clock, seconds, busy, []

    def run(self, waits):
        self._clock[0] += self._seconds
        self.played.append(waits)
        turns = sum(len(each) + 1 for each in waits)
        sums = {"cpu_seconds": 0.002 * turns, "prefill_tokens": 10.0 * turns}
        return sums | {"turns": turns, "busy_seconds": self._busy}


def test_planted_turns_and_idle_time_come_out_as_planted(bench):
    clock = [0.0]
    arms = {"recompute": [Planted(clock, 3.0, 3.0)], "parked": [Planted(clock, 2.0, 0.5)]}
    measured = bench.measure(arms, [[0.1, 0.2], [0.3]], 4, clock=lambda: clock[0])
    assert measured["parked / recompute"] == 1.5
    assert measured["arms"]["parked"] == {
        "turns_per_s": 2.5,
        "idle": 0.75,
        "cpu_ms_per_turn": 2,
        "prefill_tokens_per_turn": 10,
    }
    assert measured["arms"]["recompute"]["idle"] == 0
    assert len(arms["parked"][0].played) == 5  # one of them to warm up


def test_sessions_are_dealt_out_to_the_workers(bench):
    clock = [0.0]
    workers = [Planted(clock, 1.0, 1.0), Planted(clock, 0.0, 1.0)]
    bench.measure({"recompute": workers, "parked": workers}, [[1.0], [2.0], [3.0]], 1, clock=lambda: clock[0])
    assert (workers[0].played[0], workers[1].played[0]) == ([[1.0], [3.0]], [[2.0]])


def test_tool_times_are_the_seconds_between_the_turns_of_a_trace(bench, tmp_path):
    def turn(trajectory, start):
        where = {"trajectory": trajectory}
        return {"name": "generate", "ts": start * 1e6, "dur": 5e5, "args": where}

    events = [turn(name, 2 * n + n * n) for name in ("a", "eval/b") for n in range(8)]
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps([*events, turn("c", 0)]).encode()))
    assert bench.recorded(trace) == [[2.5, 4.5, 6.5, 8.5, 10.5, 12.5]]


def test_the_shipped_tool_times_are_a_full_record(bench):
    waits = json.loads(bench.TIMES.read_text())
    assert len(waits) == bench.RECORDED and {len(each) for each in waits} == {bench.WAITS}
    assert 0 < sum(map(sum, waits)) / (bench.RECORDED * bench.WAITS) < 10
