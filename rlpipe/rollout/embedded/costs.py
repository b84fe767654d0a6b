"""Measures the cost of a decode step by batch and gamma, once, before the first request.

Owns the measurement; `rlpipe.spec.gamma` uses it to choose gamma. Steps run on rows of dummy tokens; requests
later overwrite the dummy keys in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median

import torch

from rlpipe.rollout.embedded.decoder import Decoder
from rlpipe.rollout.embedded.rows import RowTable

CONTEXT = 128  # tokens of the dummy rows, at most a third of the cache
ROUNDS = 5
SAMPLED_BATCHES, SAMPLED_ROUNDS, SAMPLED_SECONDS = (1, 8, 32), 3, 1.0  # for the report if gamma is fixed


@torch.inference_mode()
def measure_costs(
    decoder: Decoder, table: RowTable, *, max_gamma: int, threads: int
) -> dict[tuple[int, int], float]:
    """Measure seconds of a step by (batch, gamma): gamma 0..max_gamma, batches 1, 2, 4, .. and all rows.

    threads: number of threads that decoding will use. The table has no rows afterwards.
    """
    batches = [2**i for i in range(table.rows.bit_length()) if 2**i < table.rows] + [table.rows]
    cells = [(batch, gamma) for batch in batches for gamma in range(max_gamma + 1)]
    return _measure(decoder, table, cells, rounds=ROUNDS, limit_s=float("inf"), threads=threads)


@torch.inference_mode()
def sample_costs(
    decoder: Decoder, table: RowTable, *, gamma: int, threads: int
) -> dict[tuple[int, int], float]:
    """Measure the seconds of a step for a few batches, with 0, 1 and `gamma` draft tokens.

    The report compares these costs with the acceptance of a run. Takes about `SAMPLED_SECONDS`, but at least
    two rounds, of which the first warms up.
    """
    batches = [batch for batch in SAMPLED_BATCHES if batch <= table.rows]
    cells = [(batch, drafts) for batch in batches for drafts in sorted({0, 1, gamma})]
    return _measure(decoder, table, cells, rounds=SAMPLED_ROUNDS, limit_s=SAMPLED_SECONDS, threads=threads)


def typical_seconds(rounds: Sequence[Mapping[tuple[int, int], float]]) -> dict[tuple[int, int], float]:
    """Return the typical seconds of a step by (batch, gamma), from rounds that timed each pair once.

    The value is the median of gamma 0 times the median of the ratio to gamma 0 within a round, because only
    ratios between gammas matter. A stall spoils one round, and a machine that slows down for a while slows
    all gammas of a round. On two crowded cores, where a step's time varied by 12%, the ratios of five rounds
    were wrong by 4%; those of minima were wrong by 7%.

    >>> typical_seconds([{(1, 0): 1.0, (1, 2): 1.5}, {(1, 0): 3.0, (1, 2): 4.5}, {(1, 0): 2.0, (1, 2): 9.0}])
    {(1, 0): 2.0, (1, 2): 3.0}
    """
    base = {batch: median(times[batch, 0] for times in rounds) for batch, _ in rounds[0]}
    return {
        (batch, gamma): base[batch] * median(times[batch, gamma] / times[batch, 0] for times in rounds)
        for batch, gamma in rounds[0]
    }


def _measure(
    decoder: Decoder,
    table: RowTable,
    cells: Sequence[tuple[int, int]],
    *,
    rounds: int,
    limit_s: float,
    threads: int,
) -> dict[tuple[int, int], float]:
    """Time a step of every (batch, gamma) in rounds, after a round that warms up kernels."""
    before, draft_keys = torch.get_num_threads(), table.draft_keys.copy()
    torch.set_num_threads(threads)
    context = min(CONTEXT, table.tokens.shape[1] // 3)
    table.prompt[:] = context - 1
    began, counted = time.perf_counter(), []
    for number in range(1 + rounds):
        if len(counted) and time.perf_counter() - began > limit_s:
            break
        times = {}
        for batch, gamma in cells:
            table.active, table.total[:batch] = batch, context

            # Kernels run asynchronously on a GPU, so the wait is part of the step.
            started = time.perf_counter()
            decoder.step([], [], gamma=gamma)
            _wait(table.hidden)
            times[batch, gamma] = time.perf_counter() - started
            table.draft_keys[:] = context  # no gap to close
        if number:
            counted.append(times)

    table.active = 0
    table.total[:] = table.prompt[:] = 0
    table.draft_keys[:] = draft_keys
    torch.set_num_threads(before)
    return typical_seconds(counted)


def _wait(tensor: torch.Tensor) -> None:
    """Wait until the device has finished."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
