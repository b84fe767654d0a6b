"""Does every token that a server samples during weight updates carry the version that generated it?

    python scripts/bench/token_versions.py --json OUT --model DIR [--device cuda] [--updates 4]

The tokens themselves identify the weights. --model is a checkpoint made by `scripts/grow_checkpoint`, whose
added tokens are never sampled. In odd versions, the rows of the embedding and the output layer of its first
tokens are swapped with those of added tokens. So a token's id shows which weights generated it, whatever
version the server reports. A full batch decodes while the weights change again and again; on a GPU, where
SGLang overlaps scheduling with computing, a step is in flight at each update.

`wrong`  tokens whose reported version is not the one that generated them
`across`  requests during which the version changed; at least one is required
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from decoding_modes import fitting_share, prompts
from harness import bench_parser, load_average, provenance, write_result

from rlpipe.actors.engines import make_engine
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import Config, ModelConfig, RunSettings
from rlpipe.config.sglang import SglangConfig, WeightTransfer
from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import read_weights
from rlpipe.rollout.engine import Engine
from rlpipe.types import GenerateRequest, GenerateResult, SamplingParams

KNOWN = 800  # tokens of models/tiny; those that a grown checkpoint adds are never sampled
TABLES = ("model.embed_tokens.weight", "lm_head.weight")


def swapped(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights that sample the same text, with token ids that are higher by KNOWN."""
    changed = dict(weights)
    for name in TABLES:
        table = weights[name].clone()
        table[:KNOWN], table[KNOWN : 2 * KNOWN] = weights[name][KNOWN : 2 * KNOWN], weights[name][:KNOWN]
        changed[name] = table
    return changed


def count(results: Sequence[GenerateResult]) -> dict[str, int]:
    """Count tokens, tokens with a wrong version (by parity), and requests that span an update."""
    wrong = sum(int(((result.output_ids >= KNOWN) != (result.versions % 2 == 1)).sum()) for result in results)
    return {
        "tokens": sum(len(result.output_ids) for result in results),
        "wrong": wrong,
        "across": sum(len(set(result.versions.tolist())) > 1 for result in results),
        "requests": len(results),
    }


async def decode_across_updates(
    engine: Engine, weights: Mapping[str, torch.Tensor], *, batch: int, updates: int
) -> list[GenerateResult]:
    """Keep a full batch decoding while the weights change `updates` times; return what was generated."""
    results: list[GenerateResult] = []
    contexts, done = prompts(), asyncio.Event()

    async def client(number: int) -> None:
        while not done.is_set():
            request = GenerateRequest(
                request_id=f"{number}.{len(results)}",
                prompt_ids=contexts[number % len(contexts)],
                sampling=SamplingParams(max_new_tokens=200, seed=number),
            )
            results.append(await engine.generate(request))

    versions = swapped(weights), weights  # of odd and of even updates
    clients = [asyncio.create_task(client(number)) for number in range(batch)]
    for version in range(1, updates + 1):
        await asyncio.sleep(0.3)
        await asyncio.to_thread(engine.update_weights, versions[1 - version % 2], version)
    await asyncio.sleep(0.3)
    done.set()
    await asyncio.gather(*clients)
    return results


def main() -> int:
    """Return the exit status: 1 if a token has a wrong version, or if no turn lasted across an update."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--mode", default="rejection")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--updates", type=int, default=4)
    given, load = parser.parse_args(), load_average()
    on_gpu = given.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            run=RunSettings(dir=folder),
            model=ModelConfig(path=str(given.model)),
            spec=SpecConfig(mode=given.mode),
            rollout=RolloutConfig(
                engine="sglang",
                device=given.device,
                dtype="bfloat16" if on_gpu else "float32",
                max_running=given.batch,
                max_context=512,
                sglang=SglangConfig(weight_transfer=WeightTransfer.SHARED),
            ),
        )
        if on_gpu:
            config.rollout.sglang.memory_fraction = fitting_share(
                config, torch.cuda.get_device_properties(0).total_memory
            )
            graphs = ["--disable-prefill-cuda-graph", "--cuda-graph-bs-decode", str(given.batch)]
            config.rollout.sglang.extra_arguments = graphs
        engine = make_engine(config, lambda kind, **fields: print(kind, fields, file=sys.stderr))
        try:
            weights = read_weights(given.model)
            playing = decode_across_updates(engine, weights, batch=given.batch, updates=given.updates)
            counted = count(asyncio.run(playing))
        finally:
            engine.close()
    result: dict[str, Any] = provenance(given, load, device=given.device) | counted
    print(json.dumps(counted))
    write_result(given.json, result)
    return int(counted["wrong"] > 0 or not counted["across"])


if __name__ == "__main__":
    sys.exit(main())
