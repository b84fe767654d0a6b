"""Reports what a run waits for when nothing has happened for a while.

It runs in its own thread, because the main thread may wait too: for engines that start, or for Ray. Every
step, group and event on the metrics bus counts as progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlpipe.metrics.bus import MetricsBus


@contextmanager
def progress_watched(bus: MetricsBus, waits_for: Callable[[], str], quiet_s: float) -> Iterator[None]:
    """Report `waiting` events within the context.

    waits_for: returns a text on what the run waits for; called in another thread. quiet_s: seconds without
    progress before the first event (0: no events); the time before each later event is twice as long.
    """
    if not quiet_s:
        yield
        return

    ended = threading.Event()

    def watch() -> None:
        due = quiet_s
        while not ended.wait(quiet_s / 30):
            quiet = bus.quiet_seconds()
            if quiet < quiet_s:
                due = quiet_s
            elif quiet >= due:
                due *= 2
                bus.event("waiting", seconds=round(quiet, 1), what=waits_for())

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
