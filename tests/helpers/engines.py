"""Start an embedded engine on a random checkpoint, run requests, and recompute with transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.rollout.embedded import EmbeddedEngine
from rlpipe.types import GenerateRequest, GenerateResult, SamplingParams


@contextmanager
def running_engine(
    path: Path, mode: str = "rejection", gamma: int = 3, *, draft_vocab: str = "", **rollout: Any
) -> Iterator[EmbeddedEngine]:
    """An engine on the CPU (unless `device` says otherwise) that is closed at the end."""
    settings = {"max_running": 8, "max_context": 128, "device": "cpu"} | rollout
    spec = SpecConfig(mode=mode, gamma=gamma, draft_vocab=draft_vocab)
    engine = EmbeddedEngine(RolloutConfig(**settings), spec, path)
    try:
        yield engine
    finally:
        engine.close()


def request(
    name: object, prompt: Sequence[int], session: str | None = None, **sampling: Any
) -> GenerateRequest:
    """A request whose seed is its number, unless given."""
    sampling.setdefault("seed", name if isinstance(name, int) else 0)
    return GenerateRequest(
        request_id=str(name), prompt_ids=list(prompt), session_id=session, sampling=SamplingParams(**sampling)
    )


def generate(engine: EmbeddedEngine, *requests: GenerateRequest) -> list[GenerateResult]:
    """All requests at once, on an event loop of its own."""

    async def run() -> list[GenerateResult]:
        return await asyncio.gather(*(engine.generate(one) for one in requests))

    return asyncio.run(run())


def transformers_logits(
    path: Path, dtype: torch.dtype = torch.float32
) -> Callable[[Sequence[int]], torch.Tensor]:
    """A function from token ids to [T, V] logits of transformers' own model."""
    import transformers

    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

    @torch.no_grad()
    def logits(ids: Sequence[int]) -> torch.Tensor:
        return model(torch.tensor([list(ids)])).logits[0]

    return logits


def recomputed(
    logits: Callable, prompt: Sequence[int], result: GenerateResult, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the output tokens and entropies at them, each [n], from one full forward pass."""
    rows = logits([*prompt, *result.output_ids.tolist()])[len(prompt) - 1 : -1] / temperature
    log_p = rows.log_softmax(-1)
    sampled = torch.tensor(result.output_ids.tolist()).unsqueeze(1)
    return log_p.gather(1, sampled).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def worst_logprob_error(
    logits: Callable, prompt: Sequence[int], result: GenerateResult, temperature: float = 1.0
) -> float:
    """Largest difference of the engine's logprobs and entropies from transformers'."""
    logprobs, entropies = recomputed(logits, prompt, result, temperature)
    return max(
        (logprobs - torch.tensor(result.logprobs)).abs().max().item(),
        (entropies - torch.tensor(result.entropies)).abs().max().item(),
    )
