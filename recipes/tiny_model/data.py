"""Training data of the warm start: instances, traces of demonstrators, length-bucketed batches.

This module generates data (cached in the run directory), and determines loss weights and batch order. The
batch of step i is a pure function of the seed and i, so a resumed run sees the same batches as an
uninterrupted one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from recipes.tiny_model.demonstrators import Demonstrator, Messages, demonstrate
from recipes.tiny_model.generate import dedup_keys, held_out_sets, stream, take, write_jsonl
from recipes.tiny_model.settings import Settings, StageConfig
from recipes.tiny_model.tokenizer import ROLES

POOL_SEED = 1000  # separates the warm start's stream of instances from that of the shipped sets
ROLE_WEIGHT = 0.02  # of the <|assistant|> tag, which is always in the prompt
FIX = "sed "


@dataclass(slots=True)
class Trace:
    """Token ids and loss weights of one conversation, parallel."""

    ids: list[int]
    weights: list[float]


def load_instances(config: Settings, run_dir: Path) -> list[dict[str, Any]]:
    """Return the training instances, generated once and cached; none of them is in a held-out set."""
    cache = run_dir / "instances.jsonl"
    if not cache.is_file():
        held = held_out_sets(config.held_out, config.data_seed, workers=config.workers)
        refuse = {key for records in held.values() for record in records for key in dedup_keys(record)}
        source = stream("train", POOL_SEED + config.seed, refuse=refuse, workers=config.workers)
        write_jsonl(cache, take(source, config.instances, "warm-start instances"))
    return [json.loads(line) for line in cache.read_text().splitlines()]


def traces_of(
    records: Iterable[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, stage: StageConfig, seed: int
) -> list[Trace]:
    """Make one trace per record, by a demonstrator sampled from the stage's mix."""
    rng = random.Random(seed)
    kinds, weights = [Demonstrator(k) for k in stage.mix], list(stage.mix.values())
    conversations = [demonstrate(rng, r, rng.choices(kinds, weights)[0]) for r in records]
    return encode_all(tokenizer, conversations, stage)


def encode_all(
    tokenizer: PreTrainedTokenizerBase, conversations: list[Messages], stage: StageConfig
) -> list[Trace]:
    """Tokenise conversations by the chat template; give each token a loss weight."""
    texts = [message["content"] for messages in conversations for message in messages]
    bodies = iter(tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False))
    roles = {name.strip("<|>"): tokenizer.convert_tokens_to_ids(name) for name in ROLES}
    traces = []
    for messages in conversations:
        trace = Trace([], [])
        wrong = _wrong_turns(messages) if stage.mask_wrong else set()
        for turn, message in enumerate(messages):
            body = [*next(bodies).ids, tokenizer.eos_token_id]
            written = message["role"] == "assistant"
            weight = (0.0 if turn in wrong else 1.0) if written else stage.context_weight
            trace.ids += [roles[message["role"]], *body]
            trace.weights += [ROLE_WEIGHT if written else stage.context_weight] + [weight] * len(body)
        traces.append(trace)
    return traces


def _wrong_turns(messages: Messages) -> set[int]:
    """Return the turns with edits after which the test failed, and with submissions without a passed test."""
    wrong = set()
    passed = False
    for turn in range(len(messages) - 1, 0, -1):
        message = messages[turn]
        if message["role"] == "tool" and message["content"] == "OK":
            passed = True
        elif message["role"] == "tool" and message["content"].startswith("FAILED"):
            passed = False
        elif message["role"] == "assistant" and message["content"].startswith(FIX) and not passed:
            wrong.add(turn)
    if messages[-2]["content"] != "OK":
        wrong.add(len(messages) - 1)
    return wrong


class Batches:
    """Length-bucketed batches of at most `batch_tokens` tokens, reshuffled every epoch."""

    def __init__(self, traces: list[Trace], batch_tokens: int, seed: int, pad: int) -> None:
        self._traces = sorted(traces, key=lambda t: len(t.ids))
        self._seed, self._pad = seed, pad
        self._bounds: list[tuple[int, int]] = []
        start = 0
        for i, trace in enumerate(self._traces):
            if i > start and (i + 1 - start) * len(trace.ids) > batch_tokens:
                self._bounds.append((start, i))
                start = i
        self._bounds.append((start, len(self._traces)))
        self._order: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._bounds)

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch of a step: ids [B, T] int64, padded on the right, and weights [B, T] float32."""
        epoch, place = divmod(step, len(self))
        if epoch not in self._order:
            order = list(range(len(self)))
            random.Random(f"{self._seed}-{epoch}").shuffle(order)
            self._order = {epoch: order}
        start, end = self._bounds[self._order[epoch][place]]
        chosen = self._traces[start:end]
        length = max(len(t.ids) for t in chosen)
        ids = torch.full((len(chosen), length), self._pad)
        weights = torch.zeros(len(chosen), length)
        for row, trace in enumerate(chosen):
            ids[row, : len(trace.ids)] = torch.tensor(trace.ids)
            weights[row, : len(trace.ids)] = torch.tensor(trace.weights)
        return ids, weights


class CopyDrill:
    """Batches of `<|user|> words <|end|> <|assistant|> the same words <|end|>`, which teach copying first.

    Half of the words are sampled by their frequency in traces and half uniformly over the vocabulary in use.
    """

    def __init__(
        self, traces: list[Trace], tokenizer: PreTrainedTokenizerBase, batch_tokens: int, seed: int
    ) -> None:
        special = set(tokenizer.all_special_ids)
        words = [i for trace in traces[:3000] for i in trace.ids if i not in special]
        self._words, self._distinct = torch.tensor(words), torch.tensor(sorted(set(words)))
        self._tags = tokenizer.convert_tokens_to_ids(["<|user|>", "<|end|>", "<|assistant|>"])
        self._batch_tokens, self._seed = batch_tokens, seed

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the batch of a step: ids [B, 2n + 4], and weights, which are 1 on the copy and its end."""
        rng = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        n = int(torch.randint(6, 25, (1,), generator=rng))
        rows = max(1, self._batch_tokens // (2 * n + 4))
        common = self._words[torch.randint(len(self._words), (rows, n), generator=rng)]
        even = self._distinct[torch.randint(len(self._distinct), (rows, n), generator=rng)]
        words = torch.where(torch.rand(rows, n, generator=rng) < 0.5, common, even)
        user, end, assistant = (torch.full((rows, 1), tag) for tag in self._tags)
        ids = torch.cat([user, words, end, assistant, words, end], dim=1)
        weights = torch.zeros(ids.shape)
        weights[:, n + 3 :] = 1.0
        return ids, weights
