"""Do the first tokens of an SGLang server with drafts have exactly the target's distribution? G-tests.

    python scripts/bench/first_tokens.py --json OUT [--tokens 1_000_000] [--device cuda] [--mode rejection]

A random model has six tokens, so the distribution of the three tokens after a prompt is enumerated in
float64. A request samples --copies turns of four tokens, so that all three follow a verify step. Scores are
standard normal, by depth and for all three together. For a correct server the largest score exceeds 4.1 once
in 10,000 runs (alpha 1e-4 over four). To show power, the same turns are also compared with the distribution
at a temperature of 1 + --off, and must then score above 4.1.

With --reduced, an EAGLE-3 draft with a vocabulary of four of the six tokens replaces the MTP layer; with
--draft-vocab the MTP layer drafts among those four (`spec.draft_vocab`).
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import bench_parser, load_average, provenance, write_result

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rlpipe.config.draft_vocab import write_table  # noqa: E402
from rlpipe.config.drafters import Drafter  # noqa: E402
from rlpipe.config.rollout import RolloutConfig  # noqa: E402
from rlpipe.config.spec import SpecConfig  # noqa: E402
from rlpipe.rollout.sglang import SglangEngine  # noqa: E402
from tests.helpers.eagle3_drafts import write_random_draft  # noqa: E402
from tests.helpers.engines import transformers_logits  # noqa: E402
from tests.helpers.goodness_of_fit import Law  # noqa: E402
from tests.helpers.tiny_checkpoint import write_random_checkpoint  # noqa: E402

VOCAB, DEPTH, PROMPT, AT_ONCE = 6, 3, [2, 0, 4, 1], 8
KNOWN, READ = [0, 2, 3, 5], [0, 1, 2]  # vocabulary of the draft of --reduced, and the layers it reads


async def turns(engine: SglangEngine, count: int, copies: int) -> np.ndarray:
    """Return [count, DEPTH] tokens of turns that the server samples."""
    sampling = {"temperature": 1.0, "max_new_tokens": DEPTH + 1, "ignore_eos": True}
    room, body = asyncio.Semaphore(AT_ONCE), {"input_ids": PROMPT}

    async def asked(some: int) -> list[list[int]]:
        async with room:
            told = await engine._http.post("/generate", body | {"sampling_params": sampling | {"n": some}})
        return [one["output_ids"][:DEPTH] for one in (told if isinstance(told, list) else [told])]

    sizes = [copies] * (count // copies) + [count % copies] * (count % copies > 0)
    return np.array([row for rows in await asyncio.gather(*map(asked, sizes)) for row in rows])


def main() -> int:
    """Test, write one JSON, and return the exit status: 1 if a test fails."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--copies", type=int, default=256)
    parser.add_argument("--mode", default="rejection")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--off", type=float, default=0.0, help="0: 16 / sqrt(turns)")
    parser.add_argument("--reduced", action="store_true", help="an EAGLE-3 draft that knows four tokens")
    parser.add_argument("--draft-vocab", action="store_true", help="the MTP layer drafts among four tokens")
    parser.add_argument("--stock", action="store_true", help="a server without rlpipe's plugin")
    given, load = parser.parse_args(), load_average()
    count = -(-given.tokens // DEPTH)
    off = given.off or 16 / count**0.5
    with tempfile.TemporaryDirectory() as folder:
        shape = {"vocab": VOCAB, "layers": 4, "scale": 0.3, "head_scale": 0.3}
        model = write_random_checkpoint(Path(folder) / "model", "mimo", **shape)
        config = RolloutConfig(engine="sglang", device=given.device, max_running=256, max_context=64)
        config.sglang.plugin = not given.stock
        spec = SpecConfig(mode=given.mode, gamma=DEPTH)
        if given.reduced:
            spec.drafter = Drafter.EAGLE3
            spec.draft_path = str(write_random_draft(Path(folder) / "draft", model, ids=KNOWN, layers=READ))
        if given.draft_vocab:
            write_table(table := Path(folder) / "table.json", KNOWN)
            spec = SpecConfig(mode=given.mode, gamma=DEPTH, draft_vocab=str(table))
        engine = SglangEngine(config, spec, model, log_dir=Path(folder))
        started = time.monotonic()
        try:
            tokens = engine._call(turns(engine, count, given.copies))
            (state,) = engine._call(engine._http.read("/server_info"))["internal_states"]
        finally:
            engine.close()
        seconds, logits = time.monotonic() - started, transformers_logits(model)
        scores = Law.of([logits], PROMPT, VOCAB, DEPTH).scores(tokens)
        wrong = Law.of([lambda ids: logits(ids) / (1 + off)], PROMPT, VOCAB, DEPTH).scores(tokens)
    result = {
        "mode": given.mode,
        "plugin": not given.stock,
        "reduced": given.reduced,
        "draft_vocab": given.draft_vocab,
        "tokens": tokens.size,
        "seconds": round(seconds, 1),
        "largest_score": round(max(scores), 3),
        "scores": [round(score, 3) for score in scores],
        "scores_of_a_wrong_law": [round(score, 3) for score in wrong],
        "wrong_temperature": round(1 + off, 4),
        "judged": state.get("rlpipe_plugin", {}).get("judged"),
    }
    print(json.dumps(result))
    write_result(given.json, provenance(given, load, device=given.device) | result)
    return int(max(scores) > 4.1 or max(wrong) < 4.1)


if __name__ == "__main__":
    sys.exit(main())
