"""Do the tokens of a real model have exactly the target's distribution, in every decoding mode? A G-test.

    python scripts/bench/real_first_tokens.py --model DIR --json OUT [--turns 4000] [--draft-vocab checkpoint]
        [--modes none rejection block tree target_only] [--engine embedded | sglang]

One chat request is sampled --turns times at temperature 1, four tokens each: the first follows the prompt,
the others follow verify steps. Given the tokens before it, each token is one sample from the row that
transformers computes after them in float32. A row's 63 likeliest tokens are one cell each, and all others
together are one cell. Scores are standard normal, by position and for all four
(`rlpipe/certify/statistics.py`). For a correct engine the largest of the five exceeds 4.1 once in 10,000 runs
(alpha 1e-4). To show power, the same tokens are also tested against the distribution at a temperature of
1 + 16 / sqrt(turns), and must then score above 4.1.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from rlpipe.config.openmp import spin_briefly  # noqa: E402

spin_briefly()  # before torch is loaded: the engine decodes in this process

import numpy as np  # noqa: E402
import torch  # noqa: E402
from harness import bench_parser, load_average, provenance, write_result  # noqa: E402

from rlpipe.actors.engines import make_engine  # noqa: E402
from rlpipe.certify.dialects import Answer  # noqa: E402
from rlpipe.certify.evidence import draws_at, pack  # noqa: E402
from rlpipe.certify.reference import TransformersModel, read_rows  # noqa: E402
from rlpipe.certify.statistics import normal_score  # noqa: E402
from rlpipe.config.rollout import EngineKind, RolloutConfig  # noqa: E402
from rlpipe.config.run import Config, ModelConfig, RunSettings  # noqa: E402
from rlpipe.config.spec import SpecConfig, SpecMode  # noqa: E402
from rlpipe.rollout.chat import ChatFormat  # noqa: E402
from rlpipe.types import GenerateRequest, SamplingParams  # noqa: E402

REQUEST = "Say hello to a friend in one short sentence."
DEPTH, LIMIT, AT_ONCE, SIMULATIONS = 4, 4.1, 32, 500


def sample(args: Any, prompt: np.ndarray, mode: SpecMode) -> np.ndarray:
    """Return the tokens of all turns, [turns, DEPTH]."""
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            run=RunSettings(dir=folder),
            model=ModelConfig(path=str(args.model)),
            spec=SpecConfig(mode=mode, gamma=args.gamma, draft_vocab=args.draft_vocab)
            if mode is not SpecMode.NONE
            else SpecConfig(mode=mode),
            rollout=RolloutConfig(
                engine=EngineKind(args.engine),
                device="cpu",
                threads=args.threads,
                max_running=AT_ONCE,
                max_context=len(prompt) + 16,
                ignore_eos=True,
            ),
        )
        config.rollout.sglang.python = args.sglang_python
        engine = make_engine(config, lambda kind, **fields: print(kind, fields, file=sys.stderr))
        capacity = asyncio.Semaphore(AT_ONCE)

        async def turn(number: int) -> Any:
            sampling = SamplingParams(max_new_tokens=DEPTH, temperature=1.0, seed=number)
            async with capacity:
                return await engine.generate(
                    GenerateRequest(request_id=str(number), prompt_ids=prompt, sampling=sampling)
                )

        async def turns() -> list[Any]:
            return await asyncio.gather(*(turn(number) for number in range(args.turns)))

        try:
            results = asyncio.run(turns())
        finally:
            engine.close()
    return np.stack([result.output_ids[:DEPTH] for result in results])


def position_scores(
    model: TransformersModel, prompt: np.ndarray, tokens: np.ndarray, temperature: float = 1.0
) -> tuple[list[float], list[int]]:
    """Return standard normal scores by position, then of their sum, and the prefixes at each position."""
    samples = pack(0, temperature, [Answer(ids=row) for row in tokens.tolist()], tokens[:, 0])
    samples.rows = read_rows(model, prompt.tolist(), tokens, temperature)
    draws, rng = [draws_at([samples], position) for position in range(DEPTH)], np.random.default_rng(0)

    statistics = [one.g() for one in draws]
    simulated = [np.array([one.g(one.simulate(rng)) for _ in range(SIMULATIONS)]) for one in draws]
    pairs = zip([*statistics, sum(statistics)], [*simulated, sum(simulated)], strict=True)
    scores = [normal_score(value, null.mean(), null.var()) for value, null in pairs]
    return scores, [len(one.probs) for one in draws]


def main() -> int:
    """Sample and test every mode and write the result; return 1 if a mode's distribution is wrong."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", default="embedded", choices=["embedded", "sglang"])
    parser.add_argument("--sglang-python", default="", help="as rollout.sglang.python")
    parser.add_argument("--modes", nargs="+", default=["none", "rejection", "block", "tree", "target_only"])
    parser.add_argument("--turns", type=int, default=4000)
    parser.add_argument("--gamma", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draft-vocab", default="", help="as spec.draft_vocab")
    args = parser.parse_args()
    load, off = load_average(), 16 / args.turns**0.5

    chat = ChatFormat.from_pretrained(args.model)
    prompt = np.asarray(chat.initial([{"role": "user", "content": REQUEST}]))
    model = TransformersModel(args.model, "float32")
    torch.set_num_threads(args.threads)

    results: dict[str, Any] = {}
    for mode in args.modes:
        started = time.monotonic()
        tokens = sample(args, prompt, SpecMode(mode))
        seconds = time.monotonic() - started

        scores, prefixes = position_scores(model, prompt, tokens)
        wrong, _ = position_scores(model, prompt, tokens, temperature=1 + off)
        results[mode] = {
            "largest_score": round(max(scores), 3),
            "scores": [round(score, 3) for score in scores],
            "scores_of_a_wrong_law": [round(score, 3) for score in wrong],
            "prefixes": prefixes,
            "seconds": round(seconds, 1),
        }
        print(mode, results[mode], flush=True)

    report = {
        "question": "tokens of a real model against transformers' float32 distribution, G-test by position",
        **provenance(args, load, packages=("torch", "transformers")),
        "alpha": 1e-4,
        "limit": LIMIT,
        "wrong_temperature": round(1 + off, 4),
        "results": results,
    }
    write_result(args.json, report)
    judged = results.values()
    return int(any(r["largest_score"] > LIMIT or max(r["scores_of_a_wrong_law"]) < LIMIT for r in judged))


if __name__ == "__main__":
    sys.exit(main())
