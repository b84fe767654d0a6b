"""How many reports per second does the metrics bus take on one core, and how long does a report page take?

A report is one `emit` of one value, from one thread, with a JSONL file, a trace and an events file attached;
a step is committed after every 1,000 reports. The goal is 100,000 reports a second. The same run has other
arms: a dict of 40 values per emit (as an actor sends), a distribution per emit, and the dict without the bus
(the baseline, which only merges values). Seconds are CPU seconds of the emitting thread.

The report page is made for a synthetic run of 1,000 steps with 4,000 recorded trajectories. The goals are 20
s and 10 MB.

    python scripts/bench/metrics_bus.py --json OUT [--reports 50000] [--repeats 5]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import bench_parser, load_average, provenance, write_result

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rlpipe.metrics.bus import MetricsBus  # noqa: E402
from rlpipe.metrics.distributions import Histogram, Sketch  # noqa: E402
from rlpipe.metrics.jsonl import MetricsFile  # noqa: E402
from rlpipe.metrics.trace import TraceFile  # noqa: E402
from rlpipe.metrics.values import Mean, Ratio, Sum, Value, reduce, stats  # noqa: E402
from rlpipe.report.write import write_report  # noqa: E402
from tests.helpers.long_run import make_long_run  # noqa: E402

STEP_REPORTS = 1000
ONE: dict[str, Value] = {"actor/entropy": Mean(3.0, 2.0)}
DISTRIBUTION: dict[str, Value] = {
    "response_length/spread": Sketch.of(range(64)),
    "spec/num_accepted": Histogram((-0.5, 0.5, 1.5, 2.5, 3.5), [4, 3, 2, 1]),
}
MANY: dict[str, Value] = {
    **{f"rollout_corr/value_{n}": Mean(n, 2.0) for n in range(30)},
    **stats("num_turns", [1, 2, 6]),
    **stats("response_length", [1, 2, 6]),
    "spec/acceptance_rate": Ratio(3, 4),
    "env/masked": Sum(1),
    "env/groups": Sum(8),
    "spec/verify_steps": Sum(5),
}


def on_the_bus(values: dict[str, Value], emits: int) -> float:
    """Measure the CPU seconds of `emits` emissions and the commits between them."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory)
        sinks = [MetricsFile(run / "metrics.jsonl"), TraceFile(run / "trace.json.gz")]
        with MetricsBus(sinks, events=run / "events.jsonl") as bus:
            started = time.thread_time()
            for n in range(emits):
                bus.emit(n // STEP_REPORTS, values)
                if n % STEP_REPORTS == STEP_REPORTS - 1:
                    bus.commit(n // STEP_REPORTS)
            return time.thread_time() - started


def merged_alone(values: dict[str, Value], emits: int) -> float:
    """Measure the CPU seconds of merging the same values without a bus."""
    whole: dict[str, Value] = {}
    started = time.thread_time()
    for _ in range(emits):
        whole = reduce((whole, values))
    return time.thread_time() - started


def measured(work: Callable[[dict[str, Value], int], float], values: dict, emits: int, repeats: int) -> dict:
    """Return median and spread of emissions and values a second; the first repeat warms up."""
    rates = [emits / work(values, emits) for _ in range(repeats + 1)][1:]
    return {
        "emits_per_s": round(statistics.median(rates)),
        "min": round(min(rates)),
        "max": round(max(rates)),
        "values_per_s": round(statistics.median(rates) * len(values)),
    }


def page(repeats: int) -> dict:
    """Measure seconds and bytes of the report of a long run."""
    with tempfile.TemporaryDirectory() as directory:
        run = make_long_run(Path(directory) / "run")
        seconds = []
        for _ in range(repeats):
            started = time.monotonic()
            write_report([run], run / "report.html")
            seconds.append(time.monotonic() - started)
        size = (run / "report.html").stat().st_size
    return {"steps": 1000, "trajectories": 4000, "seconds": [round(s, 2) for s in seconds], "bytes": size}


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--reports", type=int, default=50_000)
    given, load = parser.parse_args(), load_average()
    few = given.reports // 20
    result = {
        **provenance(given, load, packages=("plotly",)),
        "reports": given.reports,
        "repeats": given.repeats,
        "one value per emit": measured(on_the_bus, ONE, given.reports, given.repeats),
        "40 values per emit": measured(on_the_bus, MANY, few, given.repeats),
        "sketch and histogram per emit": measured(on_the_bus, DISTRIBUTION, few, given.repeats),
        "baseline: one value merged without a bus": measured(merged_alone, ONE, given.reports, given.repeats),
        "report page": page(3),
    }
    write_result(given.json, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
