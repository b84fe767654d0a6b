"""A real SGLang server loads an exported EAGLE-3 draft and drafts what the embedded engine drafts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.rollout.sglang.arguments import command, server_environment
from rlpipe.rollout.sglang.client import SglangClient
from rlpipe.rollout.sglang.environment import find_environment
from rlpipe.rollout.sglang.server import ServerProcess, pick_port
from tests.helpers.driven_engine import driven_engine
from tests.helpers.eagle3_drafts import write_random_draft
from tests.helpers.engines import request
from tests.helpers.sglang import needs_sglang
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.integration
VOCAB, GAMMA, TOKENS = 6, 3, 40
KNOWN = [0, 2, 3, 5]  # the draft's vocabulary
EAGLE3 = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", str(GAMMA)]
EAGLE3 += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(GAMMA + 1)]


def served(target, draft, prompts, log):
    """meta_info and tokens of greedy turns."""
    rollout = RolloutConfig(engine="sglang", max_running=16, max_context=128, device="cpu", threads=1)
    rollout.sglang.memory_fraction = 0.3
    rollout.sglang.extra_arguments = [*EAGLE3, "--speculative-draft-model-path", str(draft)]
    python, port = find_environment(rollout.sglang, on_gpu=False).python, pick_port("127.0.0.1", 0)
    words = command(rollout, SpecConfig(mode="none"), target, port=port, on_gpu=False, version=0)
    server = ServerProcess([str(python), *words], server_environment(rollout, False), log)

    async def ask():
        client = SglangClient(f"http://127.0.0.1:{port}", 120.0)
        try:
            await server.wait_until(lambda: client.answers("/health", 5.0), 300.0)
            sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True}
            return await client.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
        finally:
            await client.close()

    try:
        return asyncio.run(ask())
    finally:
        server.stop()


def test_sglang_drafts_what_the_embedded_engine_drafts(tmp_path):
    """Greedy, a reduced vocabulary (which SGLang takes without rejection sampling only): tokens and steps.

    Turns end where drafts may still stand: what was accepted beyond is not compared.
    """
    needs_sglang()
    shape = {"vocab": VOCAB, "layers": 4, "scale": 0.3, "head_scale": 0.3}
    target = write_random_checkpoint(tmp_path / "target", "qwen2", **shape)
    draft = write_random_draft(tmp_path / "draft", target, ids=KNOWN, layers=[0, 1, 2])
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, int(rng.integers(2, 20))).tolist() for _ in range(12)]
    with driven_engine(target, "greedy", gamma=GAMMA, drafter="eagle3", draft_path=draft) as driven:
        asked = [request(i, p, temperature=0, max_new_tokens=TOKENS) for i, p in enumerate(prompts)]
        ours = driven.generate(*asked)
    theirs = served(target, draft, prompts, tmp_path / "server.log")
    assert [t["output_ids"] for t in theirs] == [o.output_ids for o in ours]
    counted = [(t["meta_info"]["spec_num_correct_drafts"], t["meta_info"]["spec_verify_ct"]) for t in theirs]
    expected = [(sum(o.spec.accepted), o.spec.verify_steps) for o in ours]
    assert [verified for _, verified in counted] == [verified for _, verified in expected]
    accepted = sum(sum(o.spec.accepted) for o in ours)
    assert len({verified for _, verified in expected}) > 3 and 0 < accepted < GAMMA * sum(
        o.spec.verify_steps for o in ours
    )
