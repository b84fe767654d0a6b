"""How fast does the embedded engine decode, compared with transformers `generate`, and what do drafts gain?

Arms run on the same prompts, sampled at temperature 1. Each has its own process, as in real use (thread pools
and caches of one arm slow another down). Arms take turns within a repeat, so that a disturbance affects all
of them. Reported are tokens per second of wall time with prefill: the median over repeats and its spread. A
ratio is the median over repeats of the ratio within the repeat. There are two workloads, each of `--rounds`
times B prompts:

`fixed`  exactly 128 tokens a prompt, stop tokens ignored. transformers decodes batches of B one after
         another; the engine has B rows and takes the next prompt when a row is free.
`turns`  shipped model, engine only: the turns of conversations about held-out SWE instances. The
         conversations are a demonstrator's, so that all arms see the same past. B conversations run at once,
         a turn ends at a stop token, and keys of the past are reused. A rollout decodes in the same way, so
         this acceptance is realistic. `fixed` goes beyond a turn's end, where neither model nor draft was
         trained.

Models: the shipped one on held-out SWE statements, and a random one of 27M parameters in bfloat16.
The acceptance of a random draft is meaningless: that model shows the speed of `none` and the cost of drafts.

    python scripts/bench/rollout_speed.py --json OUT [--threads 1] [--repeats 5] [--batches 1 8 32]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from harness import ArmProcess, Load, bench_parser, load_average, paired_ratio, provenance, write_result

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rlpipe.config.paths import resolve  # noqa: E402
from rlpipe.config.rollout import RolloutConfig  # noqa: E402
from rlpipe.config.spec import SpecConfig, SpecMode  # noqa: E402
from rlpipe.models.checkpoint import read_config  # noqa: E402
from rlpipe.rollout.chat import ChatFormat  # noqa: E402
from rlpipe.rollout.embedded import EmbeddedEngine  # noqa: E402
from rlpipe.types import GenerateRequest, SamplingParams, SpecCounts  # noqa: E402

NEW_TOKENS = 128
TURN_TOKENS = 48
GAMMA = 3
MODES = (SpecMode.NONE, SpecMode.TARGET_ONLY, SpecMode.REJECTION)
Prompts = list[list[int]]


@dataclass(slots=True)
class Workload:
    """Conversations as lists of their turns' prompts, and tokens that end a turn (none: fixed length)."""

    conversations: list[Prompts]
    stops: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0


def swe_workloads(model: Path) -> dict[str, Workload]:
    """Return first prompts of held-out SWE instances, and full conversations about them."""
    from recipes.tiny_model.demonstrators import Demonstrator, demonstrate

    chat = ChatFormat.from_pretrained(model)
    file = Path(resolve("shipped:data/swe/held_instances.jsonl"))
    records = [json.loads(line) for line in file.read_text().splitlines()]
    traces = [demonstrate(random.Random(i), r, Demonstrator.CAREFUL) for i, r in enumerate(records)]
    conversations = [
        [chat.initial(trace[:i]) for i, message in enumerate(trace) if message["role"] == "assistant"]
        for trace in traces
    ]
    return {
        "fixed": Workload([turns[:1] for turns in conversations], (), NEW_TOKENS),
        "turns": Workload(conversations, chat.stop_token_ids, TURN_TOKENS),
    }


def random_model(path: Path) -> Path:
    """Write a random model of 27M parameters in bfloat16, in MiMo layout."""
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

    def run(self, work: Workload, batch: int) -> tuple[int, list[SpecCounts]]:
        """Return the number of generated tokens, and no acceptance."""
        prompts, tokens = [turns[0] for turns in work.conversations], 0
        for start in range(0, len(prompts), batch):
            chunk = prompts[start : start + batch]
            width = max(map(len, chunk))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in chunk])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in chunk])
            with torch.inference_mode():
                out = self._model.generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=work.max_new_tokens,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    pad_token_id=0,
                )
            tokens += out[:, width:].numel()
        assert tokens == len(prompts) * work.max_new_tokens, "transformers stopped early"
        return tokens, []

    def close(self) -> None:
        """Do nothing: there is nothing to stop."""


class EngineArm:
    """The embedded engine with as many rows as the batch."""

    def __init__(self, model: Path, spec: SpecConfig, batch: int, threads: int, dtype: str) -> None:
        longest = int(read_config(model)["max_position_embeddings"])
        config = RolloutConfig(
            max_running=batch, max_context=min(512, longest), threads=threads, dtype=dtype, device="cpu"
        )
        self._engine = EmbeddedEngine(config, spec, model)
        self._runs = 0

    @property
    def costs(self) -> dict[tuple[int, int], float]:
        """Return the seconds of a step by (batch, gamma); only with spec.adaptive."""
        return self._engine.costs

    def run(self, work: Workload, batch: int) -> tuple[int, list[SpecCounts]]:
        """Return the number of generated tokens, and each conversation's counts of drafts."""
        self._runs += 1
        tokens, counts = 0, [SpecCounts() for _ in work.conversations]

        async def play(number: int, turns: Prompts, room: asyncio.Semaphore) -> None:
            nonlocal tokens
            session = f"{self._runs}/{number}"
            async with room:
                for turn, prompt in enumerate(turns):
                    request = self.request(work, number, turn, prompt)
                    request.session_id = session if len(turns) > 1 else None
                    result = await self._engine.generate(request)
                    tokens += len(result.output_ids)
                    counts[number].add(result.spec)
                self._engine.end_session(session)

        async def play_all() -> None:
            # In `fixed` all requests are queued in the engine at once.
            room = asyncio.Semaphore(batch if work.stops else len(work.conversations))
            await asyncio.gather(*(play(i, turns, room) for i, turns in enumerate(work.conversations)))

        asyncio.run(play_all())
        return tokens, counts

    def request(self, work: Workload, number: int, turn: int, prompt: list[int]) -> GenerateRequest:
        """Return the request for a turn of a conversation; every run and every turn has its own seed."""
        sampling = SamplingParams(
            temperature=work.temperature,
            max_new_tokens=work.max_new_tokens,
            stop_token_ids=work.stops,
            seed=10_000 * self._runs + 100 * number + turn,
        )
        return GenerateRequest(
            request_id=f"{self._runs}/{number}/{turn}", prompt_ids=prompt, sampling=sampling
        )

    def close(self) -> None:
        """Stop the engine's thread."""
        self._engine.close()


class TimedArm:
    """An arm whose runs return tokens per second, and counts of drafts of each conversation."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._arm = make()

    def run(self, work: Workload, batch: int) -> tuple[float, list[SpecCounts]]:
        """Run once and return the speed and the counts."""
        started = time.perf_counter()
        tokens, counts = self._arm.run(work, batch)
        return tokens / (time.perf_counter() - started), counts

    def close(self) -> None:
        """Stop the arm."""
        self._arm.close()


def prepare_process(make: Callable[[], Any], threads: int) -> None:
    """Set the number of threads of an arm's process; the engine's thread sets its own number."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads if make.func is TransformersArm else 1)


def measure(
    arms: dict[str, Callable[[], Any]],
    work: Workload,
    batch: int,
    threads: int,
    repeats: int,
    learning: Mapping[str, int] | None = None,
) -> tuple[dict[str, list[float]], dict[str, SpecCounts]]:
    """Measure speeds and counts of each arm: a warm-up run each, then `repeats` rounds of turns.

    learning: number of extra runs of an arm, by name, before anything is measured.
    """
    running = start_arms(arms, threads)
    for name, runs in (learning or {}).items():
        for _ in range(runs):
            running[name].run(work, batch)
    speeds, counts = decode_in_turns(running, work, batch, repeats)
    for arm in running.values():
        arm.close()
    return speeds, {name: total(mine) for name, mine in counts.items()}


def start_arms(arms: Mapping[str, Callable[[], Any]], threads: int) -> dict[str, ArmProcess]:
    """Start every arm in a separate process."""
    return {
        name: ArmProcess(partial(TimedArm, make), prepare=partial(prepare_process, make, threads))
        for name, make in arms.items()
    }


def decode_in_turns(
    running: dict[str, ArmProcess], work: Workload, batch: int, repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[SpecCounts]]]:
    """Return each arm's speeds by repeat, and each conversation's counts summed over repeats."""
    speeds: dict[str, list[float]] = {name: [] for name in running}
    counts: dict[str, list[SpecCounts]] = {name: [] for name in running}
    for repeat in range(repeats + 1):
        for name in list(running)[:: 1 if repeat % 2 else -1]:
            speed, found = running[name].run(work, batch)
            if repeat:
                speeds[name].append(speed)
                before = counts[name] or [SpecCounts() for _ in found]
                counts[name] = [total(pair) for pair in zip(before, found, strict=True)]
    return speeds, counts


def total(counts: Iterable[SpecCounts]) -> SpecCounts:
    """Return the sum of counts."""
    whole = SpecCounts()
    for mine in counts:
        whole.add(mine)
    return whole


def summary(speeds: list[float], spec: SpecCounts) -> dict[str, Any]:
    """Return median and spread of tokens per second, and acceptance by depth, given the depth before."""
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


def bench_model(model: Path, dtype: str, workloads: dict[str, Workload], args: Any) -> dict[str, Any]:
    """Run all batches and workloads of one model."""
    results: dict[str, Any] = {}
    for batch in args.batches:
        for name, work in workloads.items():
            several = [work.conversations[i % len(work.conversations)] for i in range(batch * args.rounds)]
            arms: dict[str, Callable[[], Any]] = {
                str(mode): partial(
                    EngineArm, model, SpecConfig(mode=mode, gamma=GAMMA), batch, args.threads, dtype
                )
                for mode in MODES
            }
            if not work.stops:
                arms["transformers"] = partial(TransformersArm, model, dtype)
            speeds, counts = measure(
                arms, replace(work, conversations=several), batch, args.threads, args.repeats
            )
            rows = {arm: summary(speeds[arm], counts[arm]) for arm in arms}
            pairs = [("target_only", "none"), ("rejection", "none")]
            pairs += [("none", "transformers")] if "transformers" in arms else []
            ratios = {f"{a} / {b}": paired_ratio(speeds[a], speeds[b]) for a, b in pairs}
            results[f"{name}, batch {batch}"] = {"arms": rows, "ratios": ratios}
            print(f"\n{model.name} {dtype}, {name}, batch {batch}, {args.threads} threads", flush=True)
            for arm, row in rows.items():
                print(f"  {arm:14s} {row}", flush=True)
            print(f"  {ratios}", flush=True)
    return results


def main() -> None:
    """Run the requested workloads and write one JSON."""
    parser = bench_parser(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="prompts per row and repeat")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--models", nargs="+", choices=["shipped", "random27m"], default=["shipped", "random27m"]
    )
    parser.add_argument("--shipped", type=Path, default=resolve("shipped:models/tiny"))
    args = parser.parse_args()
    load, results = load_average(), {}
    if "shipped" in args.models:
        results["shipped float32"] = bench_model(args.shipped, "float32", swe_workloads(args.shipped), args)
    if "random27m" in args.models:
        with tempfile.TemporaryDirectory() as directory:
            model = random_model(Path(directory) / "random27m")
            generator = torch.Generator().manual_seed(0)
            prompts = [torch.randint(2, 4096, (40,), generator=generator).tolist() for _ in range(64)]
            work = Workload([[prompt] for prompt in prompts], (), NEW_TOKENS)
            results["random 27M bfloat16"] = bench_model(model, "bfloat16", {"fixed": work}, args)
    report = {
        "question": "tokens per second of the embedded engine and of transformers generate",
        **decoding_provenance(args, load),
        "results": results,
    }
    write_result(args.json, report)


def decoding_provenance(args: argparse.Namespace, load: Load) -> dict[str, Any]:
    """Return the provenance of decoding figures, with the settings that all such benches share."""
    report = provenance(args, load, packages=("torch", "transformers"))
    fixed = {"temperature": 1.0, "gamma": GAMMA, "new_tokens": NEW_TOKENS, "turn_tokens": TURN_TOKENS}
    report["config"] = fixed | report["config"]
    return report


if __name__ == "__main__":
    main()
