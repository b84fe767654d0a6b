"""Run a function on several ranks, each in a fresh process; processes end by the handles we hold."""

from __future__ import annotations

import multiprocessing as mp
import traceback
from collections.abc import Callable
from typing import Any

from rlpipe.trainer.runtime import free_address


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 300.0) -> list[Any]:
    """Results of `function(rank, ranks, address, *args)` by rank.

    function: importable by name; its result must be picklable. Raises RuntimeError with the traceback
    of the first rank that failed, TimeoutError when a rank does not answer.
    """
    context = mp.get_context("spawn")
    address = free_address()
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=_main, args=(theirs, function, rank, ranks, address, *args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(timeout):
                raise TimeoutError(f"rank {rank} did not answer within {timeout} s")
            failed, value = pipe.recv()
            if failed:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results.append(value)
        return results
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _main(pipe: Any, function: Callable[..., Any], *args: Any) -> None:
    try:
        pipe.send((False, function(*args)))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
