"""The reference pass: the outputs of transformers in float32 for the same tokens.

If a server computes in another dtype, a second pass in that dtype measures the effect of rounding on the
log-probability of a token, the gap between two logits, and the probabilities of a row. Differences of that
size are not a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

CELLS = 64  # number of cells of a row: its likeliest tokens, and one cell for all other tokens
_TOKENS_AT_ONCE = 1024  # maximum number of tokens of a forward pass, without the prompt
_LOGITS_AT_ONCE = 1 << 24


class Model(Protocol):
    """A model that computes logits in float32 and in a server's dtype."""

    vocabulary: int
    rounds: bool  # whether the server's dtype is not float32

    def logits(self, ids: np.ndarray, keep: int, *, rounded: bool = False) -> np.ndarray:
        """Return the logits after each of the last `keep` tokens of ids [n, T], as [n, keep, V] float32.

        rounded: compute in the server's dtype.
        """
        ...


class TransformersModel:
    """A checkpoint in transformers. dtype: the server's dtype."""

    def __init__(self, path: Path, dtype: str) -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        self._torch = torch
        self.rounds = dtype != "float32"
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._models: dict[bool, Any] = {False: load(path, dtype=torch.float32).eval()}
        if self.rounds:
            self._models[True] = load(path, dtype=getattr(torch, dtype)).eval()
        self.vocabulary = int(self._models[False].get_output_embeddings().weight.shape[0])

    def logits(self, ids: np.ndarray, keep: int, *, rounded: bool = False) -> np.ndarray:
        """Return the logits after each of the last `keep` tokens of ids [n, T], as [n, keep, V] float32."""
        torch, model = self._torch, self._models[rounded and self.rounds]
        tokens, shared = torch.as_tensor(ids), _shared_prefix(ids, keep)
        with torch.inference_mode():
            # Compute the shared prefix of all sequences only once.
            if shared and (cache := self._cache(model, tokens[:1, :shared], len(ids))) is not None:
                logits = model(tokens[:, shared:], past_key_values=cache, logits_to_keep=keep).logits
            else:
                pieces = tokens.split(max(1, _TOKENS_AT_ONCE // ids.shape[1]))
                logits = torch.cat([model(piece, logits_to_keep=keep).logits for piece in pieces])
            return logits.float().numpy()

    def _cache(self, model: Any, prefix: Any, copies: int) -> Any:
        """Return the KV cache of a prefix [1, T] for a batch; None if a layer has any other state."""
        from transformers.cache_utils import DynamicLayer

        cache = model(prefix, use_cache=True, logits_to_keep=1).past_key_values
        if any(type(layer) is not DynamicLayer for layer in getattr(cache, "layers", [None])):
            return None
        cache.batch_repeat_interleave(copies)
        return cache


def _shared_prefix(ids: np.ndarray, keep: int) -> int:
    """Return the number of leading tokens that several sequences share, before the last `keep` tokens.

    >>> _shared_prefix(np.array([[5, 6, 7, 8], [5, 6, 9, 9]]), 1), _shared_prefix(np.array([[5, 6, 7, 8]]), 1)
    (2, 0)
    """
    same = (ids == ids[0]).all(0)[: ids.shape[1] - keep]
    return int(np.logical_and.accumulate(same).sum()) if len(ids) > 1 else 0


@dataclass(slots=True, kw_only=True)
class Rows:
    """The reference for the sampled sequences of one prompt; a row is the distribution at one position.

    likely: [n, T, CELLS - 1], the likeliest tokens of each row.
    probs: [n, T, CELLS], probabilities of these tokens and of all others together, at the temperature of the
    samples. rounded: the same as `probs` in the server's dtype.
    after, before: [n, T], log-probability of the sampled token with and without the temperature.
    gap: [n, T], largest logit minus the logit of the sampled token.
    moved_logprob, moved_gap: [n, T], effect of rounding on the log-probability, and on the gap between the
    two largest logits.
    """

    likely: np.ndarray
    probs: np.ndarray
    rounded: np.ndarray
    after: np.ndarray
    before: np.ndarray
    gap: np.ndarray
    moved_logprob: np.ndarray
    moved_gap: np.ndarray


def read_rows(model: Model, prompt: Sequence[int], tokens: np.ndarray, temperature: float) -> Rows:
    """Compute the reference for sequences. tokens: [n, T], padded with 0 at the right. temperature: > 0."""
    length = tokens.shape[1]
    unique, inverse = np.unique(tokens, axis=0, return_inverse=True)
    size = max(1, min(_TOKENS_AT_ONCE // length, _LOGITS_AT_ONCE // (model.vocabulary * length)))

    parts = []
    for first in range(0, len(unique), size):
        some = unique[first : first + size]
        ids = np.concatenate((np.tile(np.asarray(prompt, np.int64), (len(some), 1)), some[:, :-1]), 1)
        exact = model.logits(ids, length)
        rounded = model.logits(ids, length, rounded=True) if model.rounds else exact
        parts.append(_read(exact, rounded, some, temperature))

    inverse = inverse.reshape(-1)
    joined = {name: np.concatenate([part[name] for part in parts])[inverse] for name in parts[0]}
    return Rows(**joined)


def _read(
    exact: np.ndarray, rounded: np.ndarray, tokens: np.ndarray, temperature: float
) -> dict[str, np.ndarray]:
    """Return the fields of Rows. exact, rounded: [n, T, V]; tokens: [n, T]."""
    cells = min(CELLS - 1, exact.shape[-1] - 1)
    likely = np.argpartition(-exact, cells - 1, axis=-1)[..., :cells]
    order = np.argsort(-np.take_along_axis(exact, likely, -1), axis=-1, kind="stable")
    likely = np.take_along_axis(likely, order, -1)
    sampled = tokens[..., None]

    # Compare the log-probabilities of the two passes at the temperature of the samples.
    def of_sampled(logits: np.ndarray, at: float) -> np.ndarray:
        return (np.take_along_axis(logits, sampled, -1)[..., 0] / at) - log_sum_exp(logits / at)

    after, two = of_sampled(exact, temperature), likely[..., :2]
    best, rounded_best = np.take_along_axis(exact, two, -1), np.take_along_axis(rounded, two, -1)
    return {
        "likely": likely,
        "probs": _cell_probs(exact, likely, temperature),
        "rounded": _cell_probs(rounded, likely, temperature),
        "after": after,
        "before": of_sampled(exact, 1.0),
        "gap": best[..., 0] - np.take_along_axis(exact, sampled, -1)[..., 0],
        "moved_logprob": np.abs(of_sampled(rounded, temperature) - after),
        "moved_gap": np.abs((rounded_best[..., 0] - rounded_best[..., -1]) - (best[..., 0] - best[..., -1])),
    }


def _cell_probs(logits: np.ndarray, likely: np.ndarray, temperature: float) -> np.ndarray:
    """Return the probabilities of the likeliest tokens and of all others together, [n, T, cells + 1]."""
    scaled = logits / temperature
    probs = np.exp(np.take_along_axis(scaled, likely, -1) - log_sum_exp(scaled)[..., None]).astype(np.float64)
    rest = np.maximum(1 - probs.sum(-1, keepdims=True), 0)
    return np.concatenate((probs, rest), -1)


def log_sum_exp(logits: np.ndarray) -> np.ndarray:
    """Compute ln sum exp over the last axis, in float64."""
    highest = logits.max(-1, keepdims=True)
    total = np.exp(logits - highest).sum(-1, dtype=np.float64)
    return np.log(total) + highest[..., 0]


@dataclass(slots=True, kw_only=True)
class FirstRows:
    """The distributions of first tokens after each prompt, over classes that a server's answers distinguish.

    exact, rounded: logits [prompts, V] float64 of the two passes. classes: [V], class of each token; if the
    server returns only text, tokens with the same text share a class, otherwise each token is its own class.
    """

    exact: np.ndarray
    rounded: np.ndarray
    classes: np.ndarray

    def probs(self, temperature: float, *, rounded: bool = False) -> np.ndarray:
        """Return the probabilities of the classes, [prompts, classes]."""
        scaled = (self.rounded if rounded else self.exact) / temperature
        probs = np.exp(scaled - log_sum_exp(scaled)[:, None])
        size = int(self.classes.max()) + 1
        return np.stack([np.bincount(self.classes, row, minlength=size) for row in probs])


def read_first_rows(model: Model, prompts: Sequence[Sequence[int]], classes: np.ndarray | None) -> FirstRows:
    """Compute the distributions after each prompt. classes: [V]; None: each token is its own class."""
    rows = [model.logits(np.array([ids]), 1)[0, 0] for ids in prompts]
    rounded = (
        [model.logits(np.array([ids]), 1, rounded=True)[0, 0] for ids in prompts] if model.rounds else rows
    )
    return FirstRows(
        exact=np.stack(rows).astype(np.float64),
        rounded=np.stack(rounded).astype(np.float64),
        classes=np.arange(model.vocabulary) if classes is None else classes,
    )
