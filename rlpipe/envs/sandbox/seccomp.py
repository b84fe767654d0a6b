"""The filter of system calls for contained commands, as a program that bwrap installs (`--seccomp FD`).

Owns the list of denied calls and their numbers. The filter denies calls that allocate memory outside the
limits of a process (System V objects, memfds, extended attributes, keys), calls that reach beyond the
namespaces (kernel keyrings), and calls that ordinary programs do not need but that widen the kernel's attack
surface. A denied call fails with an errno that programs expect. On another architecture, the numbers mean
other calls, so the filter ends the process.

A program is an array of `struct sock_filter {u16 code; u8 jt, jf; u32 k}` on `struct seccomp_data`.
"""

from __future__ import annotations

import errno
import platform
import struct

_SAME_NUMBER = {  # calls of Linux 5.1 and later, with the same number on every machine
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "memfd_secret": 447,
    "setxattrat": 463,
}
_X86_64 = {
    "shmget": 29,
    "shmat": 30,
    "shmctl": 31,
    "semget": 64,
    "msgget": 68,
    "ptrace": 101,
    "setxattr": 188,
    "lsetxattr": 189,
    "fsetxattr": 190,
    "mq_open": 240,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "unshare": 272,
    "perf_event_open": 298,
    "fanotify_init": 300,
    "name_to_handle_at": 303,
    "open_by_handle_at": 304,
    "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311,
    "kcmp": 312,
    "memfd_create": 319,
    "bpf": 321,
    "userfaultfd": 323,
}
_AARCH64 = {
    "setxattr": 5,
    "lsetxattr": 6,
    "fsetxattr": 7,
    "unshare": 97,
    "ptrace": 117,
    "mq_open": 180,
    "msgget": 186,
    "semget": 190,
    "shmget": 194,
    "shmctl": 195,
    "shmat": 196,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "perf_event_open": 241,
    "fanotify_init": 262,
    "name_to_handle_at": 264,
    "open_by_handle_at": 265,
    "setns": 268,
    "process_vm_readv": 270,
    "process_vm_writev": 271,
    "kcmp": 272,
    "memfd_create": 279,
    "bpf": 280,
    "userfaultfd": 282,
}
# machine -> (AUDIT_ARCH_*, numbers by name, first number of the x32 table or None)
_MACHINES = {
    "x86_64": (0xC000003E, _X86_64 | _SAME_NUMBER, 0x40000000),
    "aarch64": (0xC00000B7, _AARCH64 | _SAME_NUMBER, None),
}
_NUMBER, _ARCH = 0, 4  # offsets in seccomp_data
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000


def denied(machine: str | None = None) -> dict[str, tuple[int, int]]:
    """Return the denied calls: name -> (number, errno).

    machine: a value of `platform.machine`; None: this machine. Raises ValueError for an unknown machine.
    """
    _, numbers, _ = _machine(machine)
    return {name: (number, _errno(name)) for name, number in numbers.items()}


def program(machine: str | None = None) -> bytes:
    """Return the filter for a machine; None: this machine. Raises ValueError for an unknown machine."""
    arch, _, second_table = _machine(machine)
    steps = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL_PROCESS)]
    steps.append((_LOAD, 0, 0, _NUMBER))

    # The x32 numbers are a second way to the same calls, so deny all of them.
    if second_table is not None:
        steps += [(_AT_LEAST, 0, 1, second_table), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for number, code in denied(machine).values():
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | code)]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def _errno(name: str) -> int:
    """Return the errno of a denied call: EPERM, or ENOTSUP for setxattr, which programs such as cp accept."""
    return errno.ENOTSUP if "setxattr" in name else errno.EPERM


def _machine(name: str | None) -> tuple[int, dict[str, int], int | None]:
    name = name or platform.machine()
    if name not in _MACHINES:
        raise ValueError(
            f"env.sandbox.backend=bubblewrap has no system call filter for {name}, only for "
            f"{' and '.join(_MACHINES)}: set env.sandbox.backend=docker."
        )
    return _MACHINES[name]
