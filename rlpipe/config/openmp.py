"""Sets how the threads of torch wait for each other on a CPU. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

# With PASSIVE, a thread that waits for work sleeps at once. By default it spins for milliseconds, and on a
# busy machine this takes CPU time from the thread for which it waits: a decode step took 3 to 6 times as
# long.
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}

# Any of these variables shows that the user has chosen.
_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_passively(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let waiting OpenMP threads sleep, unless the user has chosen how they wait.

    The OpenMP runtime reads the variable when torch loads the runtime; later calls affect only child
    processes.

    >>> variables = {"GOMP_SPINCOUNT": "1000"}
    >>> wait_passively(variables)
    >>> variables
    {'GOMP_SPINCOUNT': '1000'}
    """
    if not any(name in environment for name in _CHOICES):
        environment.update(PASSIVE)


def wait_choices() -> dict[str, str]:
    """Return this process's variables on how threads wait, to pass to processes that do not inherit them."""
    return {name: os.environ[name] for name in _CHOICES if name in os.environ}
