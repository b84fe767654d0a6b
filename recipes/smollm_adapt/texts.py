"""Answers of SmolLM2, with the frozen model's outputs on them, for the studies next to this file.

In-domain answers are those shipped with the model's MTP layer; every 25th of them was held out from the
layer's training. Out-of-domain answers are sampled here, to prompts of kinds that are never trained on
(maths, code, translation, HTML).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.smollm_rl.make_layer import HELD_OUT_EVERY, ROLLOUTS
from recipes.smollm_rl.prompts import UNSCORED
from rlpipe.config.paths import shipped
from rlpipe.convert.closed_form import Sample
from rlpipe.convert.samples import read_samples, sample_model

OUT_OF_DOMAIN = ("maths", "code", "translation", "html")
LONGEST = 192  # tokens of a sequence; longer ones are cut off


@dataclass(slots=True)
class Text:
    """A sequence of T tokens, sampled at a temperature, 1 unless a study says otherwise.

    ids, sampled: [T]. hidden: [T, H] bfloat16, the input of the head. normaliser, entropy, top: of the
    target's logits, divided by the temperature, at each position, [T]: log-sum-exp, nats, most likely token.
    """

    ids: Tensor
    sampled: Tensor
    hidden: Tensor
    normaliser: Tensor
    entropy: Tensor
    top: Tensor


def shipped_answers(vocabulary: int) -> tuple[list[Sample], list[Sample]]:
    """Return the shipped answers: the shipped layer's training answers, and the held-out ones."""
    samples = [s for s in read_samples(shipped(ROLLOUTS), vocabulary) if s.sampled.sum() > 8]
    return [s for i, s in enumerate(samples) if i % HELD_OUT_EVERY], samples[::HELD_OUT_EVERY]


def other_answers(model: Path, count: int, *, seed: int = 7, temperature: float = 1.0) -> list[Sample]:
    """Sample answers to held-out prompts of other kinds, about `count` in all, of each kind in turn."""
    rng = random.Random(seed)
    kinds = [UNSCORED[OUT_OF_DOMAIN[i % len(OUT_OF_DOMAIN)]] for i in range(count)]
    prompts = [str(kind.draw(rng, True)["prompt"]) for kind in kinds]
    samples = sample_model(model, tokens=60 * count, seed=seed, prompts=prompts, temperature=temperature)
    return [s for s in samples if s.sampled.sum() > 8][:count]


def answer_again(model: Path, samples: Sequence[Sample], *, seed: int, temperature: float) -> list[Sample]:
    """Sample answers at a temperature to the prompts of other answers, whose chat has one message."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [tokenizer.decode(s.ids[: int(s.sampled.int().argmax())]) for s in samples]
    prompts = [chat.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0] for chat in chats]
    again = sample_model(model, tokens=64 * len(prompts), seed=seed, prompts=prompts, temperature=temperature)
    return [s for s in again if s.sampled.sum() > 8]


@torch.inference_mode()
def read(model: Any, samples: Sequence[Sample], temperature: float = 1.0) -> list[Text]:
    """Run the backbone over sequences, a few of similar length at a time.

    temperature: of the target's distributions; 0 gives those at 1, as `top` does not depend on it.
    """
    head, found = model.get_output_embeddings().weight, {}
    order = sorted(range(len(samples)), key=lambda index: len(samples[index].ids))
    for start in range(0, len(order), 16):
        rows = order[start : start + 16]
        ids = [samples[index].ids[:LONGEST] for index in rows]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        states = model.base_model(padded, use_cache=False).last_hidden_state
        for row, index in enumerate(rows):
            hidden = states[row, : len(ids[row])].clone()
            logits = F.linear(hidden, head).float() / (temperature or 1.0)
            log_p = logits.log_softmax(-1)
            found[index] = Text(
                ids[row],
                samples[index].sampled[:LONGEST],
                hidden,
                logits.logsumexp(-1),
                -(log_p.exp() * log_p).sum(-1),
                logits.argmax(-1),
            )
    return [found[index] for index in range(len(samples))]
