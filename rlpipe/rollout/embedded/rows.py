"""The KV rows of the engine: the owner and the state of each row.

Invariant: rows [0, active) run requests, rows [active, used) contain idle conversations, the remaining rows
are free. So every pass works on a contiguous slice and no keys are gathered; the price is that the contents
of a row move when a request joins or leaves.

Only keys, values and the draft's hidden state are on the device. Other state is in arrays on the host, which
a pass uploads as needed: every token passes through the host anyway. A row with `total` tokens has keys for
all but the last token, which is the input of the next pass.

If a row is needed, an idle conversation is parked: its row is copied to the host, and copied back when its
next request joins. So there can be more open conversations than rows. Parked conversations together have at
most PARKED times as many tokens as fit into all rows; a conversation that does not fit loses its keys. It
would be worse to drop the oldest parked conversation instead: where conversations alternate, the oldest is
the next to continue.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rlpipe.config.rollout import PARKED
from rlpipe.rollout.embedded.attention import PIECE_ROWS, use_products
from rlpipe.rollout.embedded.model import Model
from rlpipe.rollout.embedded.sampler import Sampler
from rlpipe.spec.sampling import greedy_rows
from rlpipe.types import routes_type


@dataclass(slots=True, frozen=True, kw_only=True)
class Cached:
    """The cache of a conversation. tokens: all but the last have keys. draft_keys: see `RowTable`."""

    tokens: np.ndarray
    draft_keys: int


@dataclass(slots=True, frozen=True, kw_only=True)
class _Parked:
    """A conversation without a row. tensors: its cache, on the host. hidden: the draft's states."""

    cached: Cached
    tensors: list[torch.Tensor]
    hidden: torch.Tensor


class RowTable:
    """State of all rows of a model's cache.

    depth: the maximum of draft tokens that a step accepts, 0 without speculation. streams: uniforms per
    position. history: store the target's hidden states, for a draft that does not run in every step. routes:
    store each token's experts.
    """

    def __init__(
        self, model: Model, *, depth: int, streams: int, history: bool = False, routes: bool = False
    ) -> None:
        rows, slots = model.rows, model.slots
        self.rows, self.active, self.used = rows, 0, 0
        self.cache = model.cache
        self.sampler = Sampler(model.device, model.dtype)

        self._device = model.device
        # [rows, depths, H]: the draft's states at a row's frontier, see `decoder`
        frontier = rows, max(1, model.depths), model.arch.hidden
        self.hidden = torch.zeros(frontier, dtype=model.dtype, device=model.device)
        # [rows, slots, H]: the target's hidden states of the tokens that the draft has not caught up with
        self.history = self.hidden.new_zeros(rows, slots, model.arch.hidden) if history else None
        # [rows, slots, layers with experts, experts per token], on the host
        self.routes = _empty_routes(model) if routes else None

        self.draft_keys = np.full(rows, slots)  # the draft's first layer has valid keys before this position
        self.tokens = np.zeros((rows, slots), np.int64)
        self.total = np.zeros(rows, np.int64)
        self.prompt = np.zeros(rows, np.int64)  # tokens of the prompt
        self.end = np.zeros(rows, np.int64)  # total at which the request has its maximum length

        self.logprobs = np.zeros((rows, slots), np.float32)
        self.entropies = np.zeros((rows, slots), np.float32)
        self.versions = np.zeros((rows, slots), np.int32)

        self.uniforms = np.zeros((rows, slots, streams))  # indexed by output token
        self.drafted = np.zeros((rows, depth), np.int64)  # verify steps that reached a depth
        self.accepted = np.zeros((rows, depth), np.int64)  # verify steps that accepted that depth
        self.verify_steps = np.zeros(rows, np.int64)
        self.proposed = np.zeros(rows, np.int64)  # drafted tokens

        self.temperature = np.ones(rows, np.float32)  # 1 for greedy rows
        self.greedy = np.zeros(rows, bool)
        self.stops = np.full((rows, 1), -1, np.int64)

        self.jobs: list[Any] = [None] * rows
        self._owner: list[str | None] = [None] * rows
        self._sessions: OrderedDict[str, int] = OrderedDict()  # idle conversations, least recently used first
        self._parked: dict[str, _Parked] = {}
        self.parked_tokens, self.max_parked_tokens = 0, PARKED * rows * slots

    def divisor(self, rows: np.ndarray | slice) -> torch.Tensor | None:
        """Return the temperatures [n] of n rows, or None when all are 1; greedy rows count as 1."""
        temperature = self.temperature[rows]
        return torch.from_numpy(temperature).to(self._device) if (temperature != 1).any() else None

    def greedy_of(self, rows: np.ndarray | slice) -> torch.Tensor | None:
        """Return which of n rows are greedy [n] bool, or None if none is."""
        greedy = self.greedy[rows]
        return torch.from_numpy(greedy).to(self._device) if greedy.any() else None

    def sampled_from(self, probs: torch.Tensor, rows: np.ndarray | slice) -> torch.Tensor:
        """Return probs [N, ..., V]; in greedy rows they are replaced by 1 at the argmax and 0 elsewhere."""
        greedy = self.greedy_of(rows)
        return probs if greedy is None else greedy_rows(probs, greedy)

    def choices(self, logits: torch.Tensor, rows: np.ndarray | slice) -> torch.Tensor:
        """Return the distributions that rows sample from, given their logits [N, ..., V]."""
        return self.sampled_from(self.sampler.softmax(logits, self.divisor(rows)), rows)

    def idle_row(self, session_id: str | None) -> int | None:
        """Return the row of an idle conversation, or None."""
        return self._sessions.get(session_id) if session_id is not None else None

    def cached(self, session_id: str | None) -> Cached | None:
        """Return the cached part of a conversation that has no running request, or None."""
        row, parked = self.idle_row(session_id), self._parked.get(session_id or "")
        return self.cached_in(row) if row is not None else parked.cached if parked else None

    def cached_in(self, row: int) -> Cached:
        """Return the cached conversation of a row, as views of the row's data."""
        return Cached(tokens=self.tokens[row, : int(self.total[row])], draft_keys=int(self.draft_keys[row]))

    def take(self, session_id: str | None) -> tuple[int, bool]:
        """Make row `active` the row of a joining request; requires active < rows.

        Returns (row, whether it has the conversation's keys).
        """
        target, row = self.active, self.idle_row(session_id)
        parked = self._unpark(session_id)
        if row is not None:
            del self._sessions[session_id]
            self._exchange(row, target)
        elif self.used < self.rows:
            # Idle conversations begin at `active`; move the first one to the end.
            if self.used > target:
                self._move(target, self.used)
            self.used += 1
        else:
            # No row is free, so the conversation that has been idle for the longest time loses its row.
            evicted, oldest = self._sessions.popitem(last=False)
            self._park(evicted, oldest)
            if oldest != target:
                self._move(target, oldest)

        self.active += 1
        self._owner[target] = session_id
        if parked:
            self._restore(target, parked)
        return target, row is not None or parked is not None

    def seat(
        self,
        row: int,
        job: Any,
        *,
        prompt: np.ndarray,
        end: int,
        temperature: float,
        stops: tuple[int, ...],
        uniforms: np.ndarray,
    ) -> None:
        """Write a request into its row; the caller fills its keys.

        prompt: [P] token ids. end: length at which the request ends. temperature: 0 is greedy. stops: stop
        token ids. uniforms: [output tokens, streams] in [0, 1).
        """
        self.jobs[row] = job
        self.tokens[row, : len(prompt)] = prompt
        self.total[row] = self.prompt[row] = len(prompt)
        self.end[row] = end
        self.uniforms[row, : len(uniforms)] = uniforms

        for counter in (self.drafted, self.accepted, self.verify_steps, self.proposed):
            counter[row] = 0
        self.greedy[row] = temperature == 0
        self.temperature[row] = temperature or 1.0

        # Widen the stop table if this list of stop tokens is the longest so far.
        missing = len(stops) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[row] = -1
        self.stops[row, : len(stops)] = stops

    def release(self, row: int) -> None:
        """End the request of an active row; its keys stay for its conversation, if it has one."""
        session, last = self._owner[row], self.active - 1
        self.jobs[row], self._owner[row] = None, None

        if session is None:
            if row != last:
                self._move(last, row)
            self.active = last
            self._vacate(last)
        else:
            self._drop(session)  # an older row of the same conversation
            self._exchange(row, last)
            self.active = last
            self._owner[last] = session
            self._sessions[session] = last

    def tidy(self) -> None:
        """Move one long row before shorter rows, so that rows that attend together have similar lengths.

        Returns without a change on a GPU, where attention does not group rows.
        """
        if self.active < 4 * PIECE_ROWS or not use_products(1, self._device):
            return
        totals = self.total[: self.active]
        long = totals > 1.5 * np.median(totals)
        split = np.count_nonzero(long)

        # Long rows belong before `split`: exchange one that is after it.
        behind = np.flatnonzero(long[split:])
        if len(behind):
            self._exchange(int(np.flatnonzero(~long[:split])[0]), split + int(behind[0]))

    def end_session(self, session_id: str) -> None:
        """Free a conversation's row, at once if it is idle, else when its request ends."""
        self._drop(session_id)

        for row in range(self.active):
            if self._owner[row] == session_id:
                self._owner[row] = None

    def drop_idle(self) -> None:
        """Free all idle conversations, including parked ones."""
        for session_id in [*self._sessions, *self._parked]:
            self._drop(session_id)

    def copy_keys(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of a row to another: keys of target and draft, history, routes."""
        for to, of in zip(self._tensors(target, length), self._tensors(source, length), strict=True):
            to.copy_(of)

    def _tensors(self, row: int, length: int) -> list[torch.Tensor]:
        """Return the stored tensors of a row's first `length` tokens, as slices that are fast to copy."""
        keys = self.cache[:, :, row, :, :length]
        return [keys, *(x[row, :length] for x in (self.history, self.routes) if x is not None)]

    def _park(self, session_id: str, row: int) -> None:
        """Copy a conversation's row to the host, if it fits."""
        cached = self.cached_in(row)
        length = len(cached.tokens)
        if self.parked_tokens + length > self.max_parked_tokens:
            return
        self._parked[session_id] = _Parked(
            cached=replace(cached, tokens=cached.tokens.copy()),
            tensors=[tensor.to("cpu", copy=True) for tensor in self._tensors(row, length)],
            hidden=self.hidden[row].to("cpu", copy=True),
        )
        self.parked_tokens += length

    def _unpark(self, session_id: str | None) -> _Parked | None:
        """Remove a conversation from the parked ones and return it; None if it is not parked."""
        parked = self._parked.pop(session_id or "", None)
        self.parked_tokens -= len(parked.cached.tokens) if parked else 0
        return parked

    def _restore(self, row: int, parked: _Parked) -> None:
        """Copy a parked conversation into a row."""
        length = len(parked.cached.tokens)
        for to, of in zip(self._tensors(row, length), parked.tensors, strict=True):
            to.copy_(of)
        self.hidden[row] = parked.hidden.to(self._device)
        self.tokens[row, :length], self.total[row] = parked.cached.tokens, length
        self.draft_keys[row] = parked.cached.draft_keys

    def _drop(self, session_id: str) -> None:
        self._unpark(session_id)
        row = self._sessions.pop(session_id, None)
        if row is not None:
            self._owner[row] = None
            self._vacate(row)

    def _vacate(self, row: int) -> None:
        """Fill the gap that a freed row leaves before `used`."""
        self.used -= 1
        if row != self.used:
            self._move(self.used, row)

    def _move(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`, which becomes free."""
        self.copy_keys(source, target, int(self.total[source]))
        self.hidden[target] = self.hidden[source]
        for array in self._arrays():
            array[target] = array[source]
        self.jobs[target], self.jobs[source] = self.jobs[source], None
        self._set_owner(target, self._owner[source])
        self._owner[source] = None

    def _exchange(self, a: int, b: int) -> None:
        """Exchange two rows: keys, states, columns, jobs and owners."""
        if a == b:
            return
        pair, swapped, length = [a, b], [b, a], int(max(self.total[a], self.total[b]))
        kept = [tensor.clone() for tensor in self._tensors(a, length)]
        self.copy_keys(b, a, length)
        for to, of in zip(self._tensors(b, length), kept, strict=True):
            to.copy_(of)
        self.hidden[pair] = self.hidden[swapped]
        for array in self._arrays():
            array[pair] = array[swapped]
        self.jobs[a], self.jobs[b] = self.jobs[b], self.jobs[a]
        owners = self._owner[b], self._owner[a]
        for row, owner in zip(pair, owners, strict=True):
            self._set_owner(row, owner)

    def _set_owner(self, row: int, owner: str | None) -> None:
        self._owner[row] = owner
        if owner in self._sessions and row >= self.active:
            self._sessions[owner] = row

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return (
            self.tokens, self.total, self.prompt, self.end, self.logprobs, self.entropies, self.versions,
            self.uniforms, self.drafted, self.accepted, self.verify_steps, self.proposed, self.temperature,
            self.greedy, self.stops, self.draft_keys,
        )  # fmt: skip


def _empty_routes(model: Model) -> torch.Tensor:
    experts = model.arch.experts
    shape = (model.rows, model.slots, model.arch.layers - experts.dense, experts.per_token)
    return torch.from_numpy(np.zeros(shape, routes_type(experts.count)))
