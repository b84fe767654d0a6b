"""How many tokens a second does an engine decode at each batch, and how many a verify step?

    python scripts/bench/decoding_modes.py --json OUT --model DIR --mode none --engine sglang --device cuda

Requests of random prompts, sampled at temperature 1, run to their last token. There are four times as many as
the batch holds, of which so many run at once; counted are the tokens of the time in which the batch is full
(`harness.full_batch_rate`). The best of the repeats counts, and one batch goes before as a warm-up. A
step's time is that of a full batch: batch * tokens a step / tokens a second. Acceptance means something for a
trained draft alone (`scripts/grow_checkpoint`). --stock runs SGLang without rlpipe's plugin.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import Span, bench_parser, full_batch_rate, write_result

from rlpipe.actors.engines import make_engine
from rlpipe.config.rollout import EngineKind, RolloutConfig
from rlpipe.config.run import Config, ModelConfig, RunSettings
from rlpipe.config.spec import SpecConfig
from rlpipe.rollout.engine import Engine
from rlpipe.types import GenerateRequest, GenerateResult, SamplingParams

PROMPT, QUEUED = 64, 4


async def wave(
    engine: Engine, name: str, *, count: int, batch: int, tokens: int
) -> tuple[list[GenerateResult], list[Span]]:
    """Run `count` requests, `batch` of them at once; return their results and when each ran."""
    rng = np.random.default_rng(count)
    requests = [
        GenerateRequest(
            request_id=f"{name}.{i}",
            prompt_ids=rng.integers(0, 64, PROMPT).tolist(),
            sampling=SamplingParams(max_new_tokens=tokens, seed=i),
        )
        for i in range(count)
    ]
    slots, spans = asyncio.Semaphore(batch), []

    async def run(request: GenerateRequest) -> GenerateResult:
        async with slots:
            start = time.perf_counter()
            result = await engine.generate(request)
            spans.append(Span(start, time.perf_counter(), len(result.output_ids)))
        return result

    return await asyncio.gather(*map(run, requests)), spans


def main() -> int:
    """Returns the exit status."""
    parser = bench_parser(__doc__, repeats=2)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--mode", default="rejection")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--engine", choices=[kind.value for kind in EngineKind], default="embedded")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--stock", action="store_true", help="a server without rlpipe's plugin")
    given = parser.parse_args()
    speeds: dict[str, float] = {}
    steps: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            run=RunSettings(dir=folder),
            model=ModelConfig(path=str(given.model)),
            spec=SpecConfig(mode=given.mode, gamma=given.gamma),
            rollout=RolloutConfig(
                engine=given.engine,
                device=given.device,
                dtype="bfloat16" if given.device == "cuda" else "float32",
                max_running=max(given.batches),
                max_context=PROMPT + given.tokens,
                ignore_eos=True,
                prefill_tokens=8192,
            ),
        )
        config.rollout.sglang.plugin = not given.stock
        engine = make_engine(config, lambda kind, **fields: print(kind, fields, file=sys.stderr))
        try:
            widest = max(given.batches)
            asyncio.run(wave(engine, "warm", count=widest, batch=widest, tokens=8))
            for batch in given.batches:
                for repeat in range(given.repeats):
                    results, spans = asyncio.run(
                        wave(
                            engine,
                            f"{batch}.{repeat}",
                            count=QUEUED * batch,
                            batch=batch,
                            tokens=given.tokens,
                        )
                    )
                    speed = round(full_batch_rate(spans, batch), 1)
                    speeds[str(batch)] = max(speeds.get(str(batch), 0.0), speed)

                    # Tokens per verify step turn the speed into milliseconds of a step.
                    tokens = sum(len(result.output_ids) for result in results)
                    verified = sum(result.spec.verify_steps for result in results)
                    steps[str(batch)] = round(tokens / verified if verified else 1.0, 3)
        finally:
            engine.close()
    took = {batch: round(1000 * int(batch) * steps[batch] / speed, 3) for batch, speed in speeds.items()}
    result = {
        "mode": given.mode,
        "plugin": not given.stock,
        "tokens_per_s": speeds,
        "tokens_per_verify_step": steps,
        "ms_per_step": took,
    }
    print(json.dumps(result))
    write_result(given.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
