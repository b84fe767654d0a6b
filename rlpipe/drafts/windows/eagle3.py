"""Windows of an EAGLE-3 draft: drafted by its own steps behind rows of texts, and read by the target.

Owns the passes that `drafts.windows.training` asks for, over as many rows as the target's cache has.

    target over some rows          -> hidden states, features; its cache keeps the keys
    step 1 of the draft, all texts -> Q along the text, keys
    steps 2..K                     -> G windows from each anchor
    target, W G K more             -> P after every draft, behind the texts' keys
    target, K - 1 passes over W    -> the greedy window from each anchor

Windows of a row stand in its cache side by side, each seeing its prefix and itself, as nodes of a tree do
(`Target.span`). Drafts are exactly the engine's: deeper steps attend to step 1 of the prefix and their own.

Differs from an MTP layer's in the head, which is the draft's own and learns, too, and with a reduced
vocabulary in the divergence that makes a place critical (`learnable_kl`).
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
from rlpipe.drafts.windows.rollout import Drawn
from rlpipe.drafts.windows.selection import criticality

LOGITS = {"cuda": 2**26, "cpu": 2**23}  # numbers of the logits held at once while places are scored


@dataclass(slots=True, kw_only=True)
class Pair:
    """A draft, and the target it drafts for.

    target: whose cache has room for `window_slots` tokens behind the texts. read: tokens [B, T] and lengths
    [B] of at most `target.rows` rows -> hidden states [B * T, H], features [B, T, F]; leaves their keys.
    draft_cost: see `WindowDrafter`.
    """

    draft: Eagle3
    target: Target
    read: Callable[[np.ndarray, np.ndarray], tuple[Tensor, Tensor]]
    autocast: Callable[[], AbstractContextManager]
    draft_cost: float

    def texts(self, micro: MicroBatch, temperature: float) -> Iterator[Eagle3Windows]:
        """The trajectories of a micro-batch, as many as are read at once.

        Take each gradient before the next, and graphs of a few rows are all that is kept.
        """
        batch = draft_batch(micro, 1)
        if batch is None:
            return
        tokens, cells = as_rows(batch.branches, micro.tokens[batch.places])
        ahead, _ = as_rows(batch.branches, batch.following[0])
        lengths = np.array([branch.length for branch in batch.branches])
        rows, anchors = np.divmod(cells[batch.anchors], tokens.shape[1])
        for first in range(0, len(tokens), self.target.rows):
            part = slice(first, first + self.target.rows)
            longest = int(lengths[part].max())
            mine = (rows[:, 0] >= part.start) & (rows[:, 0] < part.stop)  # a turn has a first anchor
            if mine.any():
                text = Eagle3Windows(
                    self, tokens[part, :longest], ahead[part, :longest], lengths[part], temperature
                )
                text.owners, text.rows, text.draft_cost = batch.owners[mine], micro.rows, self.draft_cost
                text.turns, text.sampled = batch.tokens[mine], batch.sampled[mine]
                text.cells = (rows[mine] - first).clip(0) * longest + anchors[mine]
                yield text


class Eagle3Windows:
    """Implements `drafts.windows.training.WindowDrafter` on rows of the target's cache, once.

    cells: [R, L] place of each of the turns' tokens in the flat view of the rows. anchors: [W] places t.
    """

    owners: np.ndarray
    turns: np.ndarray
    sampled: np.ndarray
    rows: np.ndarray
    cells: np.ndarray
    draft_cost: float

    def __init__(
        self, pair: Pair, tokens: np.ndarray, ahead: np.ndarray, lengths: np.ndarray, temperature: float
    ) -> None:
        """tokens, ahead: [B, T] read by target and draft. lengths: [B]."""
        self._pair, self._draft, self._target = pair, pair.draft, pair.target
        self._shape, self._temperature = tokens.shape, temperature
        self._hidden, features = pair.read(tokens, lengths)
        past: list[tuple[Tensor, Tensor]] = []
        with pair.autocast():
            (self._states,) = self._draft.unroll(features, self._embedded(self._move(ahead)[None]), past)
        (self._keys,) = past

    def criticality(self) -> Tensor:
        """[R, L] of the first draft from each token of the turns."""
        texts = torch.from_numpy(self.turns), torch.from_numpy(self.sampled)
        near = depth_targets(*texts, 1).mask[:, 0]
        places, states = self._move(self.cells.ravel()[near.numpy()]), self._states.detach().flatten(0, 1)
        critical, vocab = torch.zeros(near.shape), self._draft.shape.vocab
        found = []
        for some in places.split(max(1, LOGITS[places.device.type] // vocab)):
            with self._pair.autocast():
                draft = self._draft.logits(states[some])
            log_q, log_p = self._normal(draft), self._of_target(self._hidden[some + 1])
            entropy, kl = -(log_p.exp() * log_p).sum(-1), learnable_kl(log_p, log_q, self._draft.ids)
            found.append(criticality(entropy, kl, vocab))
        critical[near] = torch.cat(found).cpu()
        return critical.view(self.turns.shape)

    def start(self, drawn: Drawn, group: int) -> torch.device:
        """Get ready to go on from W windows, `group` times from each."""
        self._places = self._move(self.cells[drawn.turns, drawn.columns])
        at, self.anchors = self._places // self._shape[1], self._places % self._shape[1]
        self._windows = Windows(self._draft, self._keys, at, self.anchors)
        self._state = self._states[at, self.anchors][:, None].expand(-1, group, -1)
        self._ahead = _Ahead(self._target, at, self.anchors, self._shape)
        self._chosen: list[Tensor] = []
        return self._places.device

    def draft(self, tokens: Tensor | None) -> Tensor:
        """[W, G, V] of the draft after the tokens [W, G] that it drafted last, None at first."""
        with self._pair.autocast():
            if tokens is not None:
                self._state = self._windows.step(self._state, self._embedded(tokens))
            return self._normal(self._draft.logits(self._state))

    def first(self) -> Tensor:
        """[W, V] of the target where the first draft stands."""
        return self._of_target(self._hidden[self._places + 1])

    def read(self, tokens: Tensor) -> Tensor:
        """[W, G, K, V] of the target after each of the tokens [W, G, K]."""
        return self._of_target(self._ahead.read([tokens]))

    def greedy(self, tokens: Tensor) -> Tensor:
        """[W, V] of the target after one token more, [W], of each greedy window."""
        self._chosen.append(tokens[:, None, None])
        return self._of_target(self._ahead.read(self._chosen)[:, 0, -1])

    def _of_target(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V] log-probabilities."""
        flat = self._target.logits(hidden.flatten(0, -2))
        return self._normal(flat.unflatten(0, hidden.shape[:-1]))

    def _normal(self, logits: Tensor) -> Tensor:
        return (logits.float() / self._temperature).log_softmax(-1)

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self._target.embedding[tokens].float()

    def _move(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._target.device)


class _Ahead:
    """Windows that the target reads behind texts whose keys are in its cache.

    rows: [W] ascending, as many windows for each row that has any. anchors: [W]. shape: [B, T] of the texts.
    """

    def __init__(self, target: Target, rows: Tensor, anchors: Tensor, shape: tuple[int, int]) -> None:
        self._target, self._rows, self._anchors = target, rows, anchors
        self._count, self._length = shape
        self._width = int(rows.bincount().max())
        self._places = torch.arange(len(rows), device=rows.device) % self._width  # among those of the row

    def read(self, drafts: list[Tensor]) -> Tensor:
        """Hidden states [W, G, K, H] after each token that follows a window's prefix, tokens 0 .. t + 1.

        drafts: [W, G, k] side by side, K in all.
        """
        tokens = torch.cat(drafts, 2)
        (_, group, depths), device = tokens.shape, tokens.device
        width = self._width * group * depths
        columns = torch.arange(width, device=device)
        slots = (self._length + columns).expand(self._count, -1)
        text = torch.zeros(self._count, self._width, group, depths, dtype=torch.int64, device=device)
        positions, known = text.clone(), text.clone()
        place = self._rows, self._places
        text[place] = tokens
        known[place] = self._anchors[:, None, None] + 2  # tokens of the prefix
        positions[place] = known[place] + torch.arange(depths, device=device)
        # a node sees the prefix of its window, and what the window read up to it
        window = columns // depths
        own = (window[:, None] == window) & (columns[:, None] >= columns)
        past = torch.arange(self._length, device=device) >= known.flatten(1)[..., None]
        unseen = torch.cat((past, ~own.expand(self._count, -1, -1)), 2)
        end = self._length + width
        span = self._target.span(0, positions.flatten(1), end, slots=slots, unseen=unseen)
        hidden = self._target.forward(text.flatten(), [span])
        return hidden.view(*text.shape, -1)[place]


def learnable_kl(log_p: Tensor, log_q: Tensor, ids: Tensor | None) -> Tensor:
    """KL(P || Q) less what no training can lower, in nats: [..., V] twice -> [...].

    With S the tokens that the draft knows (ids [S], None for all) the chain rule gives
    KL = KL(P(S) || Q(S)) + P(S) KL(P(. | S) || Q(. | S)). Q(S) is fixed, and the first term about 60 P(not S)
    (`drafts.eagle3_model.OUTSIDE`); the second is returned.

    >>> p, q = torch.tensor([0.5, 0.1, 0.4]).log(), torch.tensor([0.5, 0.5, 1e-26]).log()
    >>> learnable_kl(p, q, None) > 20, round(learnable_kl(p, q, torch.tensor([0, 1])).item(), 4)
    (tensor(True), 0.1456)
    """
    if ids is not None:
        log_p, log_q = log_p.index_select(-1, ids), log_q.index_select(-1, ids)
        known = log_p.logsumexp(-1)
        return (log_p.exp() * (log_p - log_q.log_softmax(-1))).sum(-1) - known.exp() * known
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def window_slots(config: PpowConfig, depths: int) -> int:
    """Tokens of a row's cache that windows need behind the text."""
    return config.windows * config.group_size * depths


def draft_cost(draft: Eagle3, target: Mapping[str, Tensor]) -> float:
    """Parameters of the draft against those of the target's layers; embedding and heads apart.

    target: its weights by HF name.
    """
    own = sum(p.numel() for name, p in draft.named_parameters() if not name.startswith("lm_head"))
    return own / sum(w.numel() for n, w in target.items() if n.startswith(("model.layers.", "model.norm.")))
