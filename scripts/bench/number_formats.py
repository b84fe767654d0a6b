"""How much slower is a product in bfloat16 than in float32 on this CPU?

`rlpipe.config.number_format` chooses the format of the recipes for CPUs by the answer. The weights have the
shape of SmolLM2's largest layers, are read from memory in turns, as in a model, and multiplied by the kernels
of the embedded engine and, for bfloat16, also by those of a trainer. A decode step multiplies as many rows as
answers run, a training step hundreds.

    python scripts/bench/number_formats.py --json OUT [--rows 1 4 8 64 512] [--repeats 9]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from harness import bench_parser, load_average, provenance, table, take_turns, write_result

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlpipe.config.machine import cpu_has_fast_bfloat16
from rlpipe.rollout.embedded.linear import Linear

FORMATS = {
    "float32": (torch.float32, Linear),
    "bfloat16": (torch.bfloat16, Linear),
    "bfloat16_training": (torch.bfloat16, lambda weight: partial(torch.nn.functional.linear, weight=weight)),
}
INPUTS, OUTPUTS = 576, 1536
WEIGHTS = 64  # at most; with more bytes in either format than caches hold
WORK = 4096  # rows that one repeat multiplies at most; from 65 rows on this leaves fewer weights


def products(rows: int, dtype: torch.dtype, linear: Callable[..., Callable]) -> Callable[[], float]:
    """Return a function that multiplies random rows by one weight after another; it returns their number.

    linear: makes the function that multiplies by a weight.
    """
    x = torch.randn(rows, INPUTS).to(dtype)
    count = min(WEIGHTS, max(1, WORK // rows))
    layers = [linear(torch.randn(OUTPUTS, INPUTS).to(dtype)) for _ in range(count)]

    def multiply() -> float:
        for layer in layers:
            layer(x)
        return count * rows

    return multiply


def main() -> None:
    """Time the formats in turns, by number of rows, and write one JSON."""
    parser = bench_parser(__doc__, repeats=9)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 64, 512])
    args, load = parser.parse_args(), load_average()
    torch.set_num_threads(1)

    results = {}
    for rows in args.rows:
        arms = {name: products(rows, *made) for name, made in FORMATS.items()}
        samples = take_turns(arms, args.repeats, clock=time.process_time)
        per_row = {f"{name}_us": 1e6 / median(samples.rates(name)) for name in FORMATS}
        results[f"rows_{rows}"] = per_row | {
            "ratio": samples.ratio("bfloat16", "float32"),
            "training_ratio": samples.ratio("bfloat16_training", "float32"),
        }

    report = provenance(args, load) | {
        "chosen": "bfloat16" if cpu_has_fast_bfloat16() else "float32",
        "results": results,
    }
    print(table({name: {k: round(v, 2) for k, v in row.items()} for name, row in results.items()}))
    write_result(args.json, report)


if __name__ == "__main__":
    main()
