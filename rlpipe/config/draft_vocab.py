"""The tokens that an MTP layer can draft (`spec.draft_vocab`): the table's file, and its choice from data.

A draft over D frequent tokens uses D rows of the target's head instead of all V. All other tokens have q = 0,
so they are never drafted. Verification samples them from the residual and is still lossless. Imports no
torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlpipe.config.paths import resolve, resolve_model
from rlpipe.models.checkpoint import DRAFT_VOCAB, read_json

if TYPE_CHECKING:
    from rlpipe.config.spec import SpecConfig

CHECKPOINT = "checkpoint"  # value of spec.draft_vocab: use the table that comes with the model


def read_draft_vocab(spec: SpecConfig, model_path: str | Path, vocab: int) -> list[int] | None:
    """Read the tokens that the MTP layer can draft, in ascending order; None if it can draft all tokens.

    Args:
        model_path: checkpoint with the MTP layer.
        vocab: size of its vocabulary.

    Raises:
        ValueError: there is no table, or it does not fit this vocabulary.
    """
    if not spec.draft_vocab:
        return None
    return read_table(table_path(spec, model_path), vocab, f"spec.draft_vocab={spec.draft_vocab!r}")


def table_path(spec: SpecConfig, model_path: str | Path) -> Path:
    """Return the path of the table's file. model_path: checkpoint or name of the drafting model."""
    if spec.draft_vocab == CHECKPOINT:
        return resolve_model(str(model_path)) / DRAFT_VOCAB
    return resolve(spec.draft_vocab)


def read_table(file: Path, vocab: int, setting: str) -> list[int]:
    """Read and check the tokens in a table's file.

    Args:
        vocab: number of tokens of the model.
        setting: name of the setting with this path, for messages.

    Raises:
        ValueError: there is no such file, or its tokens are not ascending ids of the vocabulary.
    """
    choose = "Write one with `rlpipe draft-vocab`, or set spec.draft_vocab='' to draft among all tokens."
    if not file.is_file():
        raise ValueError(f"{setting}: {file} does not exist. {choose}")

    tokens = read_json(file, setting).get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(type(token) is int for token in tokens):
        raise ValueError(f'{setting}: {file} must hold {{"tokens": [ids]}} with at least one id. {choose}')

    if tokens[0] < 0 or max(tokens) >= vocab:
        raise ValueError(
            f"{setting}: {file} names tokens from {min(tokens)} to {max(tokens)}, and the model has tokens 0 "
            f"to {vocab - 1}: it belongs to another model. {choose}"
        )
    for before, token in pairwise(tokens):
        if token <= before:
            raise ValueError(f"{setting}: {file} has {token} after {before}, and ids must ascend. {choose}")
    return tokens


def write_table(file: Path, tokens: Iterable[int]) -> None:
    """Write a table of ascending tokens."""
    file.write_text(json.dumps({"tokens": list(tokens)}) + "\n")


def choose_draft_vocab(counts: np.ndarray, size: int, always: Iterable[int] = ()) -> list[int]:
    """Choose the `size` most frequent tokens, in ascending order; ties are resolved by the smaller id.

    Args:
        counts: [V], how often each token occurs.
        always: tokens that are chosen even if they are rare (special tokens), at most `size`.

    Raises:
        ValueError: size is below 1, above V or too small for `always`, or a token is outside the vocabulary.

    >>> choose_draft_vocab(np.array([0, 5, 2, 5, 2]), 3)
    [1, 2, 3]
    >>> choose_draft_vocab(np.array([0, 5, 2, 5, 2]), 3, always=[0])
    [0, 1, 3]
    """
    vocab, forced = len(counts), sorted(set(always))
    if not max(1, len(forced)) <= size <= vocab:
        raise ValueError(
            f"{size} tokens cannot be chosen of a vocabulary of {vocab} with {len(forced)} special tokens: "
            f"choose between {max(1, len(forced))} and {vocab}."
        )
    if forced and not 0 <= forced[0] <= forced[-1] < vocab:
        raise ValueError(f"Tokens {forced[0]} to {forced[-1]} are not all in a vocabulary of {vocab}.")

    # Sort (stably) by falling frequency, with the tokens of `always` before all others.
    rank = counts.astype(np.float64)
    rank[forced] = np.inf
    return np.sort(np.argsort(-rank, kind="stable")[:size]).tolist()


def coverage(counts: np.ndarray, tokens: Iterable[int]) -> float:
    """Return the share of all occurrences that a table covers. counts: [V]."""
    return float(counts[list(tokens)].sum() / counts.sum())
