"""How many turns a second do agents get if more agents run than an engine has rows?

    python scripts/bench/agent_turns.py --json OUT [--workers 2] [--rows 8] [--sessions 8 24 48]

`recompute`  when another conversation needs its row, a conversation loses its keys (the behaviour until
             November 2026)
`parked`     the keys are stored on the host instead
`bounded`    as parked, and a session starts only when the engine can store its keys alongside the others'

Each worker is an embedded engine in its own process, with a random model of a million parameters and no
drafts. Sessions take turns of fixed length. Between two turns a session waits as long as a tool took in
`tool_times.json`, times --speed. The load is the same for all arms, and the arms alternate within a repeat.
The file of tool times holds the seconds between the turns of attempts at the main job, from the trace of a
run: `--record RUN/trace.json.gz` rewrites it.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from harness import (  # noqa: E402
    ArmProcess,
    Clock,
    bench_parser,
    load_average,
    provenance,
    table,
    take_turns,
    write_result,
)

from rlpipe.config.rollout import RolloutConfig  # noqa: E402
from rlpipe.config.spec import SpecConfig, SpecMode  # noqa: E402
from rlpipe.rollout.embedded import EmbeddedEngine  # noqa: E402
from rlpipe.rollout.kv_budget import KvBudget  # noqa: E402
from rlpipe.types import GenerateRequest, SamplingParams  # noqa: E402

TIMES = Path(__file__).with_name("tool_times.json")
VOCAB, OPENING, TURN, OBSERVATION = 512, 600, 24, 100  # tokens
WAITS, RECORDED = 6, 48  # of a session; sessions in the file
CONTEXT = OPENING + (WAITS + 1) * TURN + WAITS * OBSERVATION
Waits = list[list[float]]  # of each session, in seconds
ARMS = ("recompute", "parked", "bounded")


def recorded(trace: Path) -> Waits:
    """Return seconds between the turns of training attempts in a run's trace, sampled evenly over the run."""
    turns = defaultdict(list)
    for event in json.loads(gzip.decompress(trace.read_bytes())):
        if event.get("name") == "generate" and not event["args"]["trajectory"].startswith("eval/"):
            turns[event["args"]["trajectory"]].append((event["ts"], event["ts"] + event["dur"]))

    waits = [
        [round((later[0] - earlier[1]) / 1e6, 3) for earlier, later in pairwise(sorted(spans))][:WAITS]
        for spans in turns.values()
    ]
    long = [each for each in waits if len(each) == WAITS]
    return long[:: max(1, len(long) // RECORDED)][:RECORDED]


def write_model(path: Path) -> Path:
    """Write a random checkpoint of about a million parameters."""
    from tests.helpers.tiny_checkpoint import write_random_checkpoint

    sizes = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 384}
    return write_random_checkpoint(path, vocab=VOCAB, max_position=2048, scale=0.05, **sizes)


class Worker:
    """An engine and its sessions, in one of ARMS."""

    def __init__(self, model: Path, rows: int, arm: str) -> None:
        config = RolloutConfig(max_running=rows, max_context=CONTEXT + 1, threads=1, device="cpu")
        self._engine = EmbeddedEngine(config, SpecConfig(mode=SpecMode.NONE), model)
        if arm == "recompute":
            self._engine._table.max_parked_tokens = 0
        tokens = self._engine.stats().kv_tokens if arm == "bounded" else 0
        self._budget = KvBudget(rows=rows, tokens=tokens)
        self._names = count()

    def run(self, waits: Waits) -> dict[str, float]:
        """Run one session per list of waits, all at once; return sums."""
        before, started = self._engine.stats(), time.process_time()
        asyncio.run(self._play(waits))
        after = self._engine.stats()
        return {
            "turns": sum(len(each) + 1 for each in waits),
            "cpu_seconds": time.process_time() - started,
            "busy_seconds": after.busy_seconds - before.busy_seconds,
            "prefill_tokens": after.prefill_tokens - before.prefill_tokens,
        }

    async def _play(self, waits: Waits) -> None:
        await asyncio.gather(*(self._session(next(self._names), each) for each in waits))

    async def _session(self, number: int, waits: list[float]) -> None:
        drawn, session = random.Random(number), f"s{number}"
        ids = [drawn.randrange(2, VOCAB) for _ in range(OPENING)]
        async with self._budget.admit(1) as admitted:
            for turn, wait in enumerate([*waits, 0.0]):
                sampling = SamplingParams(max_new_tokens=TURN, seed=1000 * number + turn)
                result = await self._engine.generate(
                    GenerateRequest(
                        request_id=f"{session}/{turn}", prompt_ids=ids, sampling=sampling, session_id=session
                    )
                )
                ids += result.output_ids.tolist()
                admitted.tokens[session] = len(ids)
                ids += [drawn.randrange(2, VOCAB) for _ in range(OBSERVATION)]
                await asyncio.sleep(wait)
            self._engine.end_session(session)

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()


def measure(
    arms: Mapping[str, Sequence[Any]], waits: Waits, repeats: int, *, clock: Clock = time.perf_counter
) -> dict[str, Any]:
    """Run the sessions on the workers of each arm in turn, dealt out one by one.

    Returns for each arm, as medians over repeats: turns per second, the share of the time in which an engine
    is idle, CPU milliseconds per turn, prompt tokens per turn, and the ratio of turns per second to the arm
    before it.
    """
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in arms}

    def played(name: str) -> float:
        workers, started = arms[name], clock()
        with ThreadPoolExecutor(len(workers)) as pool:
            sums = list(
                pool.map(lambda item: item[1].run(waits[item[0] :: len(workers)]), list(enumerate(workers)))
            )
        seconds, turns = clock() - started, sum(each["turns"] for each in sums)
        rows[name].append(
            {
                "turns_per_s": turns / seconds,
                "idle": 1 - mean(each["busy_seconds"] for each in sums) / seconds,
                "cpu_ms_per_turn": 1000 * sum(each["cpu_seconds"] for each in sums) / turns,
                "prefill_tokens_per_turn": sum(each["prefill_tokens"] for each in sums) / turns,
            }
        )
        return turns

    samples = take_turns({name: partial(played, name) for name in arms}, repeats, clock=clock)
    counted = {name: each[-repeats:] for name, each in rows.items()}  # without the warm-up
    return {
        "arms": {
            name: {key: round(median(row[key] for row in each), 3) for key in each[0]}
            for name, each in counted.items()
        },
        **{f"{arm} / {before}": round(samples.ratio(before, arm), 2) for before, arm in pairwise(arms)},
    }


def main() -> int:
    """Measure, or record tool times; return the exit status."""
    parser = bench_parser(__doc__, repeats=3)
    parser.add_argument("--record", type=Path, metavar="TRACE", help="write the tool times of a run instead")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="of each engine")
    parser.add_argument("--sessions", type=int, nargs="+", default=[8, 24, 48], help="of each worker")
    parser.add_argument("--speed", type=float, default=0.25, help="factor of the recorded seconds")
    args, load = parser.parse_args(), load_average()
    if args.record:
        TIMES.write_text(json.dumps(recorded(args.record)) + "\n")
        return 0
    times = [[args.speed * wait for wait in each] for each in json.loads(TIMES.read_text())]

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        arms = {
            arm: [ArmProcess(partial(Worker, model, args.rows, arm)) for _ in range(args.workers)]
            for arm in ARMS
        }
        for sessions in args.sessions:
            waits = [times[n % len(times)] for n in range(args.workers * sessions)]
            results[f"{sessions} sessions"] = measured = measure(arms, waits, args.repeats)
            ratios = {name: value for name, value in measured.items() if name != "arms"}
            print(f"{sessions} sessions a worker, {args.rows} rows: {ratios}")
            print(table(measured["arms"]), flush=True)
        for process in (process for each in arms.values() for process in each):
            process.close()

    write_result(args.json, provenance(args, load) | {"results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
