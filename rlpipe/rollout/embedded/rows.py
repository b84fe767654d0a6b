"""The KV rows of the engine: who holds which row, and everything known per row.

Invariant: rows [0, active) run requests, rows [active, used) hold idle conversations, the rest are
free. So every pass works on a contiguous slice and no gather of keys is needed; the price is that a
row's contents are exchanged with another's when a request joins or leaves.

Tensors (device) are what the passes read; arrays (host) are what the requests get back. A row with
`total` tokens has keys for the first total - 1; the last one is `pending`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from rlpipe.rollout.embedded.model import Model
from rlpipe.spec.sampling import Stream


class RowTable:
    """State of all rows of a model's cache."""

    def __init__(self, model: Model, drafts: int) -> None:
        rows, slots, device = model.rows, model.slots, model.device
        self.cache = model.cache
        self.rows, self.active, self.used = rows, 0, 0
        self.pending = torch.zeros(rows, dtype=torch.int64, device=device)
        self.length = torch.zeros(rows, dtype=torch.int64, device=device)
        self.position = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperature = torch.ones(rows, device=device)
        self.greedy = torch.zeros(rows, dtype=torch.bool, device=device)
        self.hidden = torch.zeros(rows, model.arch.hidden, dtype=model.dtype, device=device)
        self.uniforms = torch.zeros(rows, slots, len(Stream), dtype=torch.float64, device=device)
        self._tensors = [self.pending, self.length, self.position, self.temperature, self.greedy]
        self._tensors += [self.hidden, self.uniforms]
        self.tokens = np.zeros((rows, slots), np.int64)
        self.logprobs = np.zeros((rows, slots))
        self.entropies = np.zeros((rows, slots))
        self.versions = np.zeros((rows, slots), np.int64)
        self.total = np.zeros(rows, np.int64)
        self.end = np.zeros(rows, np.int64)  # total at which the request's length is exhausted
        self.stops = np.full((rows, 1), -1, np.int64)
        self.accepted = np.zeros((rows, drafts + 1), np.int64)  # verify steps by number accepted
        self._arrays = [self.tokens, self.logprobs, self.entropies, self.versions, self.total, self.end]
        self._arrays.append(self.accepted)
        self.divides = np.zeros(rows, bool)  # logits must be divided: temperature neither 0 nor 1
        self.takes_best = np.zeros(rows, bool)  # temperature 0
        self._arrays += [self.divides, self.takes_best]
        self.jobs: list[Any] = [None] * rows
        self.owner: list[str | None] = [None] * rows
        self._sessions: OrderedDict[str, int] = OrderedDict()  # idle ones, least recently used first

    def idle_row(self, session_id: str | None) -> int | None:
        """The row an idle conversation holds."""
        return self._sessions.get(session_id) if session_id is not None else None

    def take(self, session_id: str | None) -> tuple[int, bool]:
        """Make row `active` the row of a joining request.

        Returns (row, whether it holds the conversation's keys). Needs active < rows.
        """
        row, known = self.idle_row(session_id), True
        if row is None:
            known = False
            if self.used < len(self.jobs):
                row, self.used = self.used, self.used + 1
            else:
                row = next(iter(self._sessions.values()))
        if self.owner[row] is not None:
            del self._sessions[self.owner[row]]
            self.owner[row] = None
        target = self.active
        self._exchange(row, target)
        self.active += 1
        if not known:
            self.total[target] = 0
        self.owner[target] = session_id
        return target, known

    def seat(
        self,
        row: int,
        job: Any,
        *,
        prompt: list[int],
        end: int,
        temperature: float,
        stops: tuple[int, ...],
        uniforms: torch.Tensor,
    ) -> None:
        """Write a request into its row; its keys are the caller's business."""
        self.jobs[row] = job
        self.tokens[row, : len(prompt)] = prompt
        self.total[row], self.end[row] = len(prompt), end
        self.accepted[row] = 0
        missing = len(stops) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[row] = -1
        self.stops[row, : len(stops)] = stops
        self.takes_best[row] = temperature == 0
        self.divides[row] = temperature not in (0, 1)
        self.greedy[row] = temperature == 0
        self.temperature[row] = temperature or 1.0
        self.uniforms[row, : len(uniforms)] = uniforms

    def release(self, row: int) -> None:
        """End the request of an active row; its keys stay for its conversation, if it has one."""
        self.jobs[row] = None
        session, self.owner[row] = self.owner[row], None
        self.active -= 1
        self._exchange(row, self.active)
        if session is None:
            self._free(self.active)
            return
        self._drop(session)  # an older row of the same conversation
        self.owner[self.active] = session
        self._sessions[session] = self.active

    def end_session(self, session_id: str) -> None:
        """Free a conversation's row: now if it is idle, else when its request ends."""
        self._drop(session_id)
        for row in range(self.active):
            if self.owner[row] == session_id:
                self.owner[row] = None

    def drop_idle(self) -> None:
        """Free all idle conversations."""
        for session_id in list(self._sessions):
            self._drop(session_id)

    def copy_keys(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of a row, target's and draft's."""
        self.cache[:, target, :length] = self.cache[:, source, :length]

    def _drop(self, session_id: str) -> None:
        row = self._sessions.pop(session_id, None)
        if row is not None:
            self.owner[row] = None
            self._free(row)

    def _free(self, row: int) -> None:
        self.used -= 1
        self._exchange(row, self.used)

    def _exchange(self, a: int, b: int) -> None:
        if a == b:
            return
        pair, swapped = [a, b], [b, a]
        length = int(self.total[pair].max())
        self.cache[:, pair, :length] = self.cache[:, swapped, :length]
        for tensor in self._tensors:
            tensor[pair] = tensor[swapped]
        for array in (*self._arrays, self.stops):
            array[pair] = array[swapped]
        self.jobs[a], self.jobs[b] = self.jobs[b], self.jobs[a]
        self.owner[a], self.owner[b] = self.owner[b], self.owner[a]
        for row in pair:
            if self.owner[row] in self._sessions and row >= self.active:
                self._sessions[self.owner[row]] = row
