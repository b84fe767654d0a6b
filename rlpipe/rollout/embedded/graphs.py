"""CUDA graphs of passes over the decoding rows, with buffers of a few fixed shapes.

With a small model, a kernel ends before Python has launched the next one; a graph launches all kernels at
once. A graph uses the addresses and shapes it was captured with, so rows and context are padded to a short
list of sizes. Padding rows read the keys of other rows and write into a row that is never read, and their
results are dropped. On a CPU the same buffers are used without capture; the tests run this path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlpipe.rollout.embedded.span import Span, Tables

logger = logging.getLogger(__name__)
_WARM_UPS = 2  # runs before a capture, in which libraries allocate their workspaces
_CONTEXT = 128  # the smallest padded context


@dataclass(slots=True, kw_only=True)
class Buffers:
    """Inputs and results of a pass, for one padded shape.

    state, select: for the draft; None if unused. results: results of the last run. graph: None on a CPU.
    """

    tokens: torch.Tensor
    span: Span
    state: torch.Tensor | None
    select: torch.Tensor | None
    graph: torch.cuda.CUDAGraph | None = None
    results: Any = None

    def call(self, function: Pass) -> Any:
        """Run a pass on the buffers."""
        selects = None if self.select is None else [self.select]
        more = () if self.state is None else (self.state, selects)
        return function(self.tokens, [self.span], *more)


# A pass takes (tokens, spans) or (tokens, spans, state, selects), see `Model.draft`; it returns tensors by
# token or by row.
Pass = Callable[..., Any]


class Graphs:
    """Runs the passes of a model; passes over decoding rows use buffers. Not thread-safe.

    cache: the model's cache, [layers, 2, rows + 1, kv_heads, slots, head_dim], with an additional last row
    for padding. unread: [2 * kv_heads] int64, indices of that row in a layer's flat cache. usable: if False,
    passes run without buffers, and there is no additional row.
    """

    def __init__(self, cache: torch.Tensor, unread: torch.Tensor, *, usable: bool) -> None:
        self._cache, self._unread = cache, unread
        self._rows, self._slots = cache.shape[2] - 1, cache.shape[4]
        self._known: dict[tuple, Buffers] = {}
        self._usable = usable
        self.clear()

    def clear(self) -> None:
        """Drop all graphs, because their weights have been replaced."""
        self._known.clear()
        self._pool = torch.cuda.graph_pool_handle() if self._cache.is_cuda and self._usable else None

    def run(
        self,
        name: str,
        function: Pass,
        tokens: torch.Tensor,
        spans: Sequence[Span],
        state: torch.Tensor | None = None,
        selects: Sequence[torch.Tensor] | None = None,
    ) -> Any:
        """Run the pass of this name; return its results without padding.

        tokens: [N] int64, span after span. state: [N, H], the input of a draft's pass. selects: per span, [B]
        int64, index of the token of each row that gets a result (None: all).
        """
        span = spans[0]
        if not self._usable or len(spans) > 1 or not span.decoding or span.pieces:
            return function(tokens, spans, *(() if state is None else (state, selects)))

        # Each padded shape of a pass has one set of buffers.
        select = None if selects is None else selects[0]
        batch, context = span.batch, span.seen.shape[-2]
        rows, seen = padded_rows(batch, self._rows), padded_context(context, self._slots)
        key = (name, rows, span.width, seen, select is None)
        buffers = self._known.get(key)
        if new := buffers is None:
            buffers = self._known[key] = self._make(rows, seen, tokens, span, state, select)

        # Fill the inputs before a capture, so that the warm-up runs on valid inputs.
        _fill(buffers, tokens, span, state, select, self._unread)
        if new and self._pool is not None:
            self._capture(function, buffers)

        if buffers.graph is not None:
            buffers.graph.replay()
        else:
            buffers.results = buffers.call(function)
        return _without_padding(buffers.results, batch, rows)

    def _make(
        self,
        rows: int,
        seen: int,
        tokens: torch.Tensor,
        span: Span,
        state: torch.Tensor | None,
        select: torch.Tensor | None,
    ) -> Buffers:
        """Make empty buffers for a padded shape: `rows` rows that attend to `seen` positions."""
        tables = Tables(
            slots=span.tables.slots.new_zeros(rows, *span.tables.slots.shape[1:]),
            rotation=span.tables.rotation.new_ones(rows, *span.tables.rotation.shape[1:]),
            mask=span.tables.mask.new_zeros(rows, span.width, seen),
        )
        view = self._cache[:, :, :rows, :, :seen]
        padded = replace(span, batch=rows, seen=view, make=lambda _: tables)
        return Buffers(
            tokens=tokens.new_zeros(padded.tokens),
            span=padded,
            state=None if state is None else state.new_zeros(padded.tokens, *state.shape[1:]),
            select=None if select is None else select.new_zeros(rows),
        )

    def _capture(self, function: Pass, buffers: Buffers) -> None:
        """Capture the pass; after a failure, this and all later passes run without graphs."""
        device = buffers.tokens.device
        try:
            side_stream = torch.cuda.Stream(device)
            side_stream.wait_stream(torch.cuda.current_stream(device))
            graph = torch.cuda.CUDAGraph()

            with torch.cuda.stream(side_stream):
                for _ in range(_WARM_UPS):
                    buffers.call(function)

                # Kernels that other threads launch during the capture, such as a trainer's, are not captured.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    buffers.results = buffers.call(function)
                finally:
                    graph.capture_end()

            torch.cuda.current_stream(device).wait_stream(side_stream)
            buffers.graph = graph
        except RuntimeError as error:
            self._usable = False
            logger.warning("decoding continues without CUDA graphs: %s", error)


def padded_rows(batch: int, most: int) -> int:
    """Return the number of rows to pad a batch to.

    >>> [padded_rows(batch, 60) for batch in (1, 3, 8, 9, 33, 59)]
    [1, 4, 8, 16, 40, 60]
    """
    size = 1 << (batch - 1).bit_length() if batch <= 8 else -(-batch // 8) * 8
    return min(size, most)


def padded_context(context: int, most: int) -> int:
    """Return the number of slots to pad a context to: 128, 192, 256, 384, ..., at most `most`.

    >>> [padded_context(context, 1000) for context in (5, 129, 193, 257, 700, 900)]
    [128, 192, 256, 384, 768, 1000]
    """
    size = _CONTEXT
    while size < context:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, most)


def _fill(
    buffers: Buffers,
    tokens: torch.Tensor,
    span: Span,
    state: torch.Tensor | None,
    select: torch.Tensor | None,
    unread: torch.Tensor,
) -> None:
    """Copy a pass's inputs to buffers. Masks of padding rows show keys, so that results are finite."""
    batch, context, to = span.batch, span.seen.shape[-2], buffers.span.tables
    buffers.tokens[: len(tokens)].copy_(tokens)
    if state is not None:
        buffers.state[: len(state)].copy_(state)
    if select is not None:
        buffers.select[:batch].copy_(select)
    to.slots[:batch].copy_(span.tables.slots)
    to.slots[batch:] = unread
    to.rotation[:batch].copy_(span.tables.rotation)
    to.mask[:batch, :, :context].copy_(span.tables.mask)
    to.mask[:batch, :, context:] = float("-inf")


def _without_padding(results: Any, batch: int, rows: int) -> Any:
    """Copy the results without padding, because the next replay of any graph may overwrite them."""
    if isinstance(results, tuple):
        return tuple(_without_padding(result, batch, rows) for result in results)
    return results[: len(results) // rows * batch].clone()
