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
from rlpipe.spec.sampling import Stream, greedy_rows, log_probs, sample_cdf, softmax
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

    def prefill(self, first: int, starts: list[int], copies: list[int], top: int) -> Emitted:
        """Process the prompts of joined rows and sample their first tokens.

        first: first joined row; rows first.. have their prompt in `table.tokens` and its length in
        `table.total`. starts: first position to process, of the leading len(starts) rows, best ordered
        by the number of tokens to process. copies: rows whose whole prompt the following rows share.
        """
        table, leaders = self._table, first + len(starts)
        rows = slice(first, leaders + len(copies))
        ends = table.total[rows].tolist()
        filled = self._fill(first, starts, ends[: len(starts)])
        ready = torch.cat([part.hidden.index_select(0, part.last) for part in filled])
        if copies:
            source = self._upload(np.asarray(copies) - first)
            ready = torch.cat((ready, ready.index_select(0, source)))
        log_p = log_probs(self._model.logits(ready), self._divisor(rows))
        probs = log_p.exp()
        uniforms = self._upload(table.uniforms[rows, 0, Stream.RESIDUAL])
        token = sample_cdf(self._choices(probs, rows), uniforms).unsqueeze(1)
        if self._gamma:
            self._fill_drafts(filled, token.squeeze(1))
        for target, row in enumerate(copies, leaders):
            table.copy_keys(row, target, int(table.total[target]))
        if self._gamma and copies:
            last = self._upload(table.total[leaders : rows.stop, None] - 1)
            span = self._model.span(leaders, last, max(ends))
            done = len(starts)
            table.hidden[leaders : rows.stop] = self._model.draft(token[done:], ready[done:], span)
        return self._emit(token, None, log_p.unsqueeze(1), probs.unsqueeze(1), top)

    def rebuild(self) -> None:
        """Recompute the keys of all active rows with the present weights."""
        table = self._table
        if table.active:
            ends = table.total[: table.active] - 1
            pending = self._upload(table.tokens[np.arange(table.active), ends])
            filled = self._fill(0, [0] * table.active, ends.tolist())
            if self._gamma:
                self._fill_drafts(filled, pending)

    def step(self, top: int) -> Emitted:
        """One decode step of all active rows."""
        table, width = self._table, self._gamma + 1
        rows = slice(0, table.active)
        row_ids, last = np.arange(table.active), table.total[rows] - 1
        pending = self._upload(table.tokens[row_ids, last][:, None])
        columns = np.arange(width)
        outputs = (table.total[rows] - table.prompt[rows])[:, None] + columns
        uniforms = self._upload(table.uniforms[row_ids[:, None], outputs])
        span = self._model.span(0, self._upload(last[:, None] + columns), int(last.max()) + width)
        run = self._speculate if self._gamma else self._sample
        return run(rows, pending, uniforms, span, top)

    def _sample(
        self, rows: slice, pending: torch.Tensor, uniforms: torch.Tensor, span: Span, top: int
    ) -> Emitted:
        hidden = self._model.forward(pending, span)
        log_p = log_probs(self._model.logits(hidden), self._divisor(rows))
        probs = log_p.exp()
        token = sample_cdf(self._choices(probs, rows), uniforms[:, 0, Stream.RESIDUAL])
        return self._emit(token.unsqueeze(1), None, log_p.unsqueeze(1), probs.unsqueeze(1), top)

    def _speculate(
        self, rows: slice, pending: torch.Tensor, uniforms: torch.Tensor, span: Span, top: int
    ) -> Emitted:
        table, model, gamma = self._table, self._model, self._gamma
        divisor, target_only = self._divisor(rows), self._mode is SpecMode.TARGET_ONLY
        hidden, tokens, draft_probs = table.hidden[rows], [pending], []
        for depth in range(gamma):
            if depth:
                hidden = model.draft(tokens[-1], hidden, span.column(depth - 1))
            logits = model.logits(hidden)
            if target_only:
                tokens.append(logits.argmax(-1, keepdim=True))
            else:
                draft_probs.append(self._choices(softmax(logits, divisor), rows))
                drafted = sample_cdf(draft_probs[-1], uniforms[:, depth, Stream.DRAFT])
                tokens.append(drafted.unsqueeze(1))

        verified = torch.cat(tokens, 1)
        true_hidden = model.forward(verified, span)
        log_p = log_probs(model.logits(true_hidden).unflatten(0, (-1, gamma + 1)), divisor)
        probs = log_p.exp()
        verdict = (verify_target_only if target_only else verify_chain)(
            verified[:, 1:],
            None if target_only else torch.stack(draft_probs, 1),
            self._choices(probs, rows),
            uniforms[:, :gamma, Stream.COIN],
            uniforms[:, 0, Stream.RESIDUAL],
        )
        accepted, next_token = verdict.num_accepted, verdict.next_token.unsqueeze(1)
        emitted = torch.cat((verified[:, 1:], next_token), 1).scatter_(1, accepted.unsqueeze(1), next_token)
        table.hidden[rows] = model.draft(emitted, true_hidden, span, select=accepted)
        return self._emit(emitted, accepted, log_p, probs, top)

    def _fill(self, first: int, starts: list[int], ends: list[int]) -> list[_Filled]:
        """Run the target over tokens [start, end) of consecutive rows, in passes of similar lengths."""
        table, filled = self._table, []
        for begin, stop in self._buckets([end - start for start, end in zip(starts, ends, strict=True)]):
            width = max(ends[i] - starts[i] for i in range(begin, stop))
            columns = np.asarray(starts[begin:stop])[:, None] + np.arange(width)
            columns = np.minimum(columns, self._model.slots - 1)  # padding writes to a slot nobody reads
            rows = np.arange(first + begin, first + stop)[:, None]
            tokens = self._upload(table.tokens[rows, columns])
            span = self._model.span(first + begin, self._upload(columns), max(ends[begin:stop]))
            last = [i * width + ends[begin + i] - starts[begin + i] - 1 for i in range(stop - begin)]
            hidden = self._model.forward(tokens, span)
            filled.append(_Filled(span, hidden, tokens, self._upload(np.asarray(last))))
        return filled

    def _fill_drafts(self, filled: list[_Filled], following: torch.Tensor) -> None:
        """Run the MTP layer over the same tokens; following: [rows], the token after each row's last."""
        first = filled[0].span.first
        for part in filled:
            span = part.span
            rows = slice(span.first, span.first + span.batch)
            tokens = part.tokens.roll(-1, 1)
            tokens.view(-1)[part.last] = following[rows.start - first : rows.stop - first]
            select = part.last - torch.arange(span.batch, device=tokens.device) * span.width
            self._table.hidden[rows] = self._model.draft(tokens, part.hidden, span, select=select)

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

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._model.device)

    def _divisor(self, rows: slice) -> torch.Tensor | None:
        """Temperatures of the rows, None when all are 1; greedy rows have 1."""
        temperature = self._table.temperature[rows]
        return self._upload(temperature) if (temperature != 1).any() else None

    def _choices(self, probs: torch.Tensor, rows: slice) -> torch.Tensor:
        """What is sampled from: [J, ..., V], where greedy rows have a one at their argmax."""
        greedy = self._table.greedy[rows]
        return greedy_rows(probs, self._upload(greedy)) if greedy.any() else probs

    def _emit(
        self,
        tokens: torch.Tensor,
        accepted: torch.Tensor | None,
        log_p: torch.Tensor,
        probs: torch.Tensor,
        top: int,
    ) -> Emitted:
        """The one transfer to the host of a pass."""
        width = tokens.shape[1]
        logprobs = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        entropies = -torch.linalg.vecdot(probs, log_p)
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
