"""Run a function on several ranks, each in a process of its own; processes end by the handles we hold.

Without a GPU they are forked from a server that has imported Megatron once; with one they start afresh, as
CUDA survives no fork.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import torch

from tests.helpers import processes


def run_ranks(function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 240.0) -> list[Any]:
    """Results of `function(rank, ranks, *args)` by rank.

    function: importable by name; its result must be picklable. Raises RuntimeError with the traceback
    of the first rank that failed, TimeoutError when no rank answers for `timeout` seconds.
    """
    context = mp.get_context("spawn") if torch.cuda.is_available() else processes.SERVER
    pipes, started = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        environment = dict(os.environ)
        process = context.Process(
            target=_main, args=(theirs, environment, function, rank, ranks, *args), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        started.append(process)
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
        for process in started:
            process.join(1)
            process.kill()
            process.join()


def _main(pipe: Any, environment: dict[str, str], function: Callable[..., Any], *args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    try:
        pipe.send((False, function(*args)))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
