"""Are the embedded engine's greedy tokens those of transformers, in float32, token for token?

    python scripts/bench/greedy_equals.py --model DIR --json OUT [--prompts 200] [--tokens 32] [--gamma 3]

transformers decodes each prompt by itself. The engine decodes many at once, without drafts and, if the
checkpoint has an MTP layer, with drafts. If --plain-model is given, transformers reads it: the same weights
in a layout that it knows. A prompt counts as different at its first differing token. There the gap between
transformers' two best logits is reported, because float32 rounding may choose either of two equal logits.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from rlpipe.config.openmp import spin_briefly  # noqa: E402

spin_briefly()  # before torch is loaded: the engine decodes in this process

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from generation_speed import chat_workload  # noqa: E402
from harness import bench_parser, load_average, provenance, write_result  # noqa: E402

from rlpipe.config.rollout import RolloutConfig  # noqa: E402
from rlpipe.config.spec import SpecConfig, SpecMode  # noqa: E402
from rlpipe.models.checkpoint import has_mtp, read_config  # noqa: E402
from rlpipe.rollout.embedded import EmbeddedEngine  # noqa: E402
from rlpipe.types import GenerateRequest, SamplingParams  # noqa: E402


@torch.inference_mode()
def transformers_greedy(model: Any, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """Return the greedy tokens after a prompt, and the gap of the two best logits at each."""
    ids, cache, found, gaps = torch.tensor([prompt]), None, [], []
    for _ in range(tokens):
        output = model(ids, past_key_values=cache, use_cache=True)
        cache, best = output.past_key_values, output.logits[0, -1].float().topk(2)
        found.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        ids = best.indices[:1].unsqueeze(0)
    return found, gaps


def engine_greedy(path: Path, spec: SpecConfig, prompts: list[list[int]], args: Any) -> list[list[int]]:
    """Return the engine's greedy tokens after each prompt."""
    longest = max(map(len, prompts)) + args.tokens + 1
    config = RolloutConfig(max_running=16, max_context=longest, threads=args.threads, device="cpu")
    engine = EmbeddedEngine(config, spec, path)

    async def generate(number: int, prompt: list[int]) -> list[int]:
        sampling = SamplingParams(max_new_tokens=args.tokens, temperature=0.0, seed=number)
        request = GenerateRequest(request_id=str(number), prompt_ids=np.asarray(prompt), sampling=sampling)
        return (await engine.generate(request)).output_ids.tolist()

    async def everything() -> list[list[int]]:
        return await asyncio.gather(*(generate(i, prompt) for i, prompt in enumerate(prompts)))

    try:
        return asyncio.run(everything())
    finally:
        engine.close()


def main() -> int:
    """Compare, print and write the result; return 1 if a token differs."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--plain-model", type=Path, help="for transformers, if another")
    parser.add_argument("--draft-vocab", default="", help="as spec.draft_vocab")
    args = parser.parse_args()
    load = load_average()

    # The chat requests repeat, so each later round is cut at another position: all prompts differ.
    turns = chat_workload(args.model, args.prompts, tokens=args.tokens, temperature=0.0).conversations
    prompts = [turn[0] for turn in turns]
    distinct = len({tuple(prompt) for prompt in prompts})
    prompts = [prompt[: len(prompt) - i // distinct] for i, prompt in enumerate(prompts)]

    plain = args.plain_model or args.model
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    torch.set_num_threads(args.threads)
    expected = [transformers_greedy(model, prompt, args.tokens) for prompt in prompts]
    del model

    specs = {"none": SpecConfig(mode=SpecMode.NONE)}
    if has_mtp(read_config(args.model)):
        specs["greedy drafts"] = SpecConfig(
            mode=SpecMode.GREEDY, gamma=args.gamma, draft_vocab=args.draft_vocab
        )
    results: dict[str, Any] = {}
    for name, spec in specs.items():
        different = []
        for number, found in enumerate(engine_greedy(args.model, spec, prompts, args)):
            tokens, gaps = expected[number]
            if found != tokens:
                first = next(i for i, (a, b) in enumerate(zip(found, tokens, strict=True)) if a != b)
                different.append({"prompt": number, "token": first, "logit_gap": gaps[first]})
        results[name] = {
            "prompts": len(prompts),
            "equal": len(prompts) - len(different),
            "different": different,
        }
        print(name, results[name], flush=True)

    report = {
        "question": "greedy tokens of the embedded engine against transformers', float32",
        **provenance(args, load, packages=("torch", "transformers")),
        "results": results,
    }
    write_result(args.json, report)
    return int(any(result["different"] for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
