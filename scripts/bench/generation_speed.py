"""How many tokens a second does a real model generate on a CPU, by engine?

    python scripts/bench/generation_speed.py --model DIR --json OUT [--draft-vocab FILE]
        [--sglang] [--llama-server PROGRAM --gguf FILE]

Compares the embedded engine with transformers and, if named, SGLang and llama.cpp. Arms run in separate
processes and take turns within a repeat (`rollout_speed`). Prompts are chat requests, sampled at temperature
1, and every answer has exactly --tokens tokens. The engine drafts if the checkpoint has an MTP layer.
--sglang adds two arms: an SGLang server with the same settings and no drafts, stock and with rlpipe's plugin.
--llama-server adds llama.cpp's server with a slot for each request of the batch; --gguf is the same model in
the same format, as its convert_hf_to_gguf.py writes it. If --plain-model is given, transformers and SGLang
read it: a checkpoint with the same weights, in a layout that they know. The floor of a step at batch 1 is the
time to read as many bytes as the target's weights have. The reading rate is measured in every repeat of the
same run, and the best one counts.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

import httpx  # noqa: E402
import torch  # noqa: E402
from harness import ArmProcess, bench_parser, load_average, paired_ratio, provenance, write_result  # noqa: E402
from rollout_speed import EngineArm, TransformersArm, Workload, decode_in_turns, start_arms, summary, total  # noqa: E402

from rlpipe.actors.engines import make_engine  # noqa: E402
from rlpipe.config.openmp import spin_briefly  # noqa: E402
from rlpipe.config.rollout import Dtype, EngineKind, RolloutConfig  # noqa: E402
from rlpipe.config.run import Config, ModelConfig, RunSettings  # noqa: E402
from rlpipe.config.spec import SpecConfig, SpecMode  # noqa: E402
from rlpipe.models.checkpoint import has_mtp, is_mtp_weight, read_config, read_weights  # noqa: E402
from rlpipe.rollout.chat import ChatFormat  # noqa: E402
from rlpipe.rollout.embedded.huge_pages import HugePages  # noqa: E402
from rlpipe.types import SpecCounts  # noqa: E402
from tests.helpers.certified import LLAMA_ALL_TOKENS, llama_server  # noqa: E402

TOPICS = ("the sea", "a bicycle", "bread", "winter", "a lost key", "music", "a small town", "the moon")
REQUESTS = ("Write three sentences about {}.", "Explain {} to a child.", "Tell a short story about {}.")


def chat_workload(model: Path, count: int, *, tokens: int, temperature: float) -> Workload:
    """Return chat requests of one turn, whose answers have exactly `tokens` tokens."""
    chat = ChatFormat.from_pretrained(model)
    requests = [request.format(topic) for topic in TOPICS for request in REQUESTS]
    prompts = [chat.initial([{"role": "user", "content": requests[i % len(requests)]}]) for i in range(count)]
    return Workload([[list(prompt)] for prompt in prompts], (), tokens, temperature)


class ServerArm(EngineArm):
    """An SGLang server on this machine's cores, for as many requests as the batch; without drafts."""

    def __init__(self, model: Path, batch: int, threads: int, dtype: str, *, plugin: bool) -> None:
        self._folder = tempfile.TemporaryDirectory()
        config = Config(
            run=RunSettings(dir=self._folder.name),
            model=ModelConfig(path=str(model)),
            spec=SpecConfig(mode=SpecMode.NONE),
            rollout=RolloutConfig(
                engine=EngineKind.SGLANG,
                device="cpu",
                dtype=Dtype(dtype),
                threads=threads,
                max_running=batch,
                max_context=512,
                ignore_eos=True,
            ),
        )
        config.rollout.sglang.plugin = plugin
        self._engine = make_engine(config, lambda kind, **fields: print(kind, fields, file=sys.stderr))
        self._runs = 0

    def close(self) -> None:
        """Stop the server."""
        self._engine.close()
        self._folder.cleanup()


class LlamaArm:
    """llama.cpp's server with a slot for each request of the batch, and no cut of the distribution."""

    def __init__(self, program: str, gguf: Path, batch: int, threads: int) -> None:
        sizes = ["--ctx-size", str(512 * batch), "--parallel", str(batch), "--threads", str(threads)]
        self._open = ExitStack()
        folder = self._open.enter_context(tempfile.TemporaryDirectory())
        self._url = self._open.enter_context(llama_server(program, str(gguf), Path(folder), *sizes))

    def run(self, work: Workload, batch: int) -> tuple[int, list[SpecCounts]]:
        """Return the number of generated tokens, and no acceptance."""
        body = {"n_predict": work.max_new_tokens, "temperature": work.temperature, **LLAMA_ALL_TOKENS}
        body |= {"ignore_eos": True, "return_tokens": True, "cache_prompt": False}

        async def answer_all() -> list[int]:
            async with httpx.AsyncClient(base_url=self._url, timeout=600, trust_env=False) as client:
                requests = [{"prompt": turns[0], **body} for turns in work.conversations]
                answers = await asyncio.gather(*(client.post("/completion", json=one) for one in requests))
                return [len(answer.raise_for_status().json()["tokens"]) for answer in answers]

        counts = asyncio.run(answer_all())
        assert set(counts) == {work.max_new_tokens}, f"llama.cpp answered with {counts} tokens"
        return sum(counts), []

    def close(self) -> None:
        """Stop the server."""
        self._open.close()


class ReadArm:
    """An arm that reads as many bytes as a model's weights have, and returns bytes per second."""

    def __init__(self, size: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self._data = HugePages().copy(torch.ones(size // 4))  # as the engine's weights

    def run(self) -> float:
        """Return the best rate of ten reads."""
        best = 0.0
        for _ in range(10):
            started = time.perf_counter()
            self._data.sum()
            best = max(best, 4 * len(self._data) / (time.perf_counter() - started))
        return best


def target_bytes(model: Path, dtype: str) -> int:
    """Return the size in a format of the weights that a decode step reads; a tied head counts once."""
    sizes = {n: tensor.numel() for n, tensor in read_weights(model).items() if not is_mtp_weight(n)}
    # The head counts even when tied; of the embedding, a step reads one row per token.
    numbers = sum(sizes.values()) - sizes["model.embed_tokens.weight"]
    return numbers * getattr(torch, dtype).itemsize


def main() -> int:
    """Run all batches, print and write the result; return the exit status."""
    parser = bench_parser(__doc__, repeats=3)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of every arm")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--gamma", type=int, default=1)
    parser.add_argument("--draft-vocab", default="", help="as spec.draft_vocab")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--sglang", action="store_true", help="also SGLang's CPU server")
    parser.add_argument("--llama-server", default="", help="llama.cpp's program of this name")
    parser.add_argument("--gguf", type=Path, help="the model, as its convert_hf_to_gguf.py writes it")
    parser.add_argument("--plain-model", type=Path, help="for transformers and SGLang, if another")
    args = parser.parse_args()

    spin_briefly()
    load, size = load_average(), target_bytes(args.model, args.dtype)
    plain = args.plain_model or args.model
    results: dict[str, Any] = {}
    rates: list[float] = []
    for batch in args.batches:
        arms: dict[str, Callable[[], Any]] = {}

        def engine(spec: SpecConfig, batch: int = batch) -> Callable[[], Any]:
            return partial(EngineArm, args.model, spec, batch, args.threads, args.dtype)

        arms["none"] = engine(SpecConfig(mode=SpecMode.NONE))
        if has_mtp(read_config(args.model)):
            arms["drafts"] = engine(SpecConfig(gamma=args.gamma, draft_vocab=args.draft_vocab))
        arms["transformers"] = partial(TransformersArm, plain, args.dtype)
        if args.sglang:
            for name, plugin in {"sglang": False, "sglang with plugin": True}.items():
                arms[name] = partial(ServerArm, plain, batch, args.threads, args.dtype, plugin=plugin)
        if args.llama_server:
            arms["llama.cpp"] = partial(LlamaArm, args.llama_server, args.gguf, batch, args.threads)

        work = chat_workload(args.model, max(batch, 2), tokens=args.tokens, temperature=1.0)
        running = start_arms(arms, args.threads)
        speeds, counts = decode_in_turns(running, work, batch, args.repeats)
        for arm in running.values():
            arm.close()

        reader = ArmProcess(partial(ReadArm, size, args.threads))
        rates += [reader.run() for _ in range(args.repeats)]
        reader.close()

        rows = {arm: summary(speeds[arm], total(counts[arm])) for arm in arms}
        ratios = {f"none / {arm}": round(paired_ratio(speeds["none"], speeds[arm]), 3) for arm in arms}
        step = 1e3 * batch / statistics.median(speeds["none"])
        results[f"batch {batch}"] = {"arms": rows, "ratios": ratios, "ms_per_step_none": round(step, 2)}
        print(f"batch {batch}: {ratios}, {step:.1f} ms a step", flush=True)
        for arm, row in rows.items():
            print(f"  {arm:18s} {row}", flush=True)

    floor = 1e3 * size / max(rates)
    report = {
        "question": "tokens per second of a real model on a CPU, by engine",
        **provenance(args, load, packages=("torch", "transformers")),
        "floor": {"bytes": size, "gb_per_s": round(max(rates) / 1e9, 1), "ms_per_step": round(floor, 2)},
        "results": results,
    }
    print(report["floor"])
    write_result(args.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
