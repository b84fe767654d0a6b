"""Tokens by their text, for servers that return text only.

Tokens with the same text form one class; its probability is the sum of their probabilities, which is exact
for the first token of an answer. Texts are compared without spaces at the ends, which depend on the server,
and without incomplete characters, of which a token has only some bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlpipe.certify.reference import Model

_PATHS = 32  # maximum number of candidates of a greedy answer
_GAP = 1e-3  # difference of logits that the rounding of a float32 server can explain


def normalise(text: str) -> str:
    """Return a text without the parts that depend on the server."""
    return text.replace("\ufffd", "").strip()


class Texts:
    """The texts of the tokens of a transformers tokenizer."""

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
        """Return the class of a one-token answer by its text; -1 if no token has that text."""
        return self._numbers.get(normalise(text), -1)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the normalised text of tokens, without special tokens."""
        return normalise(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt text, tokenised as a server does it."""
        return list(self._tokenizer(text)["input_ids"])

    def ends(self, token: int) -> bool:
        """Return whether a token ends an answer."""
        return token == self._tokenizer.eos_token_id


def is_greedy_text(model: Model, prompt: Sequence[int], text: str, texts: Texts, tokens: int) -> bool:
    """Return whether greedy decoding can give a text, if rounding may replace the likeliest token.

    tokens: maximum number of tokens of the answer.
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
