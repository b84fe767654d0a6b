"""How much memory can a command take from a machine, whatever it tries, compared with its sandbox's limit?

Each attack is one command that takes all the memory it can in one way. It runs in the sandbox twice: limited
by control groups ("with") and only by the watch ("without"). In both arms a separate process runs it inside
another group with a limit far above the sandbox's. The figure is the peak memory of that group as recorded by
the operating system, minus its memory before. Also reported is the time of a command that does nothing, in
both arms. Needs a memory controller (`scripts/doctor` shows whether there is one).

    python scripts/bench/sandbox_memory.py --json OUT
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

from harness import bench_parser, load_average, provenance, write_result

from rlpipe.config.env import SandboxConfig
from rlpipe.envs.sandbox import cgroup, make_tree_runner
from rlpipe.envs.sandbox.tree import tree_of

LIMIT_MB = 320
ROOM = 2 << 30  # what an attack may take from this machine before the bench itself ends it
ARMS = ("with", "without")
PRELUDE = """
import ctypes, fcntl, mmap, os, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
end = time.monotonic() + 4
def everywhere(take, processes=24):
    for _ in range(processes):
        if not os.fork():
            try:
                kept = take()
            except (OSError, MemoryError, ValueError):
                pass
            time.sleep(max(0, end - time.monotonic()))
            os._exit(0)
    time.sleep(max(0, end - time.monotonic()))
def until_refused(make, most=10**6):
    kept = []
    try:
        while len(kept) < most and time.monotonic() < end:
            kept.append(make())
    except (OSError, MemoryError, ValueError):
        pass
    return kept
def stuffed(sock, block=bytes(4096)):
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    until_refused(lambda: sock.send(block))
    return sock
def written(size, path=None, keep=True):
    path = path or f"/tmp/{os.getpid()}-{time.monotonic_ns()}"
    file = open(path, "wb")
    file.write(bytes(size))
    file.flush()
    if not keep:
        os.unlink(path)
    return file
def shared(size):
    area = mmap.mmap(-1, size)
    area.write(bytes(size))
    return area
"""
ATTACKS = {
    "private memory": "everywhere(lambda: until_refused(lambda: bytearray(b'x') * (4 << 20)))",
    "a burst of all processes at one moment": """
start = time.monotonic() + 1
def take():
    time.sleep(start - time.monotonic())
    return bytearray(b'x') * (64 << 20)
everywhere(take)""",
    "shared mappings": "everywhere(lambda: until_refused(lambda: shared(4 << 20)))",
    "System V segments": "until_refused(lambda: libc.shmget(0, 16 << 20, 0o1600) + 1 or 1 / len([]), 200)"
    " if libc.shmget(0, 16 << 20, 0o1600) >= 0 else print('refused')",
    "memfds": "everywhere(lambda: until_refused(lambda: os.write(os.memfd_create('x'), bytes(8 << 20))))",
    "extended attributes": """
names = [written(1).name for _ in range(200)]
for name in names:
    for n in range(20):
        try:
            os.setxattr(name, f'user.{n}', bytes(60000))
        except OSError:
            pass
time.sleep(1)""",
    "mapped files": """
def take():
    file = open(f'/tmp/{os.getpid()}', 'wb+')
    file.truncate(15 << 20)
    area = mmap.mmap(file.fileno(), 15 << 20)
    for at in range(0, 15 << 20, 4096):
        area[at] = 1
    return area
everywhere(take)""",
    "deleted files": "everywhere(lambda: until_refused(lambda: written(8 << 20, keep=False)))",
    "many small files": "everywhere(lambda: until_refused(lambda: written(1).close(), 20000), 16)",
    "page tables": """
def take():
    kept = []
    for _ in range(64):
        area = mmap.mmap(-1, 80 << 20, mmap.MAP_PRIVATE)
        for at in range(0, 80 << 20, 4096):
            area[at]
        kept.append(area)
    return kept
everywhere(take)""",
    "pipes": """
def make():
    read, write = os.pipe()
    try:
        fcntl.fcntl(write, 1031, 1 << 20)
    except OSError:
        pass
    os.set_blocking(write, False)
    until_refused(lambda: os.write(write, bytes(4096)))
everywhere(lambda: until_refused(make))""",
    "Unix sockets": "everywhere(lambda: until_refused(lambda: list(map(stuffed, socket.socketpair()))))",
    "UDP sockets": """
def make():
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.bind(('127.0.0.1', 0))
    one.connect(one.getsockname())
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    one.setblocking(False)
    for _ in range(200):
        one.send(bytes(4096))
    return one
everywhere(lambda: until_refused(make))""",
    "TCP sockets": """
def make():
    server = socket.create_server(('127.0.0.1', 0))
    one = socket.create_connection(server.getsockname())
    other, _ = server.accept()
    server.close()
    return stuffed(one), stuffed(other)
everywhere(lambda: until_refused(make))""",
    "stacks of threads": """
def body(depth=900):
    if depth:
        return body(depth - 1)
    time.sleep(max(0, end - time.monotonic()))
sys.setrecursionlimit(2000)
everywhere(lambda: until_refused(lambda: threading.Thread(target=body, daemon=True).start()))""",
    "arguments of programs": "everywhere(lambda: until_refused(lambda: subprocess.Popen("
    "['sleep', '4', *(['x' * 100000] * 15)], stderr=subprocess.DEVNULL), 8), 8)",
}


def play(arm: str, attack: str) -> dict[str, float | str | None]:
    """Run an attack in this process, which is in the measuring group; return its peak and how it ended."""
    if arm == "without":
        cgroup.controllers = dict
    runner = make_tree_runner(SandboxConfig(memo=False, memory_mb=LIMIT_MB, timeout_s=8.0, cpu_s=8))
    seconds = []
    for _ in range(15):
        started = time.perf_counter()
        runner.run({}, "true")
        seconds.append(time.perf_counter() - started)
    before = int(_memory_file("memory.current", "memory.usage_in_bytes").read_text())
    result, _ = runner.run(tree_of({"x.py": PRELUDE + ATTACKS[attack]}), "python3 x.py")
    peak = int(_memory_file("memory.peak", "memory.max_usage_in_bytes").read_text())
    return {
        "peak_mib": round((peak - before) / 2**20, 1),
        "ended_for": result.exceeded,
        "said": result.output[-200:],
        "command_ms": 1000 * statistics.median(seconds),
    }


def _memory_file(new: str, old: str) -> Path:
    """Return a file of this process's memory group, by its name in version 2 or version 1."""
    group = cgroup.parents()["memory"]
    return group / (new if cgroup.is_version_2(group) else old)


def measured(arm: str, attack: str) -> dict[str, float | str | None]:
    """Run `play` in a separate process, inside a group that only measures."""
    parents = {"memory": cgroup.controllers()["memory"]}
    group = cgroup.Group(f"rlpipe-bench-{os.getpid()}", parents, memory=ROOM, processes=10**5, cores=64.0)
    try:
        command = [sys.executable, __file__, "--arm", arm, "--attack", attack, "--json", os.devnull]
        waiting = ["sh", "-c", 'read line; exec "$@"', "sh", *command]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(waiting, **pipes) as process:
            group.add(process.pid)
            told, _ = process.communicate("\n")
        return json.loads(told.splitlines()[-1])
    finally:
        group.remove()


def main() -> None:
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--attack", choices=[*ATTACKS], help=argparse.SUPPRESS)
    given, load = parser.parse_args(), load_average()
    if given.arm:
        print(json.dumps(play(given.arm, given.attack)))
        return
    if "memory" not in cgroup.controllers():
        sys.exit("no memory controller here: nothing counts what an attack takes (scripts/doctor).")
    attacks = {name: {arm: measured(arm, name) for arm in ARMS} for name in ATTACKS}
    result = {
        **provenance(given, load, packages=()),
        "kernel": platform.release(),
        "limit_mib": LIMIT_MB,
        "controllers": sorted(cgroup.controllers()),
        "highest_peak_mib": {arm: max(a[arm]["peak_mib"] for a in attacks.values()) for arm in ARMS},
        "command_ms": {
            arm: round(statistics.median(a[arm].pop("command_ms") for a in attacks.values()), 1)
            for arm in ARMS
        },
        "attacks": attacks,
    }
    write_result(given.json, result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
