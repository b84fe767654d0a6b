"""Cost of a decode step by batch and gamma, measured once, before the first request.

Owns the measurement; `rlpipe.spec.gamma` chooses gamma from it. Steps run on rows of dummy tokens;
requests overwrite their keys in the cache.
"""

from __future__ import annotations

import time

import torch

from rlpipe.rollout.embedded.decoder import Decoder
from rlpipe.rollout.embedded.rows import RowTable

CONTEXT = 128  # tokens of the dummy rows, at most a third of the cache
ROUNDS = 5


@torch.inference_mode()
def measure_costs(
    decoder: Decoder, table: RowTable, *, max_gamma: int, threads: int
) -> dict[tuple[int, int], float]:
    """Measure the seconds of a step by (batch, gamma), gamma 0..max_gamma, batches 1, 2, 4, .. and all rows.

    The minimum of several rounds over all pairs, so that a disturbance does not favour a gamma. threads:
    the number that decoding will use. Leaves the table without rows.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)

    batches = [2**i for i in range(table.rows.bit_length()) if 2**i < table.rows] + [table.rows]
    cells = [(batch, gamma) for batch in batches for gamma in range(max_gamma + 1)]
    seconds = dict.fromkeys(cells, float("inf"))
    context = min(CONTEXT, table.tokens.shape[1] // 3)
    table.prompt[:] = context - 1
    for _ in range(ROUNDS):
        for batch, gamma in cells:
            table.active, table.total[:batch] = batch, context

            # The wait is part of the step: kernels run asynchronously on a GPU.
            started = time.perf_counter()
            decoder.step([], [], gamma=gamma)
            _wait(table.hidden)
            seconds[batch, gamma] = min(seconds[batch, gamma], time.perf_counter() - started)
            table.draft_keys[:] = context  # no gap to close

    table.active = 0
    table.total[:] = table.prompt[:] = 0
    torch.set_num_threads(before)
    return seconds


def _wait(tensor: torch.Tensor) -> None:
    """Wait until the device has finished."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
