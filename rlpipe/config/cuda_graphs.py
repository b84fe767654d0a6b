"""Batch sizes for which an SGLang server captures CUDA graphs.

The rule is SGLang 0.5.23's (arg_groups/cuda_graph_hook.py). On GPUs below 90 GB with fewer than four ranks,
the largest size is 256. Larger batches run without graphs.
"""

from __future__ import annotations

LARGEST = 512


def captured_batches(max_running: int, *, drafts: bool) -> list[int]:
    """Return the batch sizes in ascending order. drafts: whether the server speculates.

    >>> captured_batches(20, drafts=True)
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20]
    >>> captured_batches(20, drafts=False)
    [1, 2, 4, 8, 12, 16, 20]
    """
    largest = min(max_running, LARGEST)
    sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 513, 16)]
    if drafts:
        sizes = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, 513, 16)]
    return sorted({size for size in sizes if size <= largest} | {largest})
