"""The acceptance of a checkpoint's own draft, in the embedded engine with the server's mode and gamma.

Tests ensure that this engine and SGLang have the same acceptance. If a server has another acceptance, its
draft has other weights, or it verifies by another rule.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rlpipe.certify.dialects import Features, Prompt
from rlpipe.config.drafters import Drafter
from rlpipe.config.rollout import Dtype, RolloutConfig
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.loop.event_loop import run_coroutine
from rlpipe.models.checkpoint import read_config
from rlpipe.rollout.embedded import EmbeddedEngine
from rlpipe.types import GenerateRequest, GenerateResult, SamplingParams

_RUNNING = 32
OwnDraft = Callable[[Sequence[Prompt], Features, int, int], list[np.ndarray]]


def own_draft(model: Path, draft: Path | None, features: Features) -> OwnDraft | str:
    """Return a function that counts accepted drafts of the checkpoint's own draft, or why none can be made.

    draft: directory of an EAGLE-3 draft; None: the checkpoint's MTP layer.
    """
    if not features.drafts:
        return "the server reports no acceptance"
    if features.mode not in set(SpecMode) - {SpecMode.TREE, SpecMode.NONE}:
        return f"the server drafts as {features.mode!r}, which has no exact counterpart here"
    if draft is None and not read_config(model).get("num_nextn_predict_layers"):
        return "the checkpoint has no draft of its own: name the server's with --draft"

    def count(prompts: Sequence[Prompt], features: Features, answers: int, tokens: int) -> list[np.ndarray]:
        spec = SpecConfig(mode=SpecMode(features.mode), gamma=features.gamma)
        if draft is not None:
            spec.drafter, spec.draft_path = Drafter.EAGLE3, str(draft)

        # Every answer has the same length, like the server's answers.
        longest = max(len(prompt.ids) for prompt in prompts)
        rollout = RolloutConfig(
            max_running=_RUNNING,
            max_context=longest + tokens + features.gamma + 2,
            dtype=Dtype(features.dtype or "float32"),
            threads=os.cpu_count() or 1,
            ignore_eos=True,
        )
        engine = EmbeddedEngine(rollout, spec, model)

        async def generate() -> list[list[GenerateResult]]:
            return [
                await asyncio.gather(
                    *(engine.generate(_request(prompt, number * answers + i, tokens)) for i in range(answers))
                )
                for number, prompt in enumerate(prompts)
            ]

        try:
            results = run_coroutine(generate())
        finally:
            engine.close()

        return [
            np.array([[sum(one.spec.accepted), one.spec.verify_steps] for one in some]) for some in results
        ]

    return count


def _request(prompt: Prompt, number: int, tokens: int) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=tokens, temperature=1.0, seed=number)
    return GenerateRequest(request_id=f"own-{number}", prompt_ids=np.array(prompt.ids), sampling=sampling)
