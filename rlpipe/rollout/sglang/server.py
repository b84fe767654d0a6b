"""A server process: starts it, waits for it, and stops it together with all its child processes.

SGLang spawns a scheduler per GPU and a detokenizer; a failure in one ends the full process tree. The tree is
a separate process group under `guard.py`, which kills the group when the process that started it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from rlpipe.rollout import shared_entries

_LOG_LINES = 12
_LOWEST_PORT = 20000  # lowest port to choose
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # range of outgoing ports


def pick_port(host: str, port: int) -> int:
    """Return `port` if it is free; for 0, return any free port. Raises ValueError when it is in use.

    A server starts to listen seconds after its port is chosen. In the meantime an outgoing connection could
    take the port, so a port below the range for outgoing connections is chosen.
    """
    if port == 0:
        candidates = range(_LOWEST_PORT, max(_LOWEST_PORT, _first_outgoing_port()))
        for guess in random.SystemRandom().sample(candidates, min(20, len(candidates))):
            with contextlib.suppress(ValueError):
                return pick_port(host, guess)

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ValueError(
                f"rollout.sglang.host={host!r}, rollout.sglang.port={port}: cannot listen there "
                f"({error.strerror}). Set rollout.sglang.port=0 for a free port, or stop what uses this one."
            ) from error
        return probe.getsockname()[1]


def _first_outgoing_port() -> int:
    try:
        return int(_OUTGOING_PORTS.read_text().split()[0])
    except OSError:
        return 32768


class ServerProcess:
    """One server, from `Popen` to `stop`. log: file for its output."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, cwd: Path | None = None
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        self._entries: Path | None = None
        guard = Path(__file__).with_name("guard.py")

        # SGLang writes its settings, including the key, to the log: only the owner may read the log.
        with os.fdopen(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(guard), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=cwd,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the guard; it is also the id of the process group."""
        return self._process.pid

    def is_running(self) -> bool:
        """Return whether the process is alive; a hung process counts as alive."""
        return self._process.poll() is None

    async def wait_until(self, ready: Callable[[], Awaitable[bool]], timeout: float) -> None:
        """Poll `ready` until it returns true.

        Raises RuntimeError with the end of the log when the server ends or `timeout` seconds pass.
        """
        deadline = time.monotonic() + timeout
        while not await ready():
            if not self.is_running():
                raise RuntimeError(f"the SGLang server ended while starting. {self._log_end()}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"the SGLang server did not answer within rollout.sglang.start_timeout={timeout:g} s. "
                    f"{self._log_end()}"
                )
            await asyncio.sleep(0.1)
        self._entries = shared_entries.note(self.pid)

    def stop(self) -> None:
        """End the process group with SIGKILL; return when all its processes have ended.

        SIGTERM would not be cleaner: SGLang's schedulers end at once, and their parent treats this as a crash
        and sleeps five seconds to diagnose it.
        """
        entries = self._entries or shared_entries.note(self.pid)  # if it was still starting, read now
        _signal_group(self.pid, signal.SIGKILL)
        self._process.wait()
        _close(self._process.stdin)
        shared_entries.remove(entries)
        self._entries = None

    def _log_end(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return f"The end of {self.log}:\n" + "\n".join(line[:400] for line in lines[-_LOG_LINES:])


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # all processes have ended


def _close(stream: IO[bytes] | None) -> None:
    if stream is not None:
        stream.close()
