"""A decode step: draft, run the target over drafts and new prompts, verify, let the draft catch up.

Owns the order of passes. `drafting` owns how tokens are drafted and verified, the engine owns requests and
threads. One step consists of:

    draft    rows that decode: depth 1 is ready from the last step, deeper ones run the draft layer
    target   the target over [pending, drafts] of these rows, and over the prompts of joining rows,
             in one pass
    verify   emitted = accepted drafts + one token of the target. A joining row samples its first token
    catch up draft layer over the emitted tokens (and prompts) with the target's true hidden states:
             rewrites the draft's keys of the prefix, and its output at a row's last token is the next
             depth 1

Keys of rejected drafts stay in the cache and are masked until the next tokens overwrite them. Without
speculation a step is only the target pass, with one token per row. An adaptive gamma may be 0 for a while.
Then the draft does not catch up: the target's hidden states of those steps are stored, and the draft
processes them in one pass when drafting resumes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rlpipe.rollout.embedded.depths import anchor_span, behind, carried
from rlpipe.rollout.embedded.drafting import Drafted, Drafting, Part
from rlpipe.rollout.embedded.mlp import last_routes
from rlpipe.rollout.embedded.model import Model
from rlpipe.rollout.embedded.rows import RowTable
from rlpipe.rollout.embedded.sampler import Distributions
from rlpipe.rollout.embedded.span import flat_index
from rlpipe.spec.sampling import Stream


@dataclass(slots=True, kw_only=True)
class Emitted:
    """Host arrays of the tokens that a step emitted for rows 0, 1, ...; W is 1 + max accepted drafts.

    tokens: [J, W] int32, valid up to counts [J]. logprobs, entropies: [J, W] float32, of the target.
    verified: number of leading rows that verified drafts. top_ids, top_logprobs: [J, W, k] on request.
    draft_tokens, draft_target_probs, draft_probs: [verified, N], on request: the draft tokens, and the
    target's and the draft's probability of each.
    """

    tokens: np.ndarray
    counts: np.ndarray
    logprobs: np.ndarray
    entropies: np.ndarray
    verified: int
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    draft_tokens: np.ndarray | None = None
    draft_target_probs: np.ndarray | None = None
    draft_probs: np.ndarray | None = None


class Decoder:
    """Runs a model over a row table."""

    def __init__(self, model: Model, table: RowTable, drafting: Drafting, prefill_tokens: int) -> None:
        self._model, self._table, self._drafting = model, table, drafting
        self._prefill_tokens = prefill_tokens

    def step(
        self, starts: list[int], copies: list[int], *, gamma: int, top: int = 0, record: bool = False
    ) -> Emitted:
        """Decode all active rows by one step; the last len(starts) + len(copies) of them are new.

        starts: for each new row that is filled, the first position to process; preferably ordered by the
        number of tokens to process. copies: for each further new row, the filled row that has the same
        prompt.
        gamma: drafts per row. record: return drafts with their probabilities.
        """
        table, model = self._table, self._model
        decoding = table.active - len(starts) - len(copies)

        # A lookup drafter has no keys, so it has no gap to close and need not catch up.
        drafts_on = bool(gamma) and model.drafts
        if drafts_on:
            self._close_gaps(decoding)
        drafted = self._drafting.draft(decoding, gamma) if decoding else None
        fills = self._fills(decoding, starts, table.total[decoding : decoding + len(starts)])
        parts = [drafted.part, *fills] if drafted else fills
        spans = [part.span for part in parts]

        hidden, inputs = model.forward_to_draft(torch.cat([part.tokens.flatten() for part in parts]), spans)
        routes = None if table.routes is None else last_routes(layer.mlp for layer in model.layers)

        # Sample from all hidden states of a decoding row, and from the last one of a prompt.
        nodes = drafted.part.span.tokens if drafted else 0
        ready = torch.cat((hidden[:nodes], self._prompt_ends(hidden, nodes, decoding, fills, copies)))
        copied = self._prompt_ends(inputs, nodes, decoding, fills, copies)[len(starts) :] if copies else None
        rows = np.arange(table.active)
        if drafted:
            rows = np.concatenate((rows[:decoding].repeat(drafted.part.span.width), rows[decoding:]))
        laws = table.sampler.distributions(model.logits(ready), table.divisor(rows))
        choices = table.sampled_from(laws.probs, rows)

        # The decoding rows emit accepted drafts; the new rows sample their first token.
        tokens, accepted, drafts = [], None, None
        if drafted:
            choices_after = choices[:nodes].unflatten(0, (decoding, -1))
            verified = self._drafting.verify(drafted, choices_after)
            accepted, parts[0] = verified.accepted, verified.part
            tokens.append(verified.tokens.flatten())

            # With a tree, retain only the states of the accepted path.
            if verified.nodes is not None:
                first = torch.arange(0, nodes, nodes // decoding, device=hidden.device).unsqueeze(1)
                path, rest = (verified.nodes + first).flatten(), slice(nodes, None)
                inputs = torch.cat((inputs[path], inputs[rest]))
                laws = laws.select(path).then(laws.select(rest))
                routes = None if routes is None else torch.cat((routes[path], routes[rest]))

            if record and gamma:
                drafts = _draft_probs(drafted, choices_after)

        if decoding < table.active:
            uniforms = self._upload(table.uniforms[decoding : table.active, 0, Stream.RESIDUAL])
            tokens.append(table.sampler.sample(choices[nodes:], uniforms))

        new_tokens = tokens[-1]

        # Routes of rejected drafts are overwritten later, like their keys.
        if routes is not None:
            kept = table.routes
            kept.flatten(0, 1)[torch.from_numpy(self._slots(parts))] = routes.to("cpu", kept.dtype)

        # The draft writes its keys for the emitted tokens, and computes the next depth 1.
        read = self._catch_up(parts, fills, tokens, accepted, inputs) if drafts_on else []
        if table.history is not None and (not drafts_on or model.depths > 1):
            table.history.flatten(0, 1).index_copy_(0, self._places(parts), inputs)

        if copies:
            read = [copied, *(states[copies] for states in read)]
            self._copy(decoding + len(starts), copies, new_tokens[len(starts) :], read, drafts_on)

        self._note_draft_keys(decoding, starts, copies, gamma)
        emitted = self._emit(torch.cat(tokens), accepted, laws, decoding, top)
        emitted.verified = decoding if gamma else 0
        if drafts is not None:
            emitted.draft_tokens, emitted.draft_target_probs, emitted.draft_probs = drafts
        return emitted

    def _prompt_ends(
        self, states: torch.Tensor, nodes: int, decoding: int, fills: list[Part], copies: list[int]
    ) -> torch.Tensor:
        """Return the states of the last prompt tokens, first of the filled rows, then of the copied rows.

        states: [N, H], of a pass that begins with `nodes` tokens of decoding rows.
        """
        ends, start = [states[:0]], nodes
        for part in fills:
            ends.append(states[start : start + part.span.tokens].index_select(0, part.flat_last))
            start += part.span.tokens
        if copies:
            ends.append(torch.cat(ends).index_select(0, self._upload(np.asarray(copies) - decoding)))
        return torch.cat(ends)

    def rebuild(self) -> None:
        """Recompute the keys of all active rows with the current weights."""
        table = self._table
        if not table.active:
            return
        ends = table.total[: table.active] - 1
        fills = self._fills(0, [0] * table.active, ends)

        # Process one part at a time, because all rows at once may far exceed the prefill budget.
        for part in fills:
            _, inputs = self._model.forward_to_draft(part.tokens.flatten(), [part.span])
            if self._model.drafts:
                rows = np.arange(part.first, part.first + part.span.batch)
                following = self._upload(table.tokens[rows, ends[rows]])
                self._catch_up([part], [part], [following], None, inputs)

        table.draft_keys[: table.active] = self._model.slots

    def _close_gaps(self, decoding: int) -> None:
        """Run the draft over the tokens that rows decoded while the draft was off."""
        table, rows = self._table, slice(0, decoding)
        ends = table.total[rows] - 1
        if table.history is None or (table.draft_keys[rows] >= ends).all():
            return

        # Each deeper layer reads one more token before the gap.
        starts = np.minimum(table.draft_keys[rows], ends - 1) + 1 - self._model.depths
        starts = np.maximum(starts, 0)

        for part in self._fills(0, starts.tolist(), ends):
            hidden = table.history.flatten(0, 1)[self._places([part])]
            own = np.arange(part.first, part.first + part.span.batch)
            following = self._upload(table.tokens[own, ends[own]])
            self._catch_up([part], [part], [following], None, hidden)

    def _places(self, parts: list[Part]) -> torch.Tensor:
        """Return the indices in `RowTable.history`, on the device, of the tokens of some parts."""
        return self._upload(self._slots(parts))

    def _slots(self, parts: list[Part]) -> np.ndarray:
        """Return the indices of the tokens of some parts among the slots of all rows."""
        slots = self._model.slots
        rows = [np.arange(part.first, part.first + part.span.batch)[:, None] * slots for part in parts]
        return np.concatenate([(r + p.positions).ravel() for r, p in zip(rows, parts, strict=True)])

    def _note_draft_keys(self, decoding: int, starts: list[int], copies: list[int], gamma: int) -> None:
        """Record up to which position each row has draft keys after this step."""
        table = self._table
        if gamma:
            table.draft_keys[: table.active] = self._model.slots
            return

        new = decoding + len(starts)
        known = np.concatenate((table.total[:decoding] - 1, np.asarray(starts, np.int64)))
        table.draft_keys[:new] = np.minimum(table.draft_keys[:new], known)
        table.draft_keys[new : table.active] = table.draft_keys[copies]

    def _catch_up(
        self,
        parts: list[Part],
        fills: list[Part],
        tokens: list[torch.Tensor],
        accepted: torch.Tensor | None,
        hidden: torch.Tensor,
    ) -> list[torch.Tensor]:
        """Run the draft's layers over the tokens that the target just processed, paired with the next tokens.

        tokens: the tokens emitted by the decoding rows, if any, then the first tokens of the filled rows.
        hidden: the states that the draft reads at the processed tokens. Returns, for each layer except the
        first, the states [rows, H] that the layer read at the last token of each row.
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

        model, token, spans = self._model, torch.cat(following), [part.span for part in parts]
        first, count, read = parts[0].first, sum(part.span.batch for part in parts), []
        ready = self._table.hidden[first : first + count]

        # A single layer computes an output only at the selected token of each row.
        if model.depths == 1:
            ready[:, 0] = model.draft(token, hidden, spans, selects)
            return read

        # Each deeper layer starts one position earlier, from the frontier before this pass.
        frontier, chosen, going = ready.clone(), flat_index(spans, selects), len(parts) - len(fills)
        for depth in range(model.depths):
            if depth:
                hidden = carried(hidden, frontier[:, depth - 1], parts)
                spans = [behind(model, part, depth, joined=i >= going) for i, part in enumerate(parts)]
                read.append(hidden.index_select(0, chosen))

            hidden = model.draft(token, hidden, spans, None, depth)
            ready[:, depth] = hidden.index_select(0, chosen)
        return read

    def _copy(
        self, first: int, copies: list[int], tokens: torch.Tensor, read: list[torch.Tensor], draft: bool
    ) -> None:
        """Copy the keys of rows to rows first, first + 1, ...; these may sample different first tokens.

        read: for each draft layer, the states that it read at the last tokens of the source rows.
        """
        table, model = self._table, self._model
        for target, row in enumerate(copies, first):
            table.copy_keys(row, target, int(table.total[target]))

        # A different first token changes the draft's state: recompute it at the last position of each row.
        if draft:
            rows = slice(first, first + len(copies))
            last = table.total[rows, None] - 1
            for depth, states in enumerate(read):
                span = anchor_span(model, first, last - depth, decoding=False)
                table.hidden[rows, depth] = model.draft(tokens, states, [span], None, depth)

    def _fills(self, first: int, starts: list[int], ends: np.ndarray) -> list[Part]:
        """Return the tokens [start, end) of rows first, first + 1, ..., in parts of similar lengths."""
        parts, sizes = [], [int(end) - start for start, end in zip(starts, ends, strict=True)]
        for begin, stop in self._buckets(sizes):
            columns = np.asarray(starts[begin:stop])[:, None] + np.arange(max(sizes[begin:stop]))
            # Padding goes to a slot that is never read.
            columns = np.minimum(columns, self._model.slots - 1)
            rows = np.arange(first + begin, first + stop)[:, None]
            span = self._model.span(first + begin, self._upload(columns), ends[begin:stop])
            tokens = self._upload(self._table.tokens[rows, columns])
            last = self._upload(np.asarray(sizes[begin:stop]) - 1)
            parts.append(Part(first + begin, span, tokens, last, columns))
        return parts

    def _buckets(self, sizes: list[int]) -> list[tuple[int, int]]:
        """Split consecutive rows so that there is little padding and each part is within the token budget."""
        buckets, begin = [], 0
        for index in range(1, len(sizes) + 1):
            if index < len(sizes):
                window = sizes[begin : index + 1]
                padded = max(window) * len(window)
                if padded <= self._prefill_tokens and padded <= sum(window) + 16:
                    continue
            buckets.append((begin, index))
            begin = index
        return buckets

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._model.device)

    def _emit(
        self,
        tokens: torch.Tensor,
        accepted: torch.Tensor | None,
        laws: Distributions,
        decoding: int,
        top: int,
    ) -> Emitted:
        """Copy the results of a step to the host, in one transfer."""
        count, log_p = len(tokens), laws.log_probs
        logprobs = log_p.gather(1, tokens.unsqueeze(1)).squeeze(1)
        parts = [tokens, logprobs, laws.entropies]
        if accepted is not None:
            parts.append(accepted)
        if top:
            best = log_p.topk(min(top, log_p.shape[1]), 1)
            parts += [best.indices.flatten(), best.values.flatten()]

        # Store int32 numbers and the bits of float32 numbers in one tensor, to need only one transfer.
        host = torch.cat([x.view(torch.int32) if x.is_floating_point() else x.int() for x in parts])
        host = host.cpu().numpy()

        counts = np.ones(self._table.active, np.int64)
        width = 1
        if accepted is not None:
            counts[:decoding] += host[3 * count : 3 * count + decoding]
            width = (count - len(counts) + decoding) // decoding

        def by_row(flat: np.ndarray) -> np.ndarray:
            """Reshape [N, ...] to [rows, W, ...]; a new row has one token, then padding."""
            split = decoding * width
            rows = np.zeros((len(counts), width, *flat.shape[1:]), flat.dtype)
            rows[:decoding] = flat[:split].reshape(decoding, width, *flat.shape[1:])
            rows[decoding:, 0] = flat[split:]
            return rows

        emitted = Emitted(
            tokens=by_row(host[:count]),
            counts=counts,
            logprobs=by_row(host[count : 2 * count].view(np.float32)),
            entropies=by_row(host[2 * count : 3 * count].view(np.float32)),
            verified=0,
        )

        # The k best alternatives are at the end of the transfer.
        if top:
            ids, values = np.split(host[-2 * best.indices.numel() :], 2)
            emitted.top_ids = by_row(ids.reshape(count, -1))
            emitted.top_logprobs = by_row(values.view(np.float32).reshape(count, -1))
        return emitted


def _draft_probs(drafted: Drafted, choices: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return draft tokens [A, N], and p and q of each; q is 1 for a token that was not sampled.

    choices: [A, N + 1, V], the target's distribution after each node.
    """
    tokens = drafted.part.tokens[:, 1:].unsqueeze(-1)
    p = choices[:, drafted.parents].gather(-1, tokens).squeeze(-1)

    q = torch.ones_like(p)
    if drafted.probs is not None:
        q = drafted.probs[:, drafted.parents].gather(-1, drafted.columns.unsqueeze(-1)).squeeze(-1)
        # A greedy row's other children have q = 0; they were not sampled either.
        q = torch.where(q > 0, q, 1.0)
    return tuple(x.cpu().numpy() for x in (tokens.squeeze(-1), p, q))
