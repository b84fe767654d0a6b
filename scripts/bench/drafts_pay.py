"""Do drafts pay on a real model, at which batch and temperature, and what acceptance would each batch need?

    python scripts/bench/drafts_pay.py --model DIR --json OUT [--draft-vocab FILE] [--gammas 1 2 3]

Measures tokens a second with drafts (each gamma, and adaptive up to the largest) over no drafts, with the
embedded engine. Arms run in separate processes and take turns within a repeat (`rollout_speed`); a ratio is
the median over repeats of the ratio within a repeat, with its 95% interval. Only tokens generated while the
batch is full count (`harness.full_batch_rate`): with drafts, rows end at different times, so the last rows of
a run would decode in a batch that is nearly empty, as no rollout with a queue does.

Also reports the acceptance at which a gamma breaks even, from the costs that the adaptive arm measured at its
start (`break_even_acceptance`), and the measured acceptance by depth.
"""

from __future__ import annotations

import asyncio
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from adaptive_gamma import median_interval  # noqa: E402
from generation_speed import chat_workload  # noqa: E402
from harness import (  # noqa: E402
    ArmProcess,
    Span,
    bench_parser,
    full_batch_rate,
    load_average,
    paired_ratio,
    provenance,
    write_result,
)
from rollout_speed import (  # noqa: E402
    EngineArm,
    Workload,
    decode_in_turns,
    prepare_process,
    summary,
    total,
)

from rlpipe.config.openmp import spin_briefly  # noqa: E402
from rlpipe.config.spec import SpecConfig, SpecMode  # noqa: E402
from rlpipe.spec.gamma import break_even_acceptance  # noqa: E402
from rlpipe.types import SpecCounts  # noqa: E402


class FullBatchArm(EngineArm):
    """The embedded engine with a queue of requests; its speed is that of a full batch.

    A run without work returns the costs that the engine measured at its start, if adaptive.
    """

    def run(self, work: Workload | None, batch: int) -> Any:
        """Return tokens per second and each request's counts; without work, seconds by (batch, gamma)."""
        return self.costs if work is None else asyncio.run(self._decode(work, batch))

    async def _decode(self, work: Workload, batch: int) -> tuple[float, list[SpecCounts]]:
        self._runs += 1
        started = time.perf_counter()

        async def one(number: int, prompt: list[int]) -> tuple[float, int, SpecCounts]:
            result = await self._engine.generate(self.request(work, number, 0, prompt))
            return time.perf_counter(), len(result.output_ids), result.spec

        prompts = [turns[0] for turns in work.conversations]
        done = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))

        # All requests wait in the engine, which takes the oldest one when a row is free.
        starts = [started] * batch + sorted(end for end, _, _ in done)
        spans = [Span(start, end, tokens) for start, (end, tokens, _) in zip(starts, done, strict=False)]
        return full_batch_rate(spans, batch), [counts for _, _, counts in done]


def main() -> int:
    """Run all cells, print and write the result; return the exit status."""
    parser = bench_parser(__doc__, repeats=6)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4, help="requests per row and repeat")
    parser.add_argument("--gammas", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.7, 0.0])
    parser.add_argument("--draft-vocab", default="", help="as spec.draft_vocab")
    args = parser.parse_args()

    spin_briefly()
    load, results, needed = load_average(), {}, {}
    for batch in args.batches:
        vocab = {"draft_vocab": args.draft_vocab}
        # Arms run in this order or in reverse, so these two, whose ratio matters most, are beside each other.
        specs = {"none": SpecConfig(mode=SpecMode.NONE)}
        specs["adaptive"] = SpecConfig(gamma=max(args.gammas), adaptive=True, **vocab)
        specs |= {f"gamma {gamma}": SpecConfig(gamma=gamma, **vocab) for gamma in args.gammas}
        running = {
            name: ArmProcess(
                make := partial(FullBatchArm, args.model, spec, batch, args.threads, args.dtype),
                prepare=partial(prepare_process, make, args.threads),
            )
            for name, spec in specs.items()
        }
        costs = running["adaptive"].run(None, batch)
        needed |= {
            f"batch {rows}, gamma {gamma}": value
            for (rows, gamma), value in break_even_acceptance(costs).items()
            if rows == batch
        }
        print(f"batch {batch}, acceptance needed: {needed}", flush=True)

        for temperature in args.temperatures:
            work = chat_workload(
                args.model, max(batch, 2) * args.rounds, tokens=args.tokens, temperature=temperature
            )
            speeds, counts = decode_in_turns(running, work, batch, args.repeats)
            rows = {arm: summary(speeds[arm], total(counts[arm])) for arm in specs}
            ratios = {arm: round(paired_ratio(speeds[arm], speeds["none"]), 3) for arm in specs}
            paired = [a / b for a, b in zip(speeds["adaptive"], speeds["none"], strict=True)]
            interval = median_interval(paired)
            best = max(ratios[arm] for arm in specs if arm != "adaptive")
            results[f"T={temperature}, batch {batch}"] = {
                "arms": rows,
                "over none": ratios,
                "adaptive over none, 95% interval": interval,
                "adaptive over best": round(ratios["adaptive"] / best, 3),
            }
            print(f"T={temperature}, batch {batch}: {ratios} {interval}", flush=True)
        for arm in running.values():
            arm.close()

    report = {
        "question": "tokens per second with drafts over none on a real model, and the acceptance they need",
        **provenance(args, load, packages=("torch",)),
        "break_even_acceptance": needed,
        "results": results,
    }
    write_result(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
