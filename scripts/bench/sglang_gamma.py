"""Does an SGLang server with rlpipe's policy draft the best number of tokens at every batch size?

Gamma 0 to 3 and adaptive gamma (0 to 3) take turns on one CPU server, by rejection, so that no two processes
are compared; `forced_gamma.py` sets the arm of the server. The load is recorded and has long tails. Prompts
are held-out SWE instances, for which the draft was trained, and reasoning tasks, for which it was not. Answer
lengths are sampled once (log-normal, seeded, part of the result) and are exact, so every arm generates
equally many tokens. There are `batch` times --queued requests, of which at most `batch` run at once, so the
batch empties at the end. Cells of the two kinds of prompts alternate. The adaptive arm runs --learning times
in each cell before it is measured there, and at the largest batch before everything else, so that no batch
size is new. A fixed gamma whose speed was below FAR times the best in its first run of a cell is not run
there again; the others repeat until a cell has taken --seconds. The goals for adaptive gamma: at least .95 of
the speed of the best fixed gamma in each cell (median over repeats of the ratio within a repeat, with its
interval), and faster than each fixed gamma over the full load.

With the shipped model a step costs the same for any number of drafts, so the deepest drafts always pay.
--grow gives the model the costs of a larger one (scripts/grow_checkpoint) without changing its outputs or
its acceptance.

    python scripts/bench/sglang_gamma.py --json OUT [--grow] [--seconds 30] [--batches 1 2 4 ...]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from adaptive_gamma import median_interval  # noqa: E402
from drafters import reasoning  # noqa: E402
from harness import Load as MachineLoad  # noqa: E402
from harness import bench_parser, load_average, paired_ratio, write_result  # noqa: E402
from rollout_speed import decoding_provenance, summary, swe_workloads, total  # noqa: E402

from rlpipe.config.paths import resolve  # noqa: E402
from rlpipe.config.rollout import RolloutConfig  # noqa: E402
from rlpipe.config.spec import SpecConfig  # noqa: E402
from rlpipe.rollout.sglang import SglangEngine, arguments  # noqa: E402
from rlpipe.spec import gamma  # noqa: E402
from rlpipe.types import GenerateRequest, SamplingParams, SpecCounts  # noqa: E402

GAMMA, SPREAD, SHORTEST, LONGEST = 3, 1.0, 8, 256
GROWN = "--hidden 256 --heads 4 --kv-heads 2 --head-dim 64 --intermediate 2048 --layers 8 --vocab 4000"
ARMS = {f"gamma {width}": str(width) for width in range(GAMMA + 1)} | {"adaptive": "a"}
DOMAINS = ["swe", "reasoning"]
FAR = 0.85  # share of the best fixed gamma's tokens per second
Load = list[tuple[list[int], int]]  # prompt, tokens to make


class Bench:
    """A server, and the file that sets how many tokens it drafts."""

    def __init__(self, model: Path, threads: int, folder: Path) -> None:
        self._order, self._names = folder / "order", count()
        self._order.write_text(ARMS["adaptive"])
        os.environ |= {"RLPIPE_BENCH_POLICY": gamma.__file__, "RLPIPE_BENCH_ORDER": str(self._order)}
        arguments.gamma = SimpleNamespace(__file__=str(ROOT / "scripts" / "bench" / "forced_gamma.py"))
        config = RolloutConfig(
            engine="sglang", max_running=64, max_context=768, device="cpu", threads=threads
        )
        self.engine = SglangEngine(config, SpecConfig(gamma=GAMMA, adaptive=True), model, log_dir=folder)

    def run(self, arm: str, load: Load, batch: int) -> tuple[float, SpecCounts]:
        """Run the load; return its seconds and the counts of drafts."""
        with self._order.open("r+") as file:  # in place: the server has it open
            file.write(ARMS[arm])
        started = time.perf_counter()
        counts = asyncio.run(self._play(load, batch))
        return time.perf_counter() - started, total(counts)

    async def _play(self, load: Load, batch: int) -> list[SpecCounts]:
        room = asyncio.Semaphore(batch)

        async def play(prompt: list[int], length: int) -> SpecCounts:
            sampling = SamplingParams(temperature=1.0, max_new_tokens=length)
            async with room:
                result = await self.engine.generate(
                    GenerateRequest(request_id=str(next(self._names)), prompt_ids=prompt, sampling=sampling)
                )
            assert len(result.output_ids) == length, "a request stopped early"
            return result.spec

        return await asyncio.gather(*(play(*one) for one in load))


def loads(args: argparse.Namespace) -> dict[tuple[str, int], Load]:
    """Return the requests by domain and batch, the same in every run."""
    model = args.model
    domains = dict(zip(DOMAINS, (swe_workloads(model)["fixed"], reasoning(model)), strict=True))
    found = {}
    for batch, name in product(args.batches, args.domains):
        rng = random.Random(f"{name} {batch}")
        prompts = [turns[0] for turns in domains[name].conversations]
        lengths = (rng.lognormvariate(0, SPREAD) * args.median for _ in range(max(8, args.queued * batch)))
        found[name, batch] = [
            (prompts[i % len(prompts)], round(min(max(length, SHORTEST), LONGEST)))
            for i, length in enumerate(lengths)
        ]
    return found


def grown(model: Path, sizes: str, target: Path) -> Path:
    """Write a float32 checkpoint that has the outputs of `model` and the cost of a larger model."""
    script = [sys.executable, ROOT / "scripts" / "grow_checkpoint", model, target, *sizes.split()]
    subprocess.run([*script, "--dtype", "float32"], check=True)
    return target


def measure(bench: Bench, load: Load, batch: int, args: Any) -> dict[str, Any]:
    """Measure one cell; return the rows of all arms, and adaptive gamma's ratio to the best fixed gamma."""
    tokens = sum(length for _, length in load)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    counts = {arm: SpecCounts() for arm in ARMS}
    for _ in range(args.learning):
        bench.run("adaptive", load, batch)
    names, running, began = list(ARMS), list(ARMS), time.perf_counter()
    for repeat in count():
        if repeat >= args.repeats and time.perf_counter() - began > args.seconds:
            break
        for arm in names[repeat % len(names) :] + names[: repeat % len(names)]:
            if arm in running:
                took, found = bench.run(arm, load, batch)
                seconds[arm].append(took)
                counts[arm].add(found)
        if not repeat:
            least = min(seconds[arm][0] for arm in names[:-1])
            running = [arm for arm in names if arm == "adaptive" or seconds[arm][0] * FAR <= least]
    speeds = {arm: [tokens / took for took in mine] for arm, mine in seconds.items()}
    rows = {arm: summary(speeds[arm], counts[arm]) for arm in ARMS}
    for arm in ARMS:
        rows[arm] |= {
            "seconds": round(statistics.median(seconds[arm]), 3),
            "drafts_per_step": round(counts[arm].proposed / max(counts[arm].verify_steps, 1), 2),
            "runs": len(seconds[arm]),
        }
    best = max(running[:-1], key=lambda arm: statistics.median(speeds[arm]))
    return {
        "lengths": [length for _, length in load],
        "arms": rows,
        "best": best,
        "adaptive / best": paired_ratio(speeds["adaptive"], speeds[best]),
        "adaptive / best, 95% interval": median_interval(
            [a / b for a, b in zip(speeds["adaptive"], speeds[best], strict=True)]
        ),
    }


def main() -> None:
    """Run the requested cells and write one JSON."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="at least, of each cell")
    parser.add_argument("--seconds", type=float, default=30, help="at least, of each cell")
    parser.add_argument("--learning", type=int, default=1, help="runs of adaptive before each cell")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--domains", nargs="+", choices=DOMAINS, default=DOMAINS)
    parser.add_argument("--model", type=Path, default=resolve("shipped:models/tiny"))
    parser.add_argument("--grow", nargs="?", const=GROWN, help=f"options of grow_checkpoint, or {GROWN}")
    parser.add_argument("--median", type=int, default=12, help="of the lengths, in tokens")
    parser.add_argument("--queued", type=int, default=2, help="requests, as a multiple of the batch")
    args = parser.parse_args()
    before, results = load_average(), {}
    with tempfile.TemporaryDirectory() as folder:
        model = grown(args.model, args.grow, Path(folder) / "model") if args.grow else args.model
        bench = Bench(model, args.threads, Path(folder))
        try:
            cells = loads(args)
            largest = max(args.batches)
            for _ in range(3):
                bench.run("adaptive", cells[args.domains[0], largest], largest)
            for (domain, batch), load in cells.items():
                cell = results[f"{domain}, batch {batch}"] = measure(bench, load, batch, args)
                speeds = {arm: row["tokens_per_s"] for arm, row in cell["arms"].items()}
                width = cell["arms"]["adaptive"]["drafts_per_step"]
                print(
                    f"{domain}, batch {batch}: adaptive / {cell['best']} {cell['adaptive / best']} "
                    f"{cell['adaptive / best, 95% interval']}, "
                    f"drafts a step {width}, tokens/s {speeds}",
                    flush=True,
                )
                write(args, before, results)  # after each cell, so that an interrupted run keeps its cells
        finally:
            bench.engine.close()


def write(args: argparse.Namespace, load: MachineLoad, results: dict[str, Any]) -> None:
    """Write the JSON of the cells measured so far. load: the machine's load before the run."""
    spent = {arm: sum(cell["arms"][arm]["seconds"] for cell in results.values()) for arm in ARMS}
    whole = {arm: round(took / spent["adaptive"], 3) for arm, took in spent.items() if arm != "adaptive"}
    print("adaptive / fixed over the load so far:", whole, flush=True)
    if args.json:
        report = {
            "question": "an SGLang server's adaptive drafts against each fixed gamma, by batch and domain",
            **decoding_provenance(args, load),
            "results": results,
            "adaptive / fixed over the whole load": whole,
        }
        report["config"] |= {"new_tokens": [SHORTEST, LONGEST], "grow": args.grow, "median": args.median}
        write_result(args.json, report)


if __name__ == "__main__":
    main()
