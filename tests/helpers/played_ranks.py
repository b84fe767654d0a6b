"""Context parallel ranks that are threads of one process: what they gather meets at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from rlpipe.trainer import context


class PlayedRanks:
    """Answers what a context layout asks of a process group, for the thread that asks."""

    def __init__(self, size: int) -> None:
        self._size, self._local = size, threading.local()
        self._barrier = threading.Barrier(size, timeout=60)
        self._given: list[Any] = [None] * size

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def rank(self) -> int:
        """Number of this thread's rank."""
        return self._local.rank

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """[n, ...] of each rank -> [R n, ...] in order of the ranks."""
        self._given[self.rank()] = mine
        self._barrier.wait()
        everything = torch.cat(self._given)
        self._barrier.wait()
        return everything

    def run(self, function: Callable[[], Any], monkeypatch: Any) -> list[Any]:
        """What the function returns on each rank; it makes no autograd graph.

        monkeypatch: anything with pytest's `setattr`, by which gathers are sent here.
        """

        def on(rank: int) -> Any:
            self._local.rank = rank
            torch.set_num_threads(1)
            try:
                with torch.no_grad():
                    return function()
            except BaseException:
                self._barrier.abort()
                raise

        name = "gather_from_sequence_parallel_region"
        monkeypatch.setattr(context, name, lambda mine, group: group.gather(mine))
        with ThreadPoolExecutor(self._size) as pool:
            return [future.result() for future in [pool.submit(on, r) for r in range(self._size)]]
