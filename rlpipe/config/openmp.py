"""Sets how the threads of torch wait for each other on a CPU.

A thread that waits for its next parallel operation either spins, which occupies a core, or sleeps. Waking it
takes up to 0.2 ms in a virtual machine, and a decode step of a small model has a hundred such operations: it
takes twice as long if threads sleep at once. But a thread that spins for milliseconds, as is the default,
takes the core from the thread for which it waits if there are more threads than cores: then a step takes
three to six times as long. So threads spin for a short time, and `watch_for_contention` makes them sleep at
once while they compete for cores.

This is for GNU's runtime, which the wheels of torch contain. It also lets threads sleep at once whenever it
keeps more threads than there are cores. As it keeps threads for every thread that has ever run a parallel
operation, `release_threads` ends those that are not needed.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import MutableMapping
from contextlib import suppress
from functools import cache
from pathlib import Path

# At most 0.2 to 0.5 ms, depending on the CPU.
SHORT = {"GOMP_SPINCOUNT": "10000"}

# Any of these variables shows that the user has chosen.
_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

_CONTENDED = 0.2  # share of the time in which threads could run and wait for a core
_INTERVAL_S = 1.0
_PAUSE_SOFT = 1  # `omp_pause_soft` of OpenMP 5


def spin_briefly(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let waiting OpenMP threads spin for a short time, unless the user has chosen how they wait.

    The OpenMP runtime reads the variable when torch loads the runtime; later calls affect only child
    processes.

    >>> variables = {"OMP_WAIT_POLICY": "PASSIVE"}
    >>> spin_briefly(variables)
    >>> variables
    {'OMP_WAIT_POLICY': 'PASSIVE'}
    """
    if not any(name in environment for name in _CHOICES):
        environment.update(SHORT)


def wait_choices() -> dict[str, str]:
    """Return this process's variables on how threads wait, to pass to processes that do not inherit them."""
    return {name: os.environ[name] for name in _CHOICES if name in os.environ}


def release_threads() -> None:
    """End the OpenMP threads that the runtime keeps for the calling thread.

    Call it before a thread waits for a long time. The thread's next parallel operation starts new ones.
    """
    for runtime in _runtimes():
        runtime.omp_pause_resource_all(_PAUSE_SOFT)


@cache
def _runtimes() -> tuple[ctypes.CDLL, ...]:
    """Return GNU's OpenMP runtimes in this process; none on a system without Linux's /proc."""
    runtimes = []
    with suppress(OSError):
        for path in sorted(set(re.findall(r"/\S*/libgomp\b\S*", Path("/proc/self/maps").read_text()))):
            runtime = ctypes.CDLL(path)
            if hasattr(runtime, "omp_pause_resource_all"):
                runtimes.append(runtime)
    return tuple(runtimes)


@cache
def watch_for_contention() -> None:
    """From now on, let OpenMP threads sleep at once while this process's threads compete for cores.

    Call it after torch is imported. Returns without an effect if the user has chosen how threads wait.
    """
    if wait_choices() == SHORT and _runtimes():
        threading.Thread(target=_watch, name="rlpipe-contention", daemon=True).start()


def _watch() -> None:
    # Until the first measurement, assume that they compete: that costs less if it is wrong.
    surplus = _Surplus()
    surplus.keep(wanted=True)
    before = scheduled_seconds()
    while True:
        time.sleep(_INTERVAL_S)
        now = scheduled_seconds()
        surplus.keep(wanted=is_contended(before, now))
        before = now


def scheduled_seconds() -> tuple[float, float]:
    """Return for how long this process's living threads have run, and have waited for a core."""
    ran = waited = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            running, waiting, _ = map(int, (task / "schedstat").read_text().split())
            ran, waited = ran + running, waited + waiting
    return ran / 1e9, waited / 1e9


def is_contended(before: tuple[float, float], now: tuple[float, float]) -> bool:
    """Return whether threads waited for cores too much between two results of `scheduled_seconds`.

    A difference can be negative, because threads that end no longer count.

    >>> is_contended((10.0, 1.0), (11.0, 1.5)), is_contended((10.0, 1.0), (11.9, 1.1))
    (True, False)
    """
    ran, waited = (max(0.0, after - first) for first, after in zip(before, now, strict=True))
    return waited > _CONTENDED * (ran + waited)


class _Surplus:
    """More OpenMP threads than cores; while they exist, GNU's runtime lets waiting threads sleep at once."""

    def __init__(self) -> None:
        self._end: threading.Event | None = None

    def keep(self, *, wanted: bool) -> None:
        """Start the threads, or end them."""
        if wanted and self._end is None:
            self._end = threading.Event()
            threading.Thread(target=self._hold, args=(self._end,), daemon=True).start()
        elif not wanted and self._end is not None:
            self._end.set()
            self._end = None

    @staticmethod
    def _hold(end: threading.Event) -> None:
        # The runtime keeps the threads of a parallel region until the thread that ran it ends.
        for runtime in _runtimes():
            runtime.GOMP_parallel(_nothing, None, len(os.sched_getaffinity(0)), 0)
        end.wait()


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _nothing(_: object) -> None:
    """Be the body of a parallel region."""
