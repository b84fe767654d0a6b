"""Measures the cost of a decode step by batch and gamma, once, before the first request.

Owns the measurement; `rlpipe.spec.gamma` uses it to choose gamma. Steps run on rows of dummy tokens; requests
later overwrite the dummy keys in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

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

    Each value is the minimum of several rounds over all pairs, so that a disturbance does not favour a gamma.
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
    one round.
    """
    batches = [batch for batch in SAMPLED_BATCHES if batch <= table.rows]
    cells = [(batch, drafts) for batch in batches for drafts in sorted({0, 1, gamma})]
    return _measure(decoder, table, cells, rounds=SAMPLED_ROUNDS, limit_s=SAMPLED_SECONDS, threads=threads)


def _measure(
    decoder: Decoder,
    table: RowTable,
    cells: Sequence[tuple[int, int]],
    *,
    rounds: int,
    limit_s: float,
    threads: int,
) -> dict[tuple[int, int], float]:
    """Time a step of every (batch, gamma): the minimum of several rounds after one that warms up kernels."""
    before, draft_keys = torch.get_num_threads(), table.draft_keys.copy()
    torch.set_num_threads(threads)
    seconds = dict.fromkeys(cells, float("inf"))
    context = min(CONTEXT, table.tokens.shape[1] // 3)
    table.prompt[:] = context - 1
    began = time.perf_counter()
    for _ in range(rounds):
        if time.perf_counter() - began > limit_s:
            break
        for batch, gamma in cells:
            table.active, table.total[:batch] = batch, context

            # Kernels run asynchronously on a GPU, so the wait is part of the step.
            started = time.perf_counter()
            decoder.step([], [], gamma=gamma)
            _wait(table.hidden)
            seconds[batch, gamma] = min(seconds[batch, gamma], time.perf_counter() - started)
            table.draft_keys[:] = context  # no gap to close

    table.active = 0
    table.total[:] = table.prompt[:] = 0
    table.draft_keys[:] = draft_keys
    torch.set_num_threads(before)
    return seconds


def _wait(tensor: torch.Tensor) -> None:
    """Wait until the device has finished."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
