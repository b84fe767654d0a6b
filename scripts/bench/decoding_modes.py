"""How many tokens a second does an engine decode in each mode and batch, and how many a verify step?

    python scripts/bench/decoding_modes.py --json OUT --model DIR --modes rejection none --engine sglang \
        --device cuda --batches 1 64 --long 32768

Prompts are contexts of real turns of the shipped model (contexts.json). models/tiny, and the larger models
that `scripts/grow_checkpoint` makes of it, continue them as a trained model does, so acceptance is realistic.
Four times as many requests as the batch holds run to their last token at temperature 1; at any time at most a
batch of them runs. Only tokens generated while the batch is full count (`harness.full_batch_rate`). A
step's time is batch * tokens a step / tokens a second.

The mode "rejection, stock" is SGLang without rlpipe's plugin. Servers start one after the other, and the
file is written after each. If a server fails, the file names it, the other servers still run, and the exit
status is 1. A server gets the share of the GPU that the memory estimate (rlpipe/preflight) leaves for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import Span, bench_parser, full_batch_rate, load_average, provenance, write_result

from rlpipe.config.rollout import EngineKind, RolloutConfig
from rlpipe.config.run import Config, ModelConfig, RunSettings
from rlpipe.config.spec import SpecConfig
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config
from rlpipe.preflight.memory_estimate import RESERVED, SERVER_FRACTION, server_memory
from rlpipe.rollout.engine import Engine
from rlpipe.types import GenerateRequest, GenerateResult, SamplingParams

CONTEXTS = Path(__file__).parent / "contexts.json"
QUEUED = 4  # requests for each one of the batch
LONG_BATCH, LONG_TOKENS = 2, 64  # conversations of --long, and the tokens that each decodes
CAPTURED = re.compile(r"Capture .* end\. bs=\[([\d, ]*)\], elapsed=([\d.]+) s")


def prompts(length: int = 0) -> list[list[int]]:
    """Return the contexts of real turns; with `length`, joined and cut to that many tokens each."""
    contexts: list[list[int]] = json.loads(CONTEXTS.read_text())
    if not length:
        return contexts

    # Each begins with a different conversation, so that no two share more than the first words.
    starts = (number * len(contexts) // LONG_BATCH for number in range(LONG_BATCH))
    turned = (np.concatenate(contexts[start:] + contexts[:start]) for start in starts)
    return [np.resize(tokens, length).tolist() for tokens in turned]


async def wave(
    engine: Engine,
    name: str,
    contexts: Sequence[Sequence[int]],
    *,
    count: int,
    batch: int,
    tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[GenerateResult], list[Span]]:
    """Run `count` requests, `batch` of them at once; return their results and the time span of each."""
    slots, spans = asyncio.Semaphore(batch), []

    async def run(number: int) -> GenerateResult:
        request = GenerateRequest(
            request_id=f"{name}.{number}",
            prompt_ids=contexts[number % len(contexts)],
            sampling=SamplingParams(max_new_tokens=tokens, seed=number),
        )
        async with slots:
            start = clock()
            result = await engine.generate(request)
            spans.append(Span(start, clock(), len(result.output_ids)))
        return result

    return await asyncio.gather(*map(run, range(count))), spans


async def batch_speed(
    engine: Engine,
    name: str,
    contexts: Sequence[Sequence[int]],
    *,
    batch: int,
    tokens: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return tokens a second of a full batch, tokens a verify step, and milliseconds a step."""
    results, spans = await wave(
        engine, name, contexts, count=QUEUED * batch, batch=batch, tokens=tokens, clock=clock
    )
    speed = full_batch_rate(spans, batch)

    # Without drafts a step gives one token.
    verified = sum(result.spec.verify_steps for result in results)
    per_step = sum(len(result.output_ids) for result in results) / verified if verified else 1.0
    return {
        "tokens_per_s": round(speed, 1),
        "tokens_per_verify_step": round(per_step, 3),
        "ms_per_step": round(1000 * batch * per_step / speed, 3),
    }


def settings(mode: str, given: argparse.Namespace, folder: str = "") -> Config:
    """Return the configuration of one mode."""
    mode, _, stock = mode.partition(", ")
    longest = max(given.long + LONG_TOKENS, max(map(len, prompts())) + given.tokens)
    config = Config(
        run=RunSettings(dir=folder),
        model=ModelConfig(path=str(given.model)),
        spec=SpecConfig(mode=mode, gamma=given.gamma),
        rollout=RolloutConfig(
            engine=given.engine,
            device=given.device,
            dtype="bfloat16" if given.device == "cuda" else "float32",
            max_running=max(given.batches),
            max_context=longest,
            ignore_eos=True,
            prefill_tokens=8192,
        ),
    )
    config.rollout.sglang.plugin = not stock
    if given.device == "cuda":
        # Capturing graphs only for the measured batches, and none for prompts, halves the start-up time.
        sizes = [str(batch) for batch in sorted({*given.batches, LONG_BATCH})]
        graphs = [] if given.all_graphs else ["--cuda-graph-bs-decode", *sizes]
        config.rollout.sglang.extra_arguments = ["--disable-prefill-cuda-graph", *graphs]
    return config


def fitting_share(config: Config, card: int) -> float:
    """Return the share of a GPU with `card` bytes for a server's weights and KV, excluding its other memory.

    It is at most SGLang's default, because the estimate was not tested on a GPU.
    """
    memory = server_memory(read_architecture(read_config(config.model.path)), config, card)
    beside = memory.total - memory.parts["weights"] - memory.parts["kv"] + RESERVED
    return min(SERVER_FRACTION, int(100 * (1 - beside / card)) / 100)


def seconds_per_graph(log: str) -> float | None:
    """Return the mean seconds that a server took to capture a CUDA graph, from its log; None if it has none.

    >>> seconds_per_graph("Capture decode CUDA graph end. bs=[1, 8], elapsed=3.00 s, mem usage=0.1 GB")
    1.5
    """
    found = [(len(sizes.split(",")), float(seconds)) for sizes, seconds in CAPTURED.findall(log)]
    return sum(seconds for _, seconds in found) / sum(count for count, _ in found) if found else None


def measure(mode: str, given: argparse.Namespace) -> dict[str, Any]:
    """Start an engine in one mode and return its figures by batch."""
    from rlpipe.actors.engines import make_engine

    with tempfile.TemporaryDirectory() as folder:
        config = settings(mode, given, folder)
        if given.device == "cuda" and config.rollout.engine is EngineKind.SGLANG:
            import torch

            card = torch.cuda.get_device_properties(0).total_memory
            config.rollout.sglang.memory_fraction = fitting_share(config, card)
        started = time.perf_counter()
        engine = make_engine(config, lambda kind, **fields: print(kind, fields, file=sys.stderr))
        result: dict[str, Any] = {"start_s": round(time.perf_counter() - started, 1), "batches": {}}
        try:
            log = "".join(path.read_text() for path in Path(folder).rglob("sglang-*.log"))
            result["s_per_graph"] = seconds_per_graph(log)
            widest, turns = max(given.batches), prompts()
            asyncio.run(wave(engine, "warm", turns, count=widest, batch=widest, tokens=8))
            for batch in given.batches:
                speeds = [
                    asyncio.run(
                        batch_speed(engine, f"{batch}.{repeat}", turns, batch=batch, tokens=given.tokens)
                    )
                    for repeat in range(given.repeats)
                ]
                result["batches"][str(batch)] = max(speeds, key=lambda speed: speed["tokens_per_s"])
            if given.long:
                long = prompts(given.long)
                asyncio.run(wave(engine, "prefill", long, count=LONG_BATCH, batch=LONG_BATCH, tokens=1))
                result["long"] = asyncio.run(
                    batch_speed(engine, "long", long, batch=LONG_BATCH, tokens=LONG_TOKENS)
                )
        finally:
            engine.close()
    return result


def ratios(modes: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return, by batch, the speed of the first mode divided by the speed of each other mode."""
    first, *others = [name for name, result in modes.items() if "batches" in result] or [""]
    return {
        f"{first} / {other}": {
            batch: round(speed["tokens_per_s"] / modes[other]["batches"][batch]["tokens_per_s"], 3)
            for batch, speed in modes[first]["batches"].items()
        }
        for other in others
    }


def main() -> int:
    """Measure all modes and write one JSON; return the exit status."""
    parser = bench_parser(__doc__, repeats=2)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--modes", nargs="+", default=["rejection"])
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--engine", choices=[kind.value for kind in EngineKind], default="embedded")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--long", type=int, default=0, help="also decode behind contexts of so many tokens")
    parser.add_argument("--all-graphs", action="store_true", help="capture the graphs of every batch size")
    given, load = parser.parse_args(), load_average()

    modes: dict[str, Any] = {}
    for mode in given.modes:
        try:
            modes[mode] = measure(mode, given)
        except Exception as error:
            traceback.print_exc()
            modes[mode] = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps({mode: modes[mode]}), flush=True)
        report = provenance(given, load, device=given.device) | {"modes": modes, "ratios": ratios(modes)}
        write_result(given.json, report)
    return int(any("failed" in result for result in modes.values()))


if __name__ == "__main__":
    sys.exit(main())
