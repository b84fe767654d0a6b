"""Run a function on several ranks, each in a fresh process; processes end by the handles we hold."""

from __future__ import annotations

import multiprocessing as mp
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 240.0) -> list[Any]:
    """Results of `function(rank, ranks, *args)` by rank.

    function: importable by name; its result must be picklable. Raises RuntimeError with the traceback
    of the first rank that failed, TimeoutError when no rank answers for `timeout` seconds.
    """
    context = mp.get_context("spawn")
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(theirs, function, rank, ranks, *args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        results: dict[int, Any] = {}
        while len(results) < ranks:
            ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], timeout)
            if not ready:
                raise TimeoutError(f"ranks {sorted(set(range(ranks)) - results.keys())} are silent")
            for pipe in ready:
                failed, value = pipe.recv()
                if failed:
                    raise RuntimeError(f"rank {pipes.index(pipe)} failed:\n{value}")
                results[pipes.index(pipe)] = value
        return [results[rank] for rank in range(ranks)]
    finally:
        for process in processes:
            process.join(1)
            process.kill()
            process.join()


def _main(pipe: Any, function: Callable[..., Any], *args: Any) -> None:
    try:
        pipe.send((False, function(*args)))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
