"""Samples of a server together with the reference for each: the input of a certificate's lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlpipe.certify.dialects import Answer, Features
from rlpipe.certify.reference import FirstRows, Rows
from rlpipe.certify.statistics import Draws

HEAD = 0.9  # cumulative probability of a row's head (its likeliest tokens); the other tokens are its tail
_MAX_HEAD = 63
_BANDS = (0.95, 0.99, 0.999)  # further boundaries in the tail


@dataclass(slots=True, kw_only=True)
class Samples:
    """Samples of one prompt at one temperature.

    tokens: [n, T], padded with 0. lengths: [n]. logprobs: [n, T], NaN if not reported.
    first: [n], class of each first token; -1 if no token has the answer's text.
    rows: the reference for the tokens; None if only texts are known.
    """

    prompt: int
    temperature: float
    tokens: np.ndarray
    lengths: np.ndarray
    logprobs: np.ndarray
    first: np.ndarray
    rows: Rows | None = None


@dataclass(slots=True, kw_only=True)
class GreedyText:
    """A greedy answer as text only. equal: whether greedy decoding can give this text. seen: the text."""

    equal: bool
    seen: str


@dataclass(slots=True, kw_only=True)
class Evidence:
    """All observations of a server.

    first: reference rows of first tokens. samples: samples by prompt, at temperature 1 and at `temperature`.
    greedy: samples at temperature 0. accepted: for each prompt, [n, 2] accepted drafts and verify steps of
    the server. own_accepted: the same for the checkpoint's own draft. why_not_accepted: reason if both are
    missing.
    """

    features: Features
    first: FirstRows
    temperature: float
    samples: list[Samples]
    greedy: list[Samples]
    greedy_texts: list[GreedyText]
    accepted: list[np.ndarray]
    own_accepted: list[np.ndarray]
    why_not_accepted: str = ""

    def at(self, temperature: float) -> list[Samples]:
        """Return the samples at a temperature."""
        return [one for one in self.samples if one.temperature == temperature]


def pack(prompt: int, temperature: float, answers: Sequence[Answer], first: np.ndarray) -> Samples:
    """Convert answers to arrays. first: class of each first token."""
    ids = [answer.ids or [] for answer in answers]
    lengths = np.array([len(one) for one in ids])
    tokens = np.zeros((len(ids), max(1, lengths.max(initial=0))), np.int64)
    logprobs = np.full(tokens.shape, np.nan)
    for row, answer in enumerate(answers):
        tokens[row, : lengths[row]] = ids[row]
        reported = answer.logprobs or []
        logprobs[row, : min(len(reported), lengths[row])] = reported[: lengths[row]]
    return Samples(
        prompt=prompt,
        temperature=temperature,
        tokens=tokens,
        lengths=lengths,
        logprobs=logprobs,
        first=first,
    )


def split_first(first: FirstRows, samples: Sequence[Samples]) -> tuple[Draws, Draws]:
    """Split first tokens into two independent tests: one within the head of each row, one of the tail.

    The head of a row is its likeliest tokens. Given the number of samples in the head, their counts per token
    are multinomial. The first test is therefore exact even if the server cuts the tail of the distribution.
    The second test counts samples in bands of the tail.
    """
    temperature = samples[0].temperature
    row = np.concatenate([np.full(len(one.first), one.prompt) for one in samples])
    token = np.concatenate([one.first for one in samples])
    exact, rounded = first.probs(temperature), first.probs(temperature, rounded=True)

    # Rank of each token in its row; a text that no token has is ranked last.
    order = np.argsort(-exact, axis=1, kind="stable")
    rank_of = np.argsort(order, axis=1)
    rank = np.where(token >= 0, rank_of[row, np.maximum(token, 0)], exact.shape[1] - 1)
    ranked, ranked_rounded = (np.take_along_axis(probs, order, 1) for probs in (exact, rounded))

    # The head of a row is its likeliest tokens up to the cumulative probability HEAD, at most _MAX_HEAD.
    before = ranked.cumsum(1) - ranked
    head = np.minimum((before < HEAD).sum(1), _MAX_HEAD)
    width = int(head.max())
    inside = np.arange(width) < head[:, None]
    heads = [np.where(inside, probs[:, :width], 0) for probs in (ranked, ranked_rounded)]

    likely = rank < head[row]
    likely_draws = Draws(
        probs=heads[0] / heads[0].sum(1, keepdims=True),
        rounded=heads[1] / heads[1].sum(1, keepdims=True),
        row=row[likely],
        cell=rank[likely],
    )

    # Band 0 is the head; the cumulative probability of the likelier tokens determines the other bands.
    band = 1 + np.searchsorted(_BANDS, before.ravel(), side="right").reshape(before.shape)
    band[np.arange(exact.shape[1]) < head[:, None]] = 0
    banded = [
        np.stack([np.bincount(b, p, minlength=len(_BANDS) + 2) for b, p in zip(band, probs, strict=True)])
        for probs in (ranked, ranked_rounded)
    ]
    cell = np.where(token >= 0, band[row, rank], len(_BANDS) + 1)
    return likely_draws, Draws(probs=banded[0], rounded=banded[1], row=row, cell=cell)


def later_draws(samples: Sequence[Samples]) -> list[Draws]:
    """Return the draws of each position after the first; a row is a prefix that occurred."""
    length = max((one.tokens.shape[1] for one in samples), default=1)
    return [draws_at(samples, position) for position in range(1, length)]


def draws_at(samples: Sequence[Samples], position: int) -> Draws:
    """Return the draws of one position (0-based); a row is a prefix that occurred before it."""
    all_probs, rounded, rows, cells, count = [], [], [], [], 0
    for one in samples:
        assert one.rows is not None
        here = np.flatnonzero(one.lengths > position)
        if not len(here):
            continue

        # Equal prefixes share one row.
        _, first, inverse = np.unique(
            one.tokens[here, :position], axis=0, return_index=True, return_inverse=True
        )
        all_probs.append(one.rows.probs[here[first], position])
        rounded.append(one.rows.rounded[here[first], position])
        rows.append(inverse.reshape(-1) + count)
        count += len(first)

        match = one.rows.likely[here, position] == one.tokens[here, position][:, None]
        cells.append(np.where(match.any(1), match.argmax(1), match.shape[1]))

    if not all_probs:
        empty = np.zeros(0, np.int64)
        return Draws(probs=np.ones((1, 1)), row=empty, cell=empty)
    return Draws(
        probs=np.concatenate(all_probs),
        rounded=np.concatenate(rounded),
        row=np.concatenate(rows),
        cell=np.concatenate(cells),
    )
