"""How many tokens a second does an engine decode at each batch, and how many a verify step?

    python scripts/bench/decoding_modes.py --json OUT --model DIR --mode none --engine sglang --device cuda

Requests of random prompts, sampled at temperature 1, run to their last token. Three times as many as a batch
holds are asked for, the best of two repeats counts, and one batch goes before as a warm-up. Acceptance means
something for a trained draft alone (`scripts/grow_checkpoint`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from rlpipe.actors.engines import make_engine
from rlpipe.config.rollout import EngineKind, RolloutConfig
from rlpipe.config.run import Config, ModelConfig, RunSettings
from rlpipe.config.spec import SpecConfig
from rlpipe.rollout.engine import Engine
from rlpipe.types import GenerateRequest, GenerateResult, SamplingParams

PROMPT = 64


async def wave(engine: Engine, name: str, count: int, tokens: int) -> list[GenerateResult]:
    """So many requests at once."""
    rng = np.random.default_rng(count)
    asked = [
        GenerateRequest(
            request_id=f"{name}.{i}",
            prompt_ids=rng.integers(0, 64, PROMPT).tolist(),
            sampling=SamplingParams(max_new_tokens=tokens, seed=i),
        )
        for i in range(count)
    ]
    return await asyncio.gather(*map(engine.generate, asked))


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--mode", default="rejection")
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--engine", choices=[kind.value for kind in EngineKind], default="embedded")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--tokens", type=int, default=200)
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
        engine = make_engine(config, lambda kind, **fields: print(kind, fields, file=sys.stderr))
        try:
            asyncio.run(wave(engine, "warm", max(given.batches), 8))
            for batch in given.batches:
                for repeat in range(2):
                    started = time.perf_counter()
                    found = asyncio.run(wave(engine, f"{batch}.{repeat}", 3 * batch, given.tokens))
                    seconds = time.perf_counter() - started
                    tokens = sum(len(result.output_ids) for result in found)
                    speeds[str(batch)] = max(speeds.get(str(batch), 0.0), round(tokens / seconds, 1))
                    verified = sum(result.spec.verify_steps for result in found)
                    steps[str(batch)] = round(tokens / max(1, verified), 3)
        finally:
            engine.close()
    result = {"mode": given.mode, "tokens_per_s": speeds, "tokens_per_verify_step": steps}
    print(json.dumps(result))
    if given.json:
        given.json.write_text(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
