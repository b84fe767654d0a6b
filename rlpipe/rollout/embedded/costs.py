"""What a decode step costs by batch and gamma: measured once, before the first request.

Owns the measurement; the choice made from it is `rlpipe.spec.gamma`'s. Steps run on rows of made-up
tokens; what they leave in the cache is overwritten by requests.
"""

from __future__ import annotations

import time

import torch

from rlpipe.rollout.embedded.decoder import Decoder
from rlpipe.rollout.embedded.rows import RowTable

CONTEXT = 128  # tokens of the made-up rows, at most a third of the cache
ROUNDS = 5


@torch.inference_mode()
def measure_costs(
    decoder: Decoder, table: RowTable, *, max_gamma: int, threads: int
) -> dict[tuple[int, int], float]:
    """Seconds of a step by (batch, gamma), gamma 0..max_gamma, batches 1, 2, 4, .. and all rows.

    The least of several rounds, taken in turns, so that a disturbance does not favour a gamma. threads:
    those that decoding will use. Leaves the table without rows.
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
    """Until the device has finished."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
