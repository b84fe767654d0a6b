"""How fast does an SGLang server decode with and without rlpipe's plugin, and where does its CPU time go?

    python scripts/bench/sglang_plugin.py --json OUT [--model DIR] [--batches 1 8 32 64] [--device cuda]

Two servers with the same settings, one of them without the plugin, get the same requests in turns, in an
order that changes with each repeat. Four batches of requests are queued, of which one batch runs at a time;
only tokens generated while the batch is full count. Each prompt has 16 tokens after a prefix of --context
tokens that all share, as siblings do. CPU time is the seconds per 1,000 tokens of the server's processes,
over all requests. With --py-spy PROGRAM (pip install py-spy, anywhere) the scheduler is sampled, and its CPU
time is also reported by part.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
from harness import Span, bench_parser, full_batch_rate, load_average, provenance, write_result

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.rollout.sglang import SglangEngine
from rlpipe.types import GenerateRequest, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
PROMPT, QUEUED = 16, 4
ARMS = {"plugin": True, "stock": False}
PARTS = {  # a stack belongs to the first part that lists one of its functions; the last part has the others
    "attention": ("_run_sdpa_forward", "rlpipe_sglang/attention"),
    "verification": ("rlpipe_sglang/verify", "eagle_sample"),
    "drafts": ("proposed (", "drawn (", "sample_draft_proposal", "fast_sample", "renorm_draft_probs"),
    "log-probabilities and entropies": ("rlpipe_sglang/measure", "compute_spec_logprobs"),
    "rest of the passes": ("ModelRunner.forward",),
    "rest": ("event_loop",),
}


def spent(engine: SglangEngine) -> Counter[str]:
    """Return the CPU seconds so far of the server's processes, by name."""
    used: Counter[str] = Counter()
    for process in psutil.Process(engine.server.pid).children(recursive=True):
        times = process.cpu_times()
        used[process.name().removeprefix("sglang::")] += times.user + times.system
    return used


def sampled_parts(file: Path) -> Counter[str]:
    """Count a scheduler's samples by part, from py-spy's raw lines: frames joined by semicolons, a count."""
    parts: Counter[str] = Counter()
    for line in file.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        for part, names in PARTS.items():
            if any(name in stack for name in names):
                parts[part] += int(count)
                break
    return parts


@contextmanager
def sampling(engine: SglangEngine, program: str, file: Path) -> Iterator[None]:
    """Sample the scheduler's stacks into `file`, unless there is no program for it."""
    if not program:
        yield
        return
    children = psutil.Process(engine.server.pid).children(recursive=True)
    (scheduler,) = (process.pid for process in children if "scheduler" in process.name())
    command = [program, "record", "-p", str(scheduler), "-r", "200", "-f", "raw", "-o", str(file)]
    spy = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        spy.send_signal(signal.SIGINT)
        spy.wait()


async def wave(engine: SglangEngine, batch: int, context: int, tokens: int, name: str) -> float:
    """Run one wave of requests; return the tokens per second in its middle."""
    rng = np.random.default_rng(0)
    spans: list[Span] = []
    slots = asyncio.Semaphore(batch)

    async def one(number: int, prompt: list[int]) -> None:
        sampling = SamplingParams(max_new_tokens=tokens)
        request = GenerateRequest(request_id=f"{name}.{number}", prompt_ids=prompt, sampling=sampling)
        async with slots:
            start = time.perf_counter()
            result = await engine.generate(request)
            spans.append(Span(start, time.perf_counter(), len(result.output_ids)))

    prompts = rng.integers(3, 64, (QUEUED * batch, PROMPT)).tolist()
    shared = rng.integers(3, 64, context).tolist()
    await asyncio.gather(*(one(i, shared + prompt) for i, prompt in enumerate(prompts)))
    return full_batch_rate(spans, batch)


@contextmanager
def servers(given: argparse.Namespace, folder: Path) -> Iterator[dict[str, SglangEngine]]:
    """Start both arms' servers and warm them up."""
    engines: dict[str, SglangEngine] = {}
    try:
        for arm, plugin in ARMS.items():
            config = RolloutConfig(
                engine="sglang",
                device=given.device,
                dtype=given.dtype or ("bfloat16" if given.device == "cuda" else "float32"),
                max_running=max(given.batches),
                max_context=given.context + PROMPT + given.tokens,
                ignore_eos=True,
            )
            config.sglang.plugin = plugin
            spec = SpecConfig(mode="rejection", gamma=given.gamma)
            engines[arm] = SglangEngine(config, spec, given.model, log_dir=folder)
            asyncio.run(wave(engines[arm], max(given.batches), given.context, 8, "warm"))
        yield engines
    finally:
        for engine in engines.values():
            engine.close()


def measured(
    given: argparse.Namespace, engines: dict[str, SglangEngine], batch: int, folder: Path
) -> dict[str, dict[str, object]]:
    """Measure speeds and CPU seconds of both arms at one batch size."""
    speeds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    used: dict[str, Counter[str]] = {arm: Counter() for arm in ARMS}
    parts: dict[str, Counter[str]] = {arm: Counter() for arm in ARMS}
    for repeat in range(given.repeats):
        for arm in list(ARMS)[:: 1 if repeat % 2 else -1]:
            before, file = spent(engines[arm]), folder / f"{batch}.{arm}.{repeat}"
            with sampling(engines[arm], given.py_spy, file):
                name = f"{batch}.{repeat}"
                played = wave(engines[arm], batch, given.context, given.tokens, name)
                speeds[arm].append(asyncio.run(played))
            used[arm] += spent(engines[arm]) - before
            if given.py_spy:
                parts[arm] += sampled_parts(file)
    thousands = given.repeats * QUEUED * batch * given.tokens / 1000
    return {
        arm: {
            "tokens_per_s": [round(speed, 1) for speed in speeds[arm]],
            "cpu_s_per_1000_tokens": {name: round(s / thousands, 3) for name, s in used[arm].items()},
            "scheduler_cpu_s_per_1000_tokens": {
                part: round(used[arm]["scheduler"] / thousands * count / parts[arm].total(), 3)
                for part, count in parts[arm].items()
            },
        }
        for arm in ARMS
    }


def main() -> int:
    """Run all batch sizes and write one JSON; return the exit status."""
    parser = bench_parser(__doc__, repeats=3)
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--py-spy", default="", help="the program, for CPU by part")
    parser.add_argument("--dtype", help="bfloat16 on a GPU, float32 elsewhere, unless given")
    given, load = parser.parse_args(), load_average()
    batches: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name, servers(given, Path(name)) as engines:
        for batch in given.batches:
            arms = batches[str(batch)] = measured(given, engines, batch, Path(name))
            plugin, stock = (statistics.median(arms[arm]["tokens_per_s"]) for arm in ARMS)
            arms["plugin / stock"] = round(plugin / stock, 3)
            print(f"batch {batch}: {arms}", flush=True)
            result = provenance(given, load, device=given.device) | {"batches": batches}
            write_result(given.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
