"""Sequences to fit an MTP layer on: read from a file, or sampled from the model itself.

If no prompts are passed, the model also writes the prompts: it continues the chat template's prefix of a user
turn, and then answers the text that it wrote.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rlpipe.config.rollout import Dtype, RolloutConfig
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.convert.closed_form import Sample
from rlpipe.loop.event_loop import run_coroutine
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config
from rlpipe.rollout.chat import ChatFormat
from rlpipe.rollout.embedded import EmbeddedEngine
from rlpipe.types import GenerateRequest, SamplingParams

_TURN = 64  # maximum number of tokens of a sampled turn
_RUNNING = 32


def read_samples(file: Path, vocabulary: int) -> list[Sample]:
    """Read sequences of token ids from a plain or gzipped file, one JSON object or list per line.

    Args:
        file: each line is {"token_ids": [...], "loss_mask": [...]} or a list of token ids. Without loss_mask,
            every token counts as sampled. The header line of an `adapt.rollouts` file is skipped.
        vocabulary: number of tokens in the model's vocabulary.

    Raises:
        ValueError: the file cannot be read, has no sequence, or has a token id outside the vocabulary.
    """
    try:
        text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        lines = [json.loads(line) for line in text.decode().splitlines() if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"--rollouts {file} cannot be read: {error}") from None

    samples = []
    for number, line in enumerate(lines, 1):
        if isinstance(line, dict) and "rollouts_of" in line:
            continue
        samples.append(_sample(line, f"--rollouts {file}:{number}", vocabulary))
    if not samples:
        raise ValueError(f"--rollouts {file} has no sequence: give lines with token_ids.")
    return samples


def _sample(line: object, where: str, vocabulary: int) -> Sample:
    """Return the sequence that a line of the file describes. Raises ValueError if it is malformed."""
    ids, mask = (line.get("token_ids"), line.get("loss_mask")) if isinstance(line, dict) else (line, None)
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < vocabulary for i in ids):
        raise ValueError(f"{where}: not a list of token ids from 0 to {vocabulary - 1} (`token_ids`).")
    if mask is not None and (not isinstance(mask, list) or len(mask) != len(ids)):
        raise ValueError(f"{where}: loss_mask must be as long as token_ids ({len(ids)}).")
    sampled = torch.ones(len(ids), dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    return Sample(ids=torch.tensor(ids), sampled=sampled)


def sample_model(
    model: Path, *, tokens: int, seed: int, prompts: Sequence[str] | None, temperature: float = 1.0
) -> list[Sample]:
    """Sample one-turn conversations from a model.

    Args:
        model: checkpoint directory.
        tokens: approximate total number of tokens of the answers.
        seed: random seed of the sampling.
        prompts: user messages, used in rotation; if None, the model writes them.
        temperature: sampling temperature; 0 takes the most probable token.

    Raises:
        ValueError: the model has no chat template, or the engine cannot run it.
    """
    chat = ChatFormat.from_pretrained(model)
    count = max(8, -(-tokens // _TURN))
    reach = min(read_architecture(read_config(model)).max_position, 1024)
    rollout = RolloutConfig(
        max_running=_RUNNING, max_context=reach, dtype=Dtype.FLOAT32, threads=torch.get_num_threads()
    )
    engine = EmbeddedEngine(rollout, SpecConfig(mode=SpecMode.NONE), model)
    try:
        if prompts is None:
            prefix = _user_prefix(chat)
            questions = _generate(engine, chat, [prefix] * count, seed=seed, temperature=temperature)
            # A question that the token limit cut is used as it is; an empty one is replaced by a greeting.
            prompts = [chat.decode(ids).strip() or "Hello" for ids in questions]

        texts = [prompts[i % len(prompts)] for i in range(count)]
        starts = [chat.initial([{"role": "user", "content": text}])[-(reach - _TURN) :] for text in texts]
        answers = _generate(engine, chat, starts, seed=seed + count, temperature=temperature)
    finally:
        engine.close()

    return [
        Sample(
            ids=torch.tensor(start + answer),
            sampled=torch.tensor([False] * len(start) + [True] * len(answer)),
        )
        for start, answer in zip(starts, answers, strict=True)
    ]


def _user_prefix(chat: ChatFormat) -> list[int]:
    """Return the tokens that a chat template writes before the text of a user message."""
    first, second = (chat.initial([{"role": "user", "content": text}]) for text in ("1", "What"))
    return first[: next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)]


def _generate(
    engine: EmbeddedEngine, chat: ChatFormat, prompts: Sequence[list[int]], *, seed: int, temperature: float
) -> list[list[int]]:
    """Sample one turn after each prompt; prompt n is sampled with the seed `seed + n`."""
    stops = tuple(token for token in chat.stop_token_ids if isinstance(token, int))
    requests = [
        GenerateRequest(
            request_id=f"graft-{seed + number}",
            prompt_ids=np.array(prompt),
            sampling=SamplingParams(
                temperature=temperature,
                max_new_tokens=_TURN,
                stop_token_ids=stops,
                seed=seed + number,
            ),
        )
        for number, prompt in enumerate(prompts)
    ]

    async def generate() -> list[list[int]]:
        results = await asyncio.gather(*(engine.generate(request) for request in requests))
        return [result.output_ids.tolist() for result in results]

    return run_coroutine(generate())
