"""Tokens by their text, for servers that return text only.

Tokens with the same text form one class, whose probability is the sum of theirs; that is exact for the first
token of an answer. Spaces at the ends are dropped, since servers differ in them. So are characters of which a
token has only a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlpipe.certify.reference import Model

_PATHS = 32  # ways of a greedy answer that are followed at once
_GAP = 1e-3  # logits that a float32 server may round differently


def normalise(text: str) -> str:
    """Return a text without what servers write differently."""
    return text.replace("\ufffd", "").strip()


class Texts:
    """Texts of the tokens of a tokenizer (`transformers`)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._numbers: dict[str, int] = {}

    def classes(self, vocabulary: int) -> np.ndarray:
        """Return the class of each token, [vocabulary]."""
        known = len(self._tokenizer)
        texts = [self.decode([token]) if token < known else "" for token in range(vocabulary)]
        for text in texts:
            self._numbers.setdefault(text, len(self._numbers))
        return np.array([self._numbers[text] for text in texts])

    def class_of(self, text: str) -> int:
        """Return the class of an answer of one token; -1 where no token has that text."""
        return self._numbers.get(normalise(text), -1)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the normalised text of tokens, special tokens left out."""
        return normalise(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt, as servers tokenise text."""
        return list(self._tokenizer(text)["input_ids"])

    def ends(self, token: int) -> bool:
        """Return whether an answer ends with that token."""
        return token == self._tokenizer.eos_token_id


def is_greedy_text(model: Model, prompt: Sequence[int], text: str, texts: Texts, tokens: int) -> bool:
    """Return whether argmax gives a text, where tokens within rounding of the likeliest may take its place.

    tokens: that the answer has at most.
    """
    wanted, paths = normalise(text), [[]]
    for _ in range(tokens):
        ids = np.array([[*prompt, *path] for path in paths])
        exact = model.logits(ids, 1)[:, 0]
        moved = np.abs(model.logits(ids, 1, rounded=True)[:, 0] - exact) if model.rounds else 0 * exact
        longer: list[list[int]] = []
        for path, row, error in zip(paths, exact, moved, strict=True):
            likely = np.argpartition(-row, min(8, len(row) - 1))[:8]
            tolerance = max(_GAP, 2 * float(error[likely].max()))
            for token in likely[row[likely] >= row.max() - tolerance].tolist():
                if texts.ends(token):
                    if texts.decode(path) == wanted:
                        return True
                elif wanted.startswith(texts.decode([*path, token])):
                    longer.append([*path, token])
        paths = longer[:_PATHS]
        if not paths:
            return False
    return any(texts.decode(path) == wanted for path in paths)
