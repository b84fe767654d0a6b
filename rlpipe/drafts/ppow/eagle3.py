"""PPOW for an EAGLE-3 draft: its windows over rows of texts, drafted by its own steps, read by the target.

Owns the passes of draft and target over a micro-batch and its windows. Which windows, the verdict on them and
the loss are `rlpipe.drafts.ppow.step`', the same as for an MTP layer.

    target over some rows          -> hidden states, features; its cache keeps the keys
    step 1 of the draft, all texts -> Q along the text, keys      criticality -> W anchors t
    steps 2..K                     -> G windows from each anchor  the gradient flows through here
    target, W G K more             -> P after every draft         behind the texts' keys, no gradient
    target, K - 1 passes over W    -> the greedy window from each anchor, where R_dist counts

Windows of a row stand in its cache side by side, each seeing its prefix and itself, as nodes of a tree do
(`Target.span`). An anchor t knows token t + 1 and drafts t + 2 .. t + K + 1, and drafts exactly as the
engine: deeper steps attend to step 1 of the prefix and to their own.

Differs from an MTP layer's PPOW in the head, which is the draft's own and learns, too, and with a reduced
vocabulary in the divergence that makes a place critical (`learnable_kl`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlpipe.batch import MicroBatch, as_rows
from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.draft_batch import DraftBatch, draft_batch
from rlpipe.drafts.eagle3 import Eagle3, Windows
from rlpipe.drafts.loss import depth_targets
from rlpipe.drafts.objectives.windows.ppow import loss as windows_loss
from rlpipe.drafts.ppow import PpowTotals, criticality, hard_share, window_scores
from rlpipe.drafts.ppow.step import Drawn, Judged, draw_windows, judge_windows, sampled
from rlpipe.drafts.target import Target

LOGITS = {"cuda": 2**26, "cpu": 2**23}  # numbers of the logits held at once while places are scored
ReadTarget = Callable[[np.ndarray, np.ndarray], tuple[Tensor, Tensor]]


@dataclass(slots=True, kw_only=True)
class Rollout:
    """What was drafted from some rows, and the verdict.

    rows, anchors: [W] row of the target's cache, and anchor t in it. tokens: [W, G, K]. logprobs:
    [W, G, K, V] of the draft where each was drawn, with a graph.
    """

    drawn: Drawn
    rows: Tensor
    anchors: Tensor
    tokens: Tensor
    logprobs: Tensor
    judged: Judged


@dataclass(slots=True, kw_only=True)
class _Rows:
    """Rows of the target's cache with their turns; see `DraftBatch`.

    tokens, ahead: [B, T] read by target and draft. lengths: [B]. owners: [R]. turns, sampled: [R, L].
    anchors: [R, L] place in the flat view of the rows.
    """

    tokens: np.ndarray
    ahead: np.ndarray
    lengths: np.ndarray
    owners: np.ndarray
    turns: np.ndarray
    sampled: np.ndarray
    anchors: np.ndarray


class Eagle3Ppow:
    """The objective of an EAGLE-3 draft that is trained with PPOW.

    target: whose cache has room for `window_slots` tokens behind the texts. read: tokens [B, T] and lengths
    [B] of at most `target.rows` rows -> hidden states [B * T, H], features [B, T, F]; leaves their keys.
    draft_cost: c of the reward. depths: drafts of a window, K. steps: updates of the run.
    """

    def __init__(
        self,
        config: PpowConfig,
        draft: Eagle3,
        target: Target,
        read: ReadTarget,
        autocast: Callable[[], AbstractContextManager],
        *,
        draft_cost: float,
        depths: int,
        steps: int,
        seed: int,
    ) -> None:
        self._config, self._draft, self._target = config, draft, target
        self._read, self._autocast, self._draft_cost = read, autocast, draft_cost
        self._depths, self._steps, self._seed = depths, steps, seed

    def losses(self, micro: MicroBatch, temperature: float, step: int) -> Iterator[tuple[Tensor, PpowTotals]]:
        """Sums over drafts of the loss, and totals, of some rows at a time; step: updates so far.

        Take each gradient before the next, and graphs of a few rows are all that is kept.
        """
        for found in self.rollouts(micro, temperature, step):
            told = (found.logprobs, found.tokens, found.judged, found.drawn.scores)
            yield windows_loss(*told, self.hard_share(step), self._config)

    def hard_share(self, step: int) -> float:
        """Share of windows drawn by their score in the update after `step` others."""
        return hard_share(step, self._steps, self._config.hard_start, self._config.hard_end)

    def rollouts(self, micro: MicroBatch, temperature: float, step: int) -> Iterator[Rollout]:
        """Windows of a micro-batch, drafted and judged, as many rows at a time as the target's cache has."""
        batch = draft_batch(micro, 1)
        for rows in self._rows(micro, batch) if batch else ():
            hidden, features = self._read(rows.tokens, rows.lengths)
            past: list[tuple[Tensor, Tensor]] = []
            with self._autocast():
                (states,) = self._draft.unroll(features, self._embedded(self._move(rows.ahead)[None]), past)
            drawn = self._choose(micro, rows, states.detach().flatten(0, 1), hidden, temperature, step)
            if drawn is None:
                continue
            places = self._move(rows.anchors[drawn.turns, drawn.columns])
            at, anchors = places // states.shape[1], places % states.shape[1]
            uniforms, coins = self._move(drawn.draft_uniforms), self._move(drawn.coins)
            windows = Windows(self._draft, past[0], at, anchors)
            tokens, log_q = self._drafted(windows, states[at, anchors], uniforms, temperature)
            ahead = _Ahead(self._target, at, anchors, rows.tokens.shape)
            first = self._of_target(hidden[places + 1], temperature)
            judged = self._judge(ahead, first, tokens, log_q.detach(), coins, temperature)
            yield Rollout(drawn=drawn, rows=at, anchors=anchors, tokens=tokens, logprobs=log_q, judged=judged)

    def _rows(self, micro: MicroBatch, batch: DraftBatch) -> Iterator[_Rows]:
        """The batch's trajectories as rows, cut into as many as are read at once."""
        tokens, cells = as_rows(batch.branches, micro.tokens[batch.places])
        ahead, _ = as_rows(batch.branches, batch.following[0])
        lengths = np.array([branch.length for branch in batch.branches])
        rows, anchors = np.divmod(cells[batch.anchors], tokens.shape[1])
        for first in range(0, len(tokens), self._target.rows):
            part = slice(first, first + self._target.rows)
            longest = int(lengths[part].max())
            mine = (rows[:, 0] >= part.start) & (rows[:, 0] < part.stop)  # a turn has a first anchor
            if mine.any():
                places = (rows[mine] - first).clip(0) * longest + anchors[mine]
                yield _Rows(
                    tokens=tokens[part, :longest],
                    ahead=ahead[part, :longest],
                    lengths=lengths[part],
                    owners=batch.owners[mine],
                    turns=batch.tokens[mine],
                    sampled=batch.sampled[mine],
                    anchors=places,
                )

    @torch.no_grad()
    def _choose(
        self, micro: MicroBatch, rows: _Rows, states: Tensor, hidden: Tensor, temperature: float, step: int
    ) -> Drawn | None:
        """Anchors by criticality, all drafts of a window within its turn; None where none is long enough."""
        turns, own = torch.from_numpy(rows.turns), torch.from_numpy(rows.sampled)
        whole = depth_targets(turns, own, self._depths).mask[:, -1].view(turns.shape)
        if not whole.any():
            return None
        near = depth_targets(turns, own, 1).mask[:, 0]
        places = self._move(rows.anchors.ravel()[near.numpy()])
        critical = torch.zeros(near.shape)
        found = []
        for some in places.split(max(1, LOGITS[places.device.type] // self._draft.shape.vocab)):
            with self._autocast():
                draft = self._draft.logits(states[some])
            log_q, log_p = _normal(draft, temperature), self._of_target(hidden[some + 1], temperature)
            entropy, kl = -(log_p.exp() * log_p).sum(-1), learnable_kl(log_p, log_q, self._draft.ids)
            found.append(criticality(entropy, kl, self._draft.shape.vocab))
        critical[near] = torch.cat(found).cpu()
        return draw_windows(
            window_scores(critical.view(turns.shape), self._depths),
            whole,
            rows.owners,
            micro.rows,
            self._config,
            hard=self.hard_share(step),
            depths=self._depths,
            seed=self._seed,
            step=step,
        )

    def _drafted(
        self, windows: Windows, state: Tensor, uniforms: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Tokens [W, G, K] and logprobs [W, G, K, V] of the draft at each; state: [W, H] of step 1."""
        state = state[:, None].expand(-1, self._config.group_size, -1)
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        with self._autocast():
            for depth in range(self._depths):
                if depth:
                    state = windows.step(state, self._embedded(tokens[-1]))
                logprobs.append(_normal(self._draft.logits(state), temperature))
                tokens.append(sampled(logprobs[-1], uniforms[..., depth]))
        return torch.stack(tokens, 2), torch.stack(logprobs, 2)

    @torch.no_grad()
    def _judge(
        self, ahead: _Ahead, first: Tensor, tokens: Tensor, log_q: Tensor, coins: Tensor, temperature: float
    ) -> Judged:
        """Verification of the windows, and what they earn; first: [W, V] of the target after its prefix."""
        later = self._of_target(ahead.read([tokens]), temperature)
        log_p = torch.cat((first[:, None, None].expand(-1, tokens.shape[1], -1, -1), later), 2)
        greedy = None
        if self._config.proximity:
            largest, token = first.max(-1)
            best, chosen = [largest], []
            for _ in range(1, self._depths):
                chosen.append(token[:, None, None])
                after = self._of_target(ahead.read(chosen)[:, 0, -1], temperature)
                largest, token = after.max(-1)
                best.append(largest)
            greedy = torch.stack(best, 1)
        return judge_windows(tokens, log_q, log_p, coins, greedy, self._config, self._draft_cost)

    def _of_target(self, hidden: Tensor, temperature: float) -> Tensor:
        """[..., H] -> [..., V] log-probabilities."""
        flat = self._target.logits(hidden.flatten(0, -2))
        return _normal(flat.unflatten(0, hidden.shape[:-1]), temperature)

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self._target.embedding[tokens].float()

    def _move(self, values: np.ndarray | Tensor) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(values)).to(self._target.device)


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
    (`drafts.eagle3.OUTSIDE`); the second is returned.

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


def _normal(logits: Tensor, temperature: float) -> Tensor:
    return (logits.float() / temperature).log_softmax(-1)
