"""Prefill and decode steps over the active rows: draft, verify, catch up.

Owns the order of passes; requests and threads are the engine's business. A decode step with drafts:

    draft    depth 1 is ready from the last step; depths 2..gamma run the MTP layer, one token each
    verify   target over [pending, d_1 .. d_gamma], gamma + 1 distributions, one pass
    judge    rejection or target-only; emitted = accepted drafts + one token of the target
    catch up MTP layer over the emitted tokens with the target's true hidden states: rewrites the
             draft's keys of the prefix, and its output at the last token is the next depth 1

Keys of rejected drafts stay behind and are masked until the next tokens overwrite them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.rollout.embedded.model import Model, Span
from rlpipe.rollout.embedded.rows import RowTable
from rlpipe.spec.sampling import Stream, greedy_rows, log_probs, sample_cdf
from rlpipe.spec.verify import verify_chain, verify_target_only


@dataclass(slots=True, kw_only=True)
class Emitted:
    """Host arrays of what a pass emitted for consecutive rows; W = gamma + 1, or 1.

    tokens: [J, W] int64, valid up to counts [J]. logprobs, entropies: [J, W], of the target.
    drafted: whether this was a verify step. top_ids, top_logprobs: [J, W, k] when asked for.
    """

    tokens: np.ndarray
    counts: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray
    drafted: bool = False
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


@dataclass(slots=True)
class _Filled:
    """A prefill pass: its span, hidden states [B*q, H], tokens [B, q] and index of each row's last token."""

    span: Span
    hidden: torch.Tensor
    tokens: torch.Tensor
    last: torch.Tensor


class Decoder:
    """Runs a model over a row table."""

    def __init__(self, model: Model, table: RowTable, spec: SpecConfig, prefill_tokens: int) -> None:
        self._model, self._table = model, table
        self._mode, self._gamma = spec.mode, spec.drafts
        self._prefill_tokens = prefill_tokens
        device = model.device
        self._depths = torch.arange(self._gamma + 1, device=device)
        self._row_ids = torch.arange(model.rows, device=device)

    def prefill(self, first: int, starts: list[int], copies: list[int], top: int) -> Emitted:
        """Process the prompts of joined rows and sample their first tokens.

        first: first joined row; rows first.. have their prompt in `table.tokens` and its length in
        `table.total`. starts: first position to process, of the leading len(starts) rows, ordered by
        the number of tokens to process. copies: rows whose whole prompt the following rows share.
        """
        table = self._table
        leaders, joined = len(starts), len(starts) + len(copies)
        ends = table.total[first : first + joined].tolist()
        filled = self._fill(first, starts, ends[:leaders])
        ready = torch.cat([f.hidden.index_select(0, f.last) for f in filled])
        if copies:
            source = torch.tensor([row - first for row in copies], device=ready.device)
            ready = torch.cat((ready, ready.index_select(0, source)))
        rows = slice(first, first + joined)
        log_p = log_probs(self._model.logits(ready), self._divisor(rows))
        next_token = sample_cdf(self._probs(log_p, rows), table.uniforms[rows, 0, Stream.RESIDUAL])
        table.pending[rows] = next_token
        table.length[rows] = torch.as_tensor(table.total[rows], device=ready.device)
        table.position[rows] = 1
        self._fill_drafts(filled)
        for target, row in enumerate(copies, first + leaders):
            table.copy_keys(row, target, int(table.total[target]))
        if self._gamma and copies:
            followers = slice(first + leaders, first + joined)
            span = self._span(followers.start, table.length[followers].unsqueeze(1) - 1, max(ends[leaders:]))
            table.hidden[followers] = self._model.draft(
                next_token[leaders:].unsqueeze(1), ready[leaders:], span
            )
        return self._emit(next_token.unsqueeze(1), None, log_p.unsqueeze(1), top)

    def rebuild(self) -> None:
        """Recompute the keys of all active rows with the present weights."""
        table = self._table
        if table.active:
            ends = (table.total[: table.active] - 1).tolist()
            self._fill_drafts(self._fill(0, [0] * table.active, ends))

    def step(self, top: int) -> Emitted:
        """One decode step of all active rows."""
        rows = slice(0, self._table.active)
        return self._speculate(rows, top) if self._gamma else self._sample(rows, top)

    def _sample(self, rows: slice, top: int) -> Emitted:
        table, model = self._table, self._model
        positions = table.length[rows].unsqueeze(1)
        hidden = model.forward(table.pending[rows].unsqueeze(1), self._span(0, positions, self._context()))
        log_p = log_probs(model.logits(hidden), self._divisor(rows))
        uniforms = table.uniforms[self._row_ids[rows], table.position[rows], Stream.RESIDUAL]
        next_token = sample_cdf(self._probs(log_p, rows), uniforms)
        table.pending[rows] = next_token
        table.length[rows] += 1
        table.position[rows] += 1
        return self._emit(next_token.unsqueeze(1), None, log_p.unsqueeze(1), top)

    def _speculate(self, rows: slice, top: int) -> Emitted:
        table, model, gamma = self._table, self._model, self._gamma
        batch, context = rows.stop, self._context()
        length, divisor = table.length[rows], self._divisor(rows)
        steps = table.position[rows].unsqueeze(1) + self._depths
        uniforms = table.uniforms[self._row_ids[rows].unsqueeze(1), steps]

        hidden, drafts, draft_probs = table.hidden[rows], [], []
        for depth in range(gamma):
            logits = model.logits(hidden)
            if self._mode is SpecMode.TARGET_ONLY:
                drafted = logits.argmax(-1)
            else:
                q = self._probs(log_probs(logits, divisor), rows)
                drafted = sample_cdf(q, uniforms[:, depth, Stream.DRAFT])
                draft_probs.append(q)
            drafts.append(drafted)
            if depth + 1 < gamma:
                span = self._span(0, (length + depth).unsqueeze(1), context)
                hidden = model.draft(drafted.unsqueeze(1), hidden, span)

        draft_tokens = torch.stack(drafts, 1)
        span = self._span(0, length.unsqueeze(1) + self._depths, context)
        true_hidden = model.forward(torch.cat((table.pending[rows].unsqueeze(1), draft_tokens), 1), span)
        log_p = log_probs(model.logits(true_hidden).view(batch, gamma + 1, -1), divisor)
        verify = verify_target_only if self._mode is SpecMode.TARGET_ONLY else verify_chain
        verdict = verify(
            draft_tokens,
            torch.stack(draft_probs, 1) if draft_probs else None,
            self._probs(log_p, rows),
            uniforms[:, :gamma, Stream.COIN],
            uniforms[:, 0, Stream.RESIDUAL],
        )
        accepted, next_token = verdict.num_accepted, verdict.next_token
        tokens = torch.cat((draft_tokens, next_token.unsqueeze(1)), 1)
        tokens.scatter_(1, accepted.unsqueeze(1), next_token.unsqueeze(1))
        table.hidden[rows] = model.draft(tokens, true_hidden, span, select=accepted)
        table.pending[rows] = next_token
        table.length[rows] += accepted + 1
        table.position[rows] += accepted + 1
        return self._emit(tokens, accepted, log_p, top)

    def _fill(self, first: int, starts: list[int], ends: list[int]) -> list[_Filled]:
        """Run the target over tokens [start, end) of consecutive rows, in passes of similar lengths."""
        table, device = self._table, self._model.device
        filled = []
        for begin, stop in self._buckets([end - start for start, end in zip(starts, ends, strict=True)]):
            width = max(ends[i] - starts[i] for i in range(begin, stop))
            columns = np.asarray(starts[begin:stop])[:, None] + np.arange(width)
            columns = np.minimum(columns, self._model.slots - 1)  # padding writes to a slot nobody reads
            rows = np.arange(first + begin, first + stop)[:, None]
            tokens = torch.as_tensor(table.tokens[rows, columns], device=device)
            span = self._span(first + begin, torch.as_tensor(columns, device=device), max(ends[begin:stop]))
            last = [i * width + ends[begin + i] - starts[begin + i] - 1 for i in range(stop - begin)]
            hidden = self._model.forward(tokens, span)
            filled.append(_Filled(span, hidden, tokens, torch.tensor(last, device=device)))
        return filled

    def _fill_drafts(self, filled: list[_Filled]) -> None:
        """Run the MTP layer over the same tokens, each with the token after it (`pending` at the end)."""
        if not self._gamma:
            return
        for part in filled:
            rows = slice(part.span.first, part.span.first + part.span.batch)
            following = part.tokens.roll(-1, 1).view(-1)
            following[part.last] = self._table.pending[rows]
            offsets = torch.arange(part.span.batch, device=following.device) * part.span.width
            self._table.hidden[rows] = self._model.draft(
                following.view_as(part.tokens), part.hidden, part.span, select=part.last - offsets
            )

    def _buckets(self, sizes: list[int]) -> list[tuple[int, int]]:
        """Split consecutive rows so that little is padded and a pass stays within the token budget."""
        buckets, begin = [], 0
        for index in range(1, len(sizes) + 1):
            if index < len(sizes):
                window = sizes[begin : index + 1]
                padded = max(window) * len(window)
                if padded <= self._prefill_tokens and padded <= 1.25 * sum(window) + 64:
                    continue
            buckets.append((begin, index))
            begin = index
        return buckets

    def _span(self, first: int, positions: torch.Tensor, context: int) -> Span:
        return self._model.span(first, positions, context)

    def _context(self) -> int:
        return int(self._table.total[: self._table.active].max()) + self._gamma

    def _divisor(self, rows: slice) -> torch.Tensor | None:
        """Temperatures of the rows, None when all are 1; greedy rows have 1."""
        return self._table.temperature[rows] if self._table.divides[rows].any() else None

    def _probs(self, log_p: torch.Tensor, rows: slice) -> torch.Tensor:
        probs = log_p.exp()
        if self._table.takes_best[rows].any():
            probs = greedy_rows(probs, self._table.greedy[rows])
        return probs

    def _emit(
        self, tokens: torch.Tensor, accepted: torch.Tensor | None, log_p: torch.Tensor, top: int
    ) -> Emitted:
        """The one transfer to the host of a pass."""
        width = tokens.shape[1]
        logprobs = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        entropies = -torch.linalg.vecdot(log_p.exp(), log_p)
        parts = [tokens, logprobs, entropies]
        if accepted is not None:
            parts.append(accepted.unsqueeze(1))
        if top:
            best = log_p.topk(min(top, log_p.shape[-1]), -1)
            parts += [best.indices.flatten(1), best.values.flatten(1)]
        host = torch.cat([part.double() for part in parts], 1).cpu().numpy()
        ints = host[:, :width].astype(np.int64)
        at = 3 * width
        counts = np.ones(len(host), np.int64)
        if accepted is not None:
            counts += host[:, at].astype(np.int64)
            at += 1
        emitted = Emitted(
            tokens=ints,
            counts=counts,
            logprobs=host[:, width : 2 * width],
            entropies=host[:, 2 * width : 3 * width],
            drafted=accepted is not None,
        )
        if top:
            ids, values = np.split(host[:, at:], 2, axis=1)
            emitted.top_ids = ids.astype(np.int64).reshape(len(host), width, -1)
            emitted.top_logprobs = values.reshape(len(host), width, -1)
        return emitted
