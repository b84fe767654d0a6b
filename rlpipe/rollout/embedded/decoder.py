"""A decode step: draft, verify together with the prompts that join, judge, catch up.

Owns the order of passes; requests and threads are the engine's business. In one step

    draft    rows that decode: depth 1 is ready from the last step, depths 2..gamma run the MTP layer
    verify   the target over [pending, d_1 .. d_gamma] of each of them, and over the prompts of joining
             rows, in one pass
    judge    rejection or target-only; emitted = accepted drafts + one token of the target. A joining
             row samples its first token
    catch up MTP layer over the emitted tokens (and prompts) with the target's true hidden states:
             rewrites the draft's keys of the prefix, and its output at a row's last token is the next
             depth 1

Keys of rejected drafts stay behind and are masked until the next tokens overwrite them. Without
speculation only the middle remains: one token per row.
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
    """Host arrays of what a step emitted for rows 0, 1, ...; W = gamma + 1.

    tokens: [J, W] int64, valid up to counts [J]. logprobs, entropies: [J, W], of the target.
    verified: the leading rows that verified drafts. top_ids, top_logprobs: [J, W, k] when asked for.
    """

    tokens: np.ndarray
    counts: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray
    verified: int
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


@dataclass(slots=True)
class _Part:
    """Tokens [B, q] of rows first, first + 1, ... in a pass; last: [B], index of each row's last real one."""

    first: int
    span: Span
    tokens: torch.Tensor
    last: torch.Tensor

    @property
    def flat_last(self) -> torch.Tensor:
        return self.last + torch.arange(0, self.span.tokens, self.span.width, device=self.last.device)


@dataclass(slots=True)
class _Drafted:
    """Drafts of the decoding rows: part to verify, uniforms [A, gamma + 1, 3], q per depth [A, V]."""

    part: _Part
    uniforms: torch.Tensor
    probs: list[torch.Tensor]


class Decoder:
    """Runs a model over a row table."""

    def __init__(self, model: Model, table: RowTable, spec: SpecConfig, prefill_tokens: int) -> None:
        self._model, self._table = model, table
        self._target_only, self._gamma = spec.mode is SpecMode.TARGET_ONLY, spec.drafts
        self._prefill_tokens = prefill_tokens

    def step(self, starts: list[int], copies: list[int], top: int) -> Emitted:
        """Decode all active rows by one step; the last len(starts) + len(copies) of them are new.

        starts: first position to process of the new rows, best ordered by how much there is to process.
        copies: rows (among those) whose whole prompt is that of the rows after them.
        """
        table, model, width = self._table, self._model, self._gamma + 1
        decoding = table.active - len(starts) - len(copies)
        drafted = self._draft(decoding) if decoding else None
        fills = self._fills(decoding, starts, table.total[decoding : decoding + len(starts)])
        parts = [drafted.part, *fills] if drafted else fills
        spans = [part.span for part in parts]
        hidden = model.forward(torch.cat([part.tokens.flatten() for part in parts]), spans)

        # Rows of the target that are needed: all of a decoding row, the last of a prompt.
        ready, start = [hidden[: decoding * width]], decoding * width
        for part in fills:
            ready.append(hidden[start : start + part.span.tokens].index_select(0, part.flat_last))
            start += part.span.tokens
        if copies:
            ready.append(torch.cat(ready[1:]).index_select(0, self._upload(np.asarray(copies) - decoding)))
        ready = torch.cat(ready)
        rows = np.concatenate((np.arange(decoding).repeat(width), np.arange(decoding, table.active)))
        log_p = log_probs(model.logits(ready), self._divisor(rows))
        probs = log_p.exp()
        choices = self._choices(probs, rows)

        verified = decoding * width
        tokens, accepted = [], None
        if drafted:
            emitted, accepted = self._judge(drafted, choices[:verified].unflatten(0, (-1, width)))
            tokens.append(emitted.flatten())
        if decoding < table.active:
            uniforms = self._upload(table.uniforms[decoding : table.active, 0, Stream.RESIDUAL])
            tokens.append(sample_cdf(choices[verified:], uniforms))
        new_tokens = tokens[-1]
        if self._gamma:
            self._catch_up(parts, fills, tokens, accepted, hidden)
        if copies:
            self._copy(
                decoding + len(starts), copies, new_tokens[len(starts) :], ready[verified + len(starts) :]
            )
        return self._emit(torch.cat(tokens), accepted, log_p, probs, decoding, top)

    def rebuild(self) -> None:
        """Recompute the keys of all active rows with the present weights."""
        table = self._table
        if not table.active:
            return
        ends = table.total[: table.active] - 1
        fills = self._fills(0, [0] * table.active, ends)
        for part in fills:  # one by one: all rows at once may be far beyond the prefill budget
            hidden = self._model.forward(part.tokens.flatten(), [part.span])
            if self._gamma:
                rows = np.arange(part.first, part.first + part.span.batch)
                following = self._upload(table.tokens[rows, ends[rows]])
                self._catch_up([part], [part], [following], None, hidden)

    def _draft(self, decoding: int) -> _Drafted:
        """Draft gamma tokens for rows [0, decoding)."""
        table, model, width = self._table, self._model, self._gamma + 1
        rows, columns = np.arange(decoding), np.arange(width)
        last = table.total[:decoding] - 1
        outputs = (table.total[:decoding] - table.prompt[:decoding])[:, None] + columns
        uniforms = self._upload(table.uniforms[rows[:, None], outputs])
        tokens, probs, hidden = [self._upload(table.tokens[rows, last])], [], table.hidden[:decoding]
        span = model.span(0, self._upload(last[:, None] + columns), int(last.max()) + width)
        divisor = self._divisor(rows)
        for depth in range(self._gamma):
            if depth:
                hidden = model.draft(tokens[-1], hidden, [span.column(depth - 1)])
            logits = model.logits(hidden)
            if self._target_only:
                tokens.append(logits.argmax(-1))
            else:
                probs.append(self._choices(softmax(logits, divisor), rows))
                tokens.append(sample_cdf(probs[-1], uniforms[:, depth, Stream.DRAFT]))
        stacked = torch.stack(tokens, 1)
        return _Drafted(_Part(0, span, stacked, torch.zeros_like(stacked[:, 0])), uniforms, probs)

    def _judge(self, drafted: _Drafted, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Emitted tokens [A, gamma + 1], valid up to accepted + 1, and accepted [A]."""
        uniforms, drafts = drafted.uniforms, drafted.part.tokens[:, 1:]
        if not self._gamma:
            token = sample_cdf(choices[:, 0], uniforms[:, 0, Stream.RESIDUAL])
            return token.unsqueeze(1), drafted.part.last
        verdict = (verify_target_only if self._target_only else verify_chain)(
            drafts,
            None if self._target_only else torch.stack(drafted.probs, 1),
            choices,
            uniforms[:, : self._gamma, Stream.COIN],
            uniforms[:, 0, Stream.RESIDUAL],
        )
        next_token = verdict.next_token.unsqueeze(1)
        emitted = torch.cat((drafts, next_token), 1)
        return emitted.scatter_(1, verdict.num_accepted.unsqueeze(1), next_token), verdict.num_accepted

    def _catch_up(
        self,
        parts: list[_Part],
        fills: list[_Part],
        tokens: list[torch.Tensor],
        accepted: torch.Tensor | None,
        hidden: torch.Tensor,
    ) -> None:
        """Run the MTP layer over the tokens that the target just processed, each with its next token.

        tokens: those emitted by the decoding rows, if any, then the first tokens of the filled rows.
        """
        following = [tokens[0]] if accepted is not None else []
        selects = [accepted] if accepted is not None else []
        start = 0
        for part in fills:
            shifted = part.tokens.roll(-1, 1).flatten()
            shifted[part.flat_last] = tokens[-1][start : start + part.span.batch]
            following.append(shifted)
            selects.append(part.last)
            start += part.span.batch
        state = self._model.draft(torch.cat(following), hidden, [part.span for part in parts], selects)
        first = parts[0].first
        self._table.hidden[first : first + len(state)] = state

    def _copy(self, first: int, copies: list[int], tokens: torch.Tensor, hidden: torch.Tensor) -> None:
        """Copy the keys of rows to the rows first, first + 1, ... whose first token may be another one."""
        table = self._table
        for target, row in enumerate(copies, first):
            table.copy_keys(row, target, int(table.total[target]))
        if self._gamma:
            rows = slice(first, first + len(copies))
            last = table.total[rows, None] - 1
            span = self._model.span(first, self._upload(last), int(last.max()) + 1)
            table.hidden[rows] = self._model.draft(tokens, hidden, [span])

    def _fills(self, first: int, starts: list[int], ends: np.ndarray) -> list[_Part]:
        """The tokens [start, end) of rows first, first + 1, ..., in parts of similar lengths."""
        parts, sizes = [], [int(end) - start for start, end in zip(starts, ends, strict=True)]
        for begin, stop in self._buckets(sizes):
            columns = np.asarray(starts[begin:stop])[:, None] + np.arange(max(sizes[begin:stop]))
            columns = np.minimum(columns, self._model.slots - 1)  # padding goes to a slot nobody reads
            rows = np.arange(first + begin, first + stop)[:, None]
            span = self._model.span(first + begin, self._upload(columns), int(ends[begin:stop].max()))
            tokens = self._upload(self._table.tokens[rows, columns])
            last = self._upload(np.asarray(sizes[begin:stop]) - 1)
            parts.append(_Part(first + begin, span, tokens, last))
        return parts

    def _buckets(self, sizes: list[int]) -> list[tuple[int, int]]:
        """Split consecutive rows so that little is padded and a part stays within the token budget."""
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

    def _divisor(self, rows: np.ndarray) -> torch.Tensor | None:
        """Temperatures of the rows, None when all are 1; greedy rows have 1."""
        temperature = self._table.temperature[rows]
        return self._upload(temperature) if (temperature != 1).any() else None

    def _choices(self, probs: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """What is sampled from, [N, V]: greedy rows have a one at their argmax."""
        greedy = self._table.greedy[rows]
        return greedy_rows(probs, self._upload(greedy)) if greedy.any() else probs

    def _emit(
        self,
        tokens: torch.Tensor,
        accepted: torch.Tensor | None,
        log_p: torch.Tensor,
        probs: torch.Tensor,
        decoding: int,
        top: int,
    ) -> Emitted:
        """The one transfer to the host of a step."""
        width, count = self._gamma + 1, len(tokens)
        logprobs = log_p.gather(1, tokens.unsqueeze(1)).squeeze(1)
        parts = [tokens, logprobs, -torch.linalg.vecdot(probs, log_p)]
        if accepted is not None:
            parts.append(accepted)
        if top:
            best = log_p.topk(min(top, log_p.shape[1]), 1)
            parts += [best.indices.flatten(), best.values.flatten()]
        host = torch.cat([part.double() for part in parts]).cpu().numpy()
        counts = np.ones(self._table.active, np.int64)
        if accepted is not None:
            counts[:decoding] += host[3 * count : 3 * count + decoding].astype(np.int64)

        def by_row(flat: np.ndarray) -> np.ndarray:
            """[N, ...] -> [rows, W, ...]; a new row has one token, the rest is padding."""
            split = decoding * width
            rows = np.zeros((len(counts), width, *flat.shape[1:]), flat.dtype)
            rows[:decoding] = flat[:split].reshape(decoding, width, *flat.shape[1:])
            rows[decoding:, 0] = flat[split:]
            return rows

        emitted = Emitted(
            tokens=by_row(host[:count].astype(np.int64)),
            counts=counts,
            logprobs=by_row(host[count : 2 * count]),
            entropies=by_row(host[2 * count : 3 * count]),
            verified=decoding if self._gamma else 0,
        )
        if top:
            ids, values = np.split(host[-2 * best.indices.numel() :], 2)
            emitted.top_ids = by_row(ids.astype(np.int64).reshape(count, -1))
            emitted.top_logprobs = by_row(values.reshape(count, -1))
        return emitted
