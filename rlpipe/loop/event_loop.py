"""Runs coroutines to completion, also from a thread with a running event loop, as in a notebook."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new event loop and return its result.

    The loop runs in this thread or, if this thread already runs a loop (which `asyncio.run` refuses), in a
    separate thread. Signal handlers of the main thread still run meanwhile.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # no loop is running in this thread
        return asyncio.run(coroutine)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="rlpipe-loop") as executor:
        return executor.submit(asyncio.run, coroutine).result()
