"""Runs one process with limits on output and wall time, and monitors its resource usage.

Owns reading, timing and ending a process, independent of sandboxes. Flow: start -> select on output, input,
status pipe and the process, and check the usage every tick -> end the process if it exceeds a limit -> reap
it. Output beyond the limit is discarded.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlpipe.envs.base import InfrastructureError
from rlpipe.envs.sandbox.base import Limit

# These arguments are replaced by descriptor numbers:
STATUS_FD = "{status-fd}"  # the pipe to which the process writes its status
FILTER_FD = "{filter-fd}"  # a pipe from which `filter_program` can be read
GATE_FD = "{gate-fd}"  # a pipe that becomes readable when the process is admitted
_CHUNK = 65536
TICK_S = 0.1
_DEATH_S = 10.0


@dataclass(slots=True, kw_only=True)
class Ended:
    """Outcome of a process.

    output: stdout and stderr in the order written, cut at the limit. returncode: -n for signal n.
    status: bytes that it wrote to its status pipe. exceeded: the limit that ended the process, or None.
    """

    output: bytes
    returncode: int
    status: bytes
    exceeded: Limit | None
    seconds: float


def run_bounded(
    argv: Sequence[str],
    *,
    timeout_s: float,
    max_output: int,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    filter_program: bytes = b"",
    admit: Callable[[bytes], bool] = lambda status: True,
    watch: Callable[[int], Limit | None] = lambda pid: None,
    end: Callable[[subprocess.Popen[bytes], bytes], None] = lambda process, status: process.kill(),
    pass_fds: Sequence[int] = (),
    tick_s: float = TICK_S,
) -> Ended:
    """Run `argv` until it ends or exceeds a limit.

    admit: called with the status pipe's text so far, until it returns true; may raise OSError.
    watch: called with the process id every tick_s seconds; if it returns a Limit, the process is ended.
    end: function that ends the process; called with the process and the status pipe's text so far.
    env: the full environment; None inherits this process's. filter_program: must fit in a pipe (64 KiB).
    pass_fds: further descriptors of this process for the new process to inherit.
    Raises InfrastructureError if the process cannot be started or does not end.
    """
    with contextlib.ExitStack() as resources:
        run = _Run(
            argv,
            resources,
            stdin=stdin,
            env=env,
            filter_program=filter_program,
            admit=admit,
            pass_fds=pass_fds,
        )
        exceeded = run.supervise(
            timeout_s=timeout_s, max_output=max_output, tick_s=tick_s, watch=watch, end=end
        )
        returncode = run.process.wait()
        run.drain(max_output)

        # The last output of a process may arrive after it has ended.
        if exceeded is None and len(run.output) > max_output:
            exceeded = Limit.OUTPUT
        return Ended(
            output=bytes(run.output[:max_output]),
            returncode=returncode,
            status=bytes(run.status),
            exceeded=exceeded,
            seconds=time.monotonic() - run.started,
        )


class _Run:
    """One running process and its pipes."""

    def __init__(
        self,
        argv: Sequence[str],
        resources: contextlib.ExitStack,
        *,
        stdin: bytes,
        env: Mapping[str, str] | None,
        filter_program: bytes,
        admit: Callable[[bytes], bool],
        pass_fds: Sequence[int],
    ) -> None:
        self.started = time.monotonic()
        self.output, self.status, self._input = bytearray(), bytearray(), memoryview(stdin)
        self._admit: Callable[[bytes], bool] | None = admit

        # Close the child's ends of the pipes in this process once the child has started.
        with contextlib.ExitStack() as child_ends:
            try:
                self._output_fd, output_write = _pipe(resources, child_ends)
                self._status_fd, status_write = _pipe(resources, child_ends)
                gate_read, self._gate_fd = _pipe(child_ends, resources)
                numbers = {STATUS_FD: str(status_write), GATE_FD: str(gate_read)}
                passed = [status_write, gate_read]
                if filter_program:
                    passed.append(_readable(filter_program, child_ends))
                    numbers[FILTER_FD] = str(passed[-1])
                self.process = subprocess.Popen(
                    [numbers.get(argument, argument) for argument in argv],
                    stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                    stdout=output_write,
                    stderr=output_write,
                    env=None if env is None else dict(env),
                    pass_fds=(*passed, *pass_fds),
                )
            except OSError as error:
                raise InfrastructureError(f"cannot start {argv[0]}: {error}") from error

        resources.callback(self._reap)
        for descriptor in (self._output_fd, self._status_fd):
            os.set_blocking(descriptor, False)

        # With a pidfd, one `select` waits for the end of the process and for its pipes.
        self._exit_fd = os.pidfd_open(self.process.pid)
        resources.callback(os.close, self._exit_fd)

        self._selector = resources.enter_context(selectors.DefaultSelector())
        for descriptor in (self._output_fd, self._status_fd, self._exit_fd):
            self._selector.register(descriptor, selectors.EVENT_READ)
        if self.process.stdin:
            os.set_blocking(self.process.stdin.fileno(), False)
            self._selector.register(self.process.stdin, selectors.EVENT_WRITE)

    def supervise(
        self,
        *,
        timeout_s: float,
        max_output: int,
        tick_s: float,
        watch: Callable[[int], Limit | None],
        end: Callable[[subprocess.Popen[bytes], bytes], None],
    ) -> Limit | None:
        """Wait until the process has ended; return the limit that ended it, or None."""
        deadline, look = self.started + timeout_s, self.started + tick_s
        while True:
            if self._serve(min(deadline, look)):
                return None

            now, exceeded = time.monotonic(), None
            if len(self.output) > max_output:
                exceeded = Limit.OUTPUT
            elif now >= deadline:
                exceeded = Limit.TIME
            elif now >= look:
                exceeded, look = watch(self.process.pid), now + tick_s

            if exceeded:
                end(self.process, bytes(self.status))
                self._await_death()
                return exceeded

    def _serve(self, until: float) -> bool:
        """Read and write the pipes that are ready; return whether the process has ended."""
        for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
            if key.fd == self._exit_fd:
                return True
            if key.fd == self._output_fd:
                self._read(self._output_fd, self.output)
            elif key.fd == self._status_fd:
                if self._read(self._status_fd, self.status):
                    self._open_the_gate()
            else:
                self._write()
        return False

    def _open_the_gate(self) -> None:
        try:
            if self._admit and self._admit(bytes(self.status)):
                self._admit = None
                with contextlib.suppress(BrokenPipeError):  # the process has just ended
                    os.write(self._gate_fd, b"1")
        except OSError as error:
            raise InfrastructureError(f"cannot admit process {self.process.pid}: {error}") from error

    def _read(self, descriptor: int, into: bytearray) -> bool:
        """Read the available bytes into a buffer; return whether there were any."""
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return False

        if not chunk:
            self._selector.unregister(descriptor)

        into += chunk
        return bool(chunk)

    def _write(self) -> None:
        """Write as much input as the pipe accepts; close the pipe after the last byte."""
        stdin = self.process.stdin
        assert stdin is not None, "only a process with input is registered for writing"

        try:
            self._input = self._input[os.write(stdin.fileno(), self._input) :]
        except BrokenPipeError:
            self._input = memoryview(b"")  # the process no longer reads

        if not self._input:
            self._selector.unregister(stdin)
            stdin.close()

    def drain(self, max_output: int) -> None:
        """Read the remaining output of a process that has ended."""
        registered = self._selector.get_map()
        while self._output_fd in registered and len(self.output) <= max_output:
            if not self._read(self._output_fd, self.output):
                break
        while self._status_fd in registered and self._read(self._status_fd, self.status):
            pass

    def _await_death(self) -> None:
        try:
            self.process.wait(_DEATH_S)
        except subprocess.TimeoutExpired:
            raise InfrastructureError(f"process {self.process.pid} did not die when killed") from None

    def _reap(self) -> None:
        """End and reap the child if it is still running."""
        if self.process.stdin:
            self.process.stdin.close()

        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(_DEATH_S)


def _readable(content: bytes, until_started: contextlib.ExitStack) -> int:
    """Return a descriptor from which `content`, followed by the end of file, can be read."""
    read, write = os.pipe()
    until_started.callback(os.close, read)
    with os.fdopen(write, "wb") as file:
        file.write(content)
    return read


def _pipe(until_read: contextlib.ExitStack, until_written: contextlib.ExitStack) -> tuple[int, int]:
    """Make a pipe; each end is closed by a separate stack."""
    read, write = os.pipe()
    until_read.callback(os.close, read)
    until_written.callback(os.close, write)
    return read, write
