"""The flow of `rlpipe certify`: samples a server, computes the reference, and tests the samples.

server = await Server.open(url, probe)
evidence = await collect(server, model, prompts, sizes, ...)
certificate = judge(evidence, alpha=0.01)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rlpipe.certify.causes import Cause, find_causes
from rlpipe.certify.dialects import Answer, Features, Prompt
from rlpipe.certify.evidence import Evidence, GreedyText, Samples, pack
from rlpipe.certify.lines import Judge, Line
from rlpipe.certify.reference import Model, read_first_rows, read_rows
from rlpipe.certify.texts import Texts, is_greedy_text

TEMPERATURE = 0.7  # second temperature; unlike 1, it shows errors in the use of the temperature
ANSWER_TOKENS = 48  # length of greedy answers and of answers for acceptance


class Sampler(Protocol):
    """A server that returns samples, such as `dialects.Server`."""

    features: Features

    async def sample(self, prompt: Prompt, *, count: int, temperature: float, tokens: int) -> list[Answer]:
        """Return `count` independent samples."""
        ...


@dataclass(slots=True, kw_only=True)
class Sizes:
    """Numbers of samples.

    samples: number of samples at temperature 1; half as many at the second temperature. tokens: length of a
    sample; 0: gamma + 4, at least 6, so that samples include tokens after a step with all drafts accepted.
    answers: number of answers for acceptance. greedy: number of answers per prompt at temperature 0.
    """

    samples: int = 4000
    tokens: int = 0
    answers: int = 256
    greedy: int = 2

    def tokens_for(self, features: Features) -> int:
        """Return the length of a sample in tokens; 1 if the server does not return ids."""
        if not features.ids_out:
            return 1
        return self.tokens or max(6, features.gamma + 4)


@dataclass(slots=True, kw_only=True)
class Certificate:
    """The result of a certification. seconds: time for sampling, reference and tests."""

    features: Features
    lines: list[Line]
    causes: list[Cause]
    alpha: float
    seconds: dict[str, float] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Return whether no tested line failed."""
        return not any(line.failed for line in self.lines)


async def collect(
    server: Sampler,
    model: Model,
    prompts: Sequence[Prompt],
    sizes: Sizes,
    *,
    texts: Texts | None = None,
    own_draft: Callable[[Sequence[Prompt], Features, int, int], list[np.ndarray]] | None = None,
    why_no_draft: str = "the server reports no acceptance",
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[Evidence, dict[str, float]]:
    """Sample a server and compute the reference.

    Args:
        server: the server to sample.
        model: the reference.
        prompts: prompts to sample after, each equally often.
        sizes: numbers of samples.
        texts: texts of the tokens, for a server that returns only text.
        own_draft: function of (prompts, features, answers per prompt, tokens per answer) that returns, for
            each prompt, [n, 2] accepted drafts and verify steps of the checkpoint's own draft.
        why_no_draft: reason if own_draft is None.
        progress: called with the name of each activity that starts.

    Returns:
        The evidence, and the seconds that each part took.

    Raises:
        ValueError: the server returns only text and `texts` is None.
        ServerError, ServerUnreachable: the server rejected a request, or stopped answering.
    """
    features, started = server.features, time.monotonic()
    tokens = sizes.tokens_for(features)

    # Without ids, tokens can only be recognised by their text.
    if not features.ids_out and texts is None:
        raise ValueError("the server returns no token ids, and the checkpoint has no tokenizer to read text.")

    answers: dict[tuple[int, float], list[Answer]] = {}
    for temperature, total in ((1.0, sizes.samples), (TEMPERATURE, sizes.samples // 2)):
        progress(f"sampling {total:,} times {tokens} tokens at temperature {temperature:g}")
        for number, prompt in enumerate(prompts):
            answers[number, temperature] = await server.sample(
                prompt, count=max(1, total // len(prompts)), temperature=temperature, tokens=tokens
            )

    progress("sampling at temperature 0")
    greedy = [
        await server.sample(prompt, count=sizes.greedy, temperature=0.0, tokens=ANSWER_TOKENS)
        for prompt in prompts
    ]

    # Sample longer answers for acceptance, because it changes along a text.
    each = max(1, sizes.answers // len(prompts))
    accepted: list[np.ndarray] = []
    if features.drafts and own_draft is not None:
        progress(f"sampling {each * len(prompts)} answers for their acceptance")
        accepted = [
            _accepted(await server.sample(p, count=each, temperature=1.0, tokens=ANSWER_TOKENS))
            for p in prompts
        ]

    sampled = time.monotonic()

    progress("computing the reference")
    first = read_first_rows(
        model,
        [prompt.ids for prompt in prompts],
        None if features.ids_out else _classes(texts, model.vocabulary),
    )

    # The reference after the first token needs the ids of the earlier tokens.
    samples = []
    for (number, temperature), some in answers.items():
        classes = _first_classes(some, texts, with_ids=features.ids_out)
        one = pack(number, temperature, some, classes)
        if features.ids_out:
            one.rows = read_rows(model, prompts[number].ids, one.tokens, temperature)
        samples.append(one)

    own = own_draft(prompts, features, each, ANSWER_TOKENS) if accepted and own_draft is not None else []
    evidence = Evidence(
        features=features,
        first=first,
        temperature=TEMPERATURE,
        samples=samples,
        greedy=_greedy(model, prompts, greedy) if features.ids_out else [],
        greedy_texts=[] if features.ids_out else _greedy_texts(model, prompts, greedy, texts),
        accepted=accepted,
        own_accepted=own,
        why_not_accepted=why_no_draft,
    )
    ended = time.monotonic()
    return evidence, {"sampling": sampled - started, "reference": ended - sampled}


def judge(evidence: Evidence, *, alpha: float, seed: int = 0, with_power: bool = True) -> Certificate:
    """Test all lines and name the causes of the failed ones. Arguments as in `Judge`."""
    started = time.monotonic()
    judge = Judge(evidence=evidence, alpha=alpha, seed=seed, with_power=with_power)
    lines = judge.lines()
    return Certificate(
        features=evidence.features,
        lines=lines,
        causes=find_causes(judge, lines),
        alpha=alpha,
        seconds={"tests": time.monotonic() - started},
    )


def _accepted(answers: Sequence[Answer]) -> np.ndarray:
    return np.array([[one.accepted, one.verify_steps] for one in answers], np.int64)


def _classes(texts: Texts | None, vocabulary: int) -> np.ndarray:
    assert texts is not None
    return texts.classes(vocabulary)


def _first_classes(answers: Sequence[Answer], texts: Texts | None, *, with_ids: bool) -> np.ndarray:
    """Return the class of each first token; -1 if an answer is empty or no token has its text."""
    if with_ids:
        return np.array([one.ids[0] if one.ids else -1 for one in answers])
    assert texts is not None
    return np.array([texts.class_of(one.text) for one in answers])


def _greedy(model: Model, prompts: Sequence[Prompt], answers: Sequence[Sequence[Answer]]) -> list[Samples]:
    """Return greedy answers with the reference for their tokens."""
    packed = []
    for number, (prompt, some) in enumerate(zip(prompts, answers, strict=True)):
        one = pack(number, 0.0, some, np.full(len(some), -1))
        one.rows = read_rows(model, prompt.ids, one.tokens, 1.0)
        packed.append(one)
    return packed


def _greedy_texts(
    model: Model, prompts: Sequence[Prompt], answers: Sequence[Sequence[Answer]], texts: Texts | None
) -> list[GreedyText]:
    """Return for each prompt whether greedy decoding can give the answer's text."""
    assert texts is not None
    return [
        GreedyText(
            equal=is_greedy_text(model, prompt.ids, some[0].text, texts, ANSWER_TOKENS), seen=some[0].text
        )
        for prompt, some in zip(prompts, answers, strict=True)
    ]
