"""What does it cost to move token columns from the engine to the trainer, now and at an earlier revision?

Each repeat of an arm is a separate process that imports one revision and moves trajectories along the path
of a training step: the engine's table -> results of turns -> trajectories -> groups pickled as for an object
store -> metrics of the step -> packed micro-batches. No model runs; the values are random.

`before`   the revision of --before, in a work tree
`after`    this checkout

Seconds are those of the path, without imports. Memory is the peak that the path adds to the resident size of
the process before it. It includes the micro-batches and the values in the table, which both arms share.

    python scripts/bench/token_columns.py --json OUT [--before 0740eb8] [--trajectories 512] [--repeats 5]
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from harness import (
    ROOT,
    Arm,
    bench_parser,
    git,
    load_average,
    paired_ratio,
    provenance,
    spread,
    take_turns,
    write_result,
)
from harness import table as as_table

GROUP = 8  # siblings of a prompt
PROMPT, TURNS, SAMPLED, TOOL = 512, 4, 768, 128  # tokens; SAMPLED and TOOL are per turn
LENGTH = PROMPT + TURNS * (SAMPLED + TOOL)  # 4096
BUDGET = 16384  # tokens of a micro-batch
PACKERS = ("rlpipe.trainer.packing", "rlpipe.batching.packing")  # where `pack` was, and where it is


def engine_table(rows: int) -> Any:
    """Return the table of an engine that retains its rows, so that a result can be read from any row."""
    import torch

    from rlpipe.rollout.embedded.rows import RowTable

    table = RowTable(
        SimpleNamespace(
            rows=rows,
            slots=LENGTH,
            cache=torch.zeros(1, 2, rows, 1, LENGTH, 1),
            device=torch.device("cpu"),
            depths=1,
            dtype=torch.float32,
            arch=SimpleNamespace(hidden=1),
        ),
        depth=0,
        streams=1,
    )
    table.release = lambda row: None
    return table


def play(count: int, scheduler: Any, table: Any, values: SimpleNamespace) -> list[Any]:
    """Return groups of trajectories; the engine answers their turns from its table."""
    from rlpipe.rollout.embedded.scheduler import Job
    from rlpipe.types import FinishReason, GenerateRequest, Group, Prompt, SamplingParams, Trajectory

    groups = [
        Group(prompt=Prompt(instance_id=str(n), group_id=str(n)), trajectories=[])
        for n in range(count // GROUP)
    ]
    for number in range(count):
        group = groups[number // GROUP]
        trajectory = Trajectory(
            trajectory_id=str(number),
            group_id=group.prompt.group_id,
            instance_id=group.prompt.instance_id,
            prompt_length=PROMPT,
            reward=float(number % 2),
        )
        row, end = number % GROUP, PROMPT
        # Siblings share the prompt of the first of their group.
        leader = number - row
        trajectory.append_context(values.tokens[leader, :PROMPT].tolist())

        for turn in range(TURNS):
            request = GenerateRequest(
                request_id=f"{number}/{turn}",
                prompt_ids=trajectory.token_ids[:],
                sampling=SamplingParams(max_new_tokens=SAMPLED),
            )
            start, end = end, end + SAMPLED
            place = row, slice(start, end)
            table.tokens[place] = values.tokens[number, start:end]
            table.logprobs[place] = values.logprobs[number, start:end]
            table.entropies[place] = values.entropies[number, start:end]
            table.versions[place] = turn
            table.total[row] = end
            scheduler._finish(Job(request, trajectory.append_sampled), row, FinishReason.LENGTH)

            trajectory.append_context(values.tokens[number, end : end + TOOL].tolist())
            end += TOOL
        group.trajectories.append(trajectory)
    return groups


def store(group: Any) -> tuple[bytes, list[bytes]]:
    """Return a group as Ray stores it: a pickle, and the bytes of its arrays, which are read in place."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(group, protocol=5, buffer_callback=buffers.append)
    return data, [bytes(buffer.raw()) for buffer in buffers]


def go_the_way(count: int, scheduler: Any, table: Any, values: SimpleNamespace) -> Any:
    """Carry trajectories from the engine's table to micro-batches and return the micro-batches."""
    from rlpipe.metrics.collect import trajectory_metrics

    stored = [store(group) for group in play(count, scheduler, table, values)]
    groups = [pickle.loads(data, buffers=buffers) for data, buffers in stored]
    trajectory_metrics(groups, TURNS)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    packers = (importlib.import_module(name) for name in PACKERS if importlib.util.find_spec(name))
    return next(packers).pack(trajectories, [values.advantages] * count, BUDGET)


def resident(field: str) -> int:
    """Return the size of this process in bytes, now (VmRSS) or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def measure_arm(count: int) -> dict[str, float]:
    """Return seconds and bytes of one pass, after a small warm-up pass."""
    import rlpipe.types
    from rlpipe.rollout.embedded.scheduler import Scheduler

    # An installed checkout must not be imported instead of the revision.
    assert Path(rlpipe.types.__file__).is_relative_to(Path.cwd()), rlpipe.types.__file__

    rng = np.random.default_rng(0)
    values = SimpleNamespace(
        tokens=rng.integers(0, 150_000, (count, LENGTH), np.int64),
        logprobs=-rng.random((count, LENGTH), np.float32),
        entropies=rng.random((count, LENGTH), np.float32),
        advantages=np.ones(LENGTH, np.float32),
    )
    table = engine_table(GROUP)
    options = {"depth": 0, "drafts": 0, "streams": 1, "max_context": LENGTH, "prefill_tokens": LENGTH}
    scheduler = Scheduler(table, None, None, **options)
    go_the_way(GROUP, scheduler, table, values)

    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to what is resident now
    before, started = resident("VmRSS"), time.perf_counter()
    batch = go_the_way(count, scheduler, table, values)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "bytes": resident("VmHWM") - before, "tokens": batch.tokens}


def run_arm(tree: Path, count: int) -> dict[str, float]:
    """Measure a revision in a separate process."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--arm", "--trajectories", str(count)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure both arms in turns and write one JSON."""
    parser = bench_parser(__doc__)
    parser.add_argument("--before", default="0740eb8", metavar="REV")
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--arm", action="store_true", help="measure the revision on PYTHONPATH, once")
    args, load = parser.parse_args(), load_average()
    if args.arm:
        print(json.dumps(measure_arm(args.trajectories)))
        return

    measured: dict[str, list[dict[str, float]]] = {"before": [], "after": []}

    def arm(name: str, tree: Path) -> Arm:
        return lambda: measured[name].append(run_arm(tree, args.trajectories))

    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        git("worktree", "add", "--detach", str(tree), args.before)
        try:
            take_turns({"before": arm("before", tree), "after": arm("after", ROOT)}, args.repeats, warm_up=0)
        finally:
            git("worktree", "remove", "--force", str(tree))

    columns = {
        name: {unit: [run[unit] for run in runs] for unit in ("seconds", "bytes")}
        for name, runs in measured.items()
    }
    results = {
        name: {"s": spread(column["seconds"], digits=2), "mb": spread([b / 1e6 for b in column["bytes"]])}
        for name, column in columns.items()
    }
    ratios = {
        unit: round(paired_ratio(columns["after"][unit], columns["before"][unit]), 3)
        for unit in ("seconds", "bytes")
    }
    print(as_table({name: {u: v["median"] for u, v in row.items()} for name, row in results.items()}))
    print(f"after / before: {ratios}")
    report = {
        **provenance(args, load, packages=("torch", "numpy")),
        "before": git("rev-parse", args.before),
        "tokens": args.trajectories * LENGTH,
        "results": results,
        "after / before": ratios,
    }
    write_result(args.json, report)


if __name__ == "__main__":
    main()
