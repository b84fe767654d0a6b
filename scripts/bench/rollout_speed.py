"""How fast does the embedded engine decode: against transformers `generate`, and with against without drafts?

Every arm answers the same prompts on the same model in the same process: `--rounds` batches of B prompts,
sampled at temperature 1. transformers decodes them batch after batch; the engine has B rows and takes
the next prompt when a row is free. Arms take turns within a repeat, so a disturbance hits all of them;
the median over repeats and its spread are reported. Tokens per second of wall time, prefill included.

Workloads: `fixed` samples exactly 128 tokens and ignores stop tokens. `turns` (shipped model only, engine
only) lets stop tokens end a turn, as in a rollout; there the acceptance is that of real turns.
Models: the shipped one on held-out SWE statements, and a random one of 27M parameters in bfloat16.
Acceptance of a random draft means nothing: that model shows the speed of `none` and the price of drafts.

    python scripts/bench/rollout_speed.py --json OUT [--threads 2] [--repeats 5] [--batches 1 8 32]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rlpipe.config.env import EnvConfig  # noqa: E402
from rlpipe.config.paths import resolve  # noqa: E402
from rlpipe.config.rollout import RolloutConfig  # noqa: E402
from rlpipe.config.spec import SpecConfig, SpecMode  # noqa: E402
from rlpipe.hf_layout import read_config  # noqa: E402
from rlpipe.rollout.chat import ChatFormat  # noqa: E402
from rlpipe.rollout.embedded import EmbeddedEngine  # noqa: E402
from rlpipe.types import GenerateRequest, SamplingParams, SpecCounts  # noqa: E402

NEW_TOKENS = 128
TURN_TOKENS = 48
GAMMA = 3
Prompts = list[list[int]]


def swe_prompts(model: Path) -> tuple[Prompts, tuple[int, ...]]:
    """First turns of the held-out SWE instances, and the tokens that end a turn."""
    from rlpipe.envs.swe.episode import opening
    from rlpipe.envs.swe.instances import load_instances

    config, chat = EnvConfig(), ChatFormat.from_pretrained(model)
    instances = load_instances(config.held_out_files[0], "held_out")
    return [chat.initial(opening(one, config)) for one in instances.values()], chat.stop_token_ids


def random_model(path: Path) -> Path:
    """27M parameters in bfloat16, MiMo layout."""
    from tests.helpers.tiny_checkpoint import write_random_checkpoint

    return write_random_checkpoint(
        path,
        vocab=4096,
        hidden=384,
        layers=12,
        heads=6,
        kv_heads=2,
        head_dim=64,
        intermediate=1152,
        dtype=torch.bfloat16,
        scale=0.05,
    )


class TransformersArm:
    """`generate` of transformers: left-padded batches, one after another."""

    def __init__(self, model: Path, dtype: str) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self._model.eval().generation_config.eos_token_id = None

    def run(self, prompts: Prompts, batch: int, stops: tuple[int, ...]) -> tuple[int, SpecCounts]:
        """Tokens generated, and no acceptance."""
        tokens = 0
        for start in range(0, len(prompts), batch):
            chunk = prompts[start : start + batch]
            width = max(map(len, chunk))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in chunk])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in chunk])
            with torch.inference_mode():
                out = self._model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=NEW_TOKENS,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    pad_token_id=0,
                )
            tokens += out[:, width:].numel()
        assert tokens == len(prompts) * NEW_TOKENS, "transformers stopped early"
        return tokens, SpecCounts()

    def close(self) -> None:
        """Nothing to stop."""


class EngineArm:
    """The embedded engine with as many rows as the batch."""

    def __init__(self, model: Path, mode: SpecMode, batch: int, threads: int, dtype: str) -> None:
        longest = int(read_config(model)["max_position_embeddings"])
        config = RolloutConfig(
            max_running=batch, max_context=min(512, longest), threads=threads, dtype=dtype, device="cpu"
        )
        self._engine = EmbeddedEngine(config, SpecConfig(mode=mode, gamma=GAMMA), model)
        self._runs = 0

    def run(self, prompts: Prompts, batch: int, stops: tuple[int, ...]) -> tuple[int, SpecCounts]:
        """Tokens generated, and counts of drafts."""
        self._runs += 1
        limit = TURN_TOKENS if stops else NEW_TOKENS

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(
                *(
                    self._engine.generate(
                        GenerateRequest(
                            request_id=f"{self._runs}/{i}",
                            prompt_ids=prompt,
                            sampling=SamplingParams(
                                max_new_tokens=limit, stop_token_ids=stops, seed=1000 * self._runs + i
                            ),
                        )
                    )
                    for i, prompt in enumerate(prompts)
                )
            )

        spec = SpecCounts()
        results = asyncio.run(all_of_them())
        for result in results:
            spec.add(result.spec)
        return sum(len(result.output_ids) for result in results), spec

    def close(self) -> None:
        """Stop the engine's thread."""
        self._engine.close()


def measure(
    arms: dict[str, Callable[[], Any]], prompts: Prompts, batch: int, stops: tuple[int, ...], repeats: int
) -> dict[str, Any]:
    """Speed of each arm; one warm-up run each, then `repeats` rounds in which the arms take turns."""
    running = {name: make() for name, make in arms.items()}
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    counts = {name: SpecCounts() for name in arms}
    try:
        for repeat in range(repeats + 1):
            for name, arm in running.items():
                started = time.perf_counter()
                tokens, spec = arm.run(prompts, batch, stops)
                elapsed = time.perf_counter() - started
                if repeat:
                    speeds[name].append(tokens / elapsed)
                    counts[name].add(spec)
    finally:
        for arm in running.values():
            arm.close()
    return {name: summary(speeds[name], counts[name]) for name in arms}


def summary(speeds: list[float], spec: SpecCounts) -> dict[str, Any]:
    """Median and spread of tokens per second; acceptance by depth, conditional on the depth before."""
    row: dict[str, Any] = {
        "tokens_per_s": round(statistics.median(speeds)),
        "min_max": [round(min(speeds)), round(max(speeds))],
    }
    if spec.verify_steps:
        row["acceptance_length"] = round(spec.acceptance_length, 3)
        row["acceptance_by_depth"] = [
            round(a / d, 3) if d else None for a, d in zip(spec.accepted, spec.drafted, strict=True)
        ]
    return row


def bench_model(model: Path, dtype: str, data: tuple[Prompts, tuple[int, ...]], args: Any) -> dict[str, Any]:
    """All batches and workloads of one model."""
    prompts, stops = data
    results: dict[str, Any] = {}
    for batch in args.batches:
        chosen = [prompts[i % len(prompts)] for i in range(batch * args.rounds)]

        def engine(mode: SpecMode, batch: int = batch) -> Callable[[], EngineArm]:
            return lambda: EngineArm(model, mode, batch, args.threads, dtype)

        arms: dict[str, Callable[[], Any]] = {str(mode): engine(mode) for mode in SpecMode}
        fixed = {"transformers": lambda: TransformersArm(model, dtype), **arms}
        workloads = {"fixed": (fixed, ())}
        if stops:
            workloads["turns"] = (arms, stops)
        for workload, (which, ends) in workloads.items():
            rows = measure(which, chosen, batch, ends, args.repeats)
            ratios = {
                f"{name} / none": rows[name]["tokens_per_s"] / rows["none"]["tokens_per_s"] for name in rows
            }
            if "transformers" in rows:
                ratios["none / transformers"] = (
                    rows["none"]["tokens_per_s"] / rows["transformers"]["tokens_per_s"]
                )
            ratios = {
                k: round(v, 2) for k, v in ratios.items() if k.split(" / ")[0] not in ("transformers", k[-4:])
            }
            results[f"{workload}, batch {batch}"] = {"arms": rows, "ratios": ratios}
            print(f"\n{model.name} {dtype}, {workload}, batch {batch}, {args.threads} threads", flush=True)
            for name, row in rows.items():
                print(f"  {name:14s} {row}", flush=True)
            print(f"  {ratios}", flush=True)
    return results


def main() -> None:
    """Run what was asked for and write one JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3, help="prompts per row and repeat")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--models", nargs="+", choices=["shipped", "random27m"], default=["shipped", "random27m"]
    )
    parser.add_argument("--shipped", type=Path, default=resolve("shipped:models/tiny"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    results = {}
    if "shipped" in args.models:
        results["shipped float32"] = bench_model(args.shipped, "float32", swe_prompts(args.shipped), args)
    if "random27m" in args.models:
        with tempfile.TemporaryDirectory() as directory:
            model = random_model(Path(directory) / "random27m")
            generator = torch.Generator().manual_seed(0)
            prompts = [torch.randint(2, 4096, (40,), generator=generator).tolist() for _ in range(64)]
            results["random 27M bfloat16"] = bench_model(model, "bfloat16", (prompts, ()), args)
    report = {
        "question": "tokens per second of the embedded engine and of transformers generate",
        "commit": _git("rev-parse", "HEAD"),
        "modified": bool(_git("status", "--porcelain", "rlpipe")),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "device": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "config": {
            "threads": args.threads,
            "temperature": 1.0,
            "gamma": GAMMA,
            "new_tokens": NEW_TOKENS,
            "turn_tokens": TURN_TOKENS,
            "rounds": args.rounds,
            "repeats": args.repeats,
            "warm_up_runs": 1,
        },
        "results": results,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
