"""Windows of an EAGLE-3 draft: it drafts them after the tokens of texts, and the target reads them.

Owns the passes that `drafts.windows.training` calls; they read as many rows as the target's cache has.

    target over some rows          -> hidden states, features; its cache keeps the keys
    step 1 of the draft, all texts -> Q along the text, keys
    steps 2..K                     -> G windows from each anchor
    target, W G K more             -> P after every draft, after the texts' keys
    target, K - 1 passes over W    -> the greedy window from each anchor

Windows of a row are adjacent in its cache; each attends to its prefix and itself, like the nodes of a tree
(`Target.span`). Drafts are exactly the engine's: deeper steps attend to step 1 of the prefix and to earlier
steps of their window.

Unlike an MTP layer, the draft has its own head, which is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlpipe.batching.draft_layout import draft_batch
from rlpipe.batching.micro_batch import MicroBatch, as_rows
from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.eagle3_model import Eagle3, Windows
from rlpipe.drafts.loss import depth_targets
from rlpipe.drafts.protocols import Target
from rlpipe.drafts.windows.rollout import SampledWindows, criticality_of


@dataclass(slots=True, kw_only=True)
class Pair:
    """A draft, and the target it drafts for.

    target: must have `window_slots` cache slots after the texts. read: tokens [B, T] and lengths [B] of at
    most `target.rows` rows -> hidden states [B * T, H] and features [B, T, F]; it also writes the tokens'
    keys. draft_cost: see `WindowDrafter`.
    """

    draft: Eagle3
    target: Target
    read: Callable[[np.ndarray, np.ndarray], tuple[Tensor, Tensor]]
    autocast: Callable[[], AbstractContextManager]
    draft_cost: float

    def texts(self, micro_batch: MicroBatch, temperature: float) -> Iterator[Eagle3Windows]:
        """Yield the trajectories of a micro-batch in parts, each read in one pass.

        If the caller runs the backward pass of each part before the next, only a few rows' graphs are in
        memory.
        """
        batch = draft_batch(micro_batch, 1)
        if batch is None:
            return

        tokens, indices = as_rows(batch.branches, micro_batch.tokens[batch.places])
        ahead, _ = as_rows(batch.branches, batch.following[0])
        lengths = np.array([branch.length for branch in batch.branches])
        rows, anchors = np.divmod(indices[batch.anchors], tokens.shape[1])

        for first in range(0, len(tokens), self.target.rows):
            part = slice(first, first + self.target.rows)
            longest = int(lengths[part].max())
            in_part = (rows[:, 0] >= part.start) & (rows[:, 0] < part.stop)  # every turn has a first anchor
            if in_part.any():
                text = Eagle3Windows(
                    self,
                    tokens[part, :longest],
                    ahead[part, :longest],
                    lengths=lengths[part],
                    temperature=temperature,
                )
                text.owners, text.rows = batch.owners[in_part], micro_batch.rows
                text.draft_cost = self.draft_cost
                text.turns, text.sampled = batch.tokens[in_part], batch.sampled[in_part]
                text.indices = (rows[in_part] - first).clip(0) * longest + anchors[in_part]
                yield text


class Eagle3Windows:
    """A single-use `drafts.windows.rollout.WindowDrafter` on rows of the target's cache.

    indices: [R, L], index of each token of the turns in the flattened rows. anchors: [W], positions t.
    """

    owners: np.ndarray
    turns: np.ndarray
    sampled: np.ndarray
    rows: np.ndarray
    indices: np.ndarray
    draft_cost: float
    vocab: int
    known: Tensor | None

    def __init__(
        self, pair: Pair, tokens: np.ndarray, ahead: np.ndarray, *, lengths: np.ndarray, temperature: float
    ) -> None:
        """Read the texts: the target reads tokens [B, T], the draft reads `ahead` [B, T]. lengths: [B]."""
        self._pair, self._draft, self._target = pair, pair.draft, pair.target
        self.vocab, self.known = pair.draft.shape.vocab, pair.draft.ids
        self._shape, self._temperature = tokens.shape, temperature
        self._hidden, features = pair.read(tokens, lengths)
        past: list[tuple[Tensor, Tensor]] = []
        with pair.autocast():
            (self._states,) = self._draft.unroll(features, self._embedded(self._move(ahead)[None]), past)
        (self._keys,) = past

    def criticality(self) -> Tensor:
        """Return [R, L]: the criticality of the first draft from each token of the turns."""
        texts = torch.from_numpy(self.turns), torch.from_numpy(self.sampled)
        near = depth_targets(*texts, 1).mask[:, 0]
        positions = self._move(self.indices.ravel()[near.numpy()])
        states = self._states.detach().flatten(0, 1)
        critical = torch.zeros(near.shape)
        critical[near] = criticality_of(self, states[positions], self._hidden[positions + 1]).cpu()
        return critical.view(self.turns.shape)

    def start(self, windows: SampledWindows, group: int) -> torch.device:
        """Prepare to draft from W windows, `group` times from each; return the device."""
        self._positions = self._move(self.indices[windows.turns, windows.columns])
        rows, self.anchors = self._positions // self._shape[1], self._positions % self._shape[1]
        self._windows = Windows(self._draft, self._keys, rows=rows, anchors=self.anchors)
        self._state = self._states[rows, self.anchors][:, None]
        self._ahead = _Ahead(self._target, rows=rows, anchors=self.anchors, shape=self._shape)
        self._greedy_tokens: list[Tensor] = []
        return self._positions.device

    def draft(self, tokens: Tensor | None) -> Tensor:
        """Return states of the draft after the tokens [W, G] that it drafted last: see `WindowDrafter`."""
        if tokens is not None:
            state = self._state.expand(*tokens.shape, -1)
            with self._pair.autocast():
                self._state = self._windows.step(state, self._embedded(tokens))
        return self._state

    def draft_logprobs(self, states: Tensor) -> Tensor:
        """Compute the draft's log-probabilities: [..., H] -> [..., V]."""
        with self._pair.autocast():
            logits = self._draft.logits(states)
        return self._normal(logits)

    def first(self) -> Tensor:
        """Return states [W, H] of the target at the first draft."""
        return self._hidden[self._positions + 1]

    def read(self, tokens: Tensor) -> Tensor:
        """Return states [W, G, K, H] of the target after each of the tokens [W, G, K]."""
        return self._ahead.read([tokens])

    def greedy(self, tokens: Tensor) -> Tensor:
        """Append one of the tokens [W] to each greedy window; return the target's states [W, H] after it."""
        self._greedy_tokens.append(tokens[:, None, None])
        return self._ahead.read(self._greedy_tokens)[:, 0, -1]

    def target_logprobs(self, states: Tensor) -> Tensor:
        """Compute the target's log-probabilities: [..., H] -> [..., V]."""
        flat = self._target.logits(states.flatten(0, -2))
        return self._normal(flat.unflatten(0, states.shape[:-1]))

    def _normal(self, logits: Tensor) -> Tensor:
        return (logits.float() / self._temperature).log_softmax(-1)

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self._target.embedding[tokens].float()

    def _move(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._target.device)


class _Ahead:
    """Windows that the target reads after texts; the keys of the texts are in its cache.

    rows: [W] ascending, the row of each window; all rows with windows have the same number of them.
    anchors: [W]. shape: [B, T] of the texts.
    """

    def __init__(self, target: Target, *, rows: Tensor, anchors: Tensor, shape: tuple[int, int]) -> None:
        self._target, self._rows, self._anchors = target, rows, anchors
        self._count, self._length = shape
        self._width = int(rows.bincount().max())
        self._columns = torch.arange(len(rows), device=rows.device) % self._width  # among the row's windows

    def read(self, drafts: list[Tensor]) -> Tensor:
        """Compute hidden states [W, G, K, H] after each token that follows a window's prefix, 0 .. t + 1.

        drafts: tensors [W, G, k], which are concatenated to K tokens.
        """
        tokens = torch.cat(drafts, 2)
        (_, group, depths), device = tokens.shape, tokens.device
        width = self._width * group * depths
        columns = torch.arange(width, device=device)
        slots = (self._length + columns).expand(self._count, -1)

        text = torch.zeros(self._count, self._width, group, depths, dtype=torch.int64, device=device)
        positions, prefix_lengths = text.clone(), text.clone()
        index = self._rows, self._columns
        text[index] = tokens
        prefix_lengths[index] = self._anchors[:, None, None] + 2
        positions[index] = prefix_lengths[index] + torch.arange(depths, device=device)

        # A token attends to its window's prefix, and to the tokens of the window up to itself.
        window = columns // depths
        same_window = (window[:, None] == window) & (columns[:, None] >= columns)
        past = torch.arange(self._length, device=device) >= prefix_lengths.flatten(1)[..., None]
        unseen = torch.cat((past, ~same_window.expand(self._count, -1, -1)), 2)

        end = self._length + width
        span = self._target.span(0, positions.flatten(1), end, slots=slots, unseen=unseen)
        hidden = self._target.forward(text.flatten(), [span])
        return hidden.view(*text.shape, -1)[index]


def window_slots(config: PpowConfig, depths: int) -> int:
    """Return the slots of a row's cache that windows need after the text."""
    return config.windows * config.group_size * depths


def draft_cost(draft: Eagle3, target: Mapping[str, Tensor]) -> float:
    """Return the draft's number of parameters divided by the target's, without embedding and heads.

    target: the target's weights by HF name.
    """
    parameters = sum(p.numel() for name, p in draft.named_parameters() if not name.startswith("lm_head"))
    return parameters / sum(
        w.numel() for n, w in target.items() if n.startswith(("model.layers.", "model.norm."))
    )
