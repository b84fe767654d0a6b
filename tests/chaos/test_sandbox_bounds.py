"""Bounds of the sandbox that the kernel's limits of a process do not give: each against a real sandbox."""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlpipe.config.env import SandboxConfig
from rlpipe.envs.sandbox import cgroup, check_sandbox, make_tree_runner
from rlpipe.envs.sandbox.base import Limit
from rlpipe.envs.sandbox.leftovers import remove_leftovers
from rlpipe.envs.sandbox.seccomp import denied
from rlpipe.envs.sandbox.tree import tree_of

pytestmark = pytest.mark.chaos
CONFIG = SandboxConfig(memo=False, timeout_s=20.0, cpu_s=20, memory_mb=256)
PRELUDE = """
import ctypes, errno, json, mmap, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    return libc.syscall(number, *args), ctypes.get_errno()
"""


@pytest.fixture(scope="module")
def runner():
    return make_tree_runner(CONFIG)


def play(runner, script, **files):
    return runner.run(tree_of({"x.py": PRELUDE + script, **files}), "python3 x.py")[0]


def test_each_denied_call_fails_inside(runner):
    numbers = {name: number for name, (number, _) in denied().items()}
    script = f"print(json.dumps({{name: call(n, 0, 0, 0, 0, 0, 0) for name, n in {numbers!r}.items()}}))"
    answered = json.loads(play(runner, script).output)
    assert answered == {name: [-1, code] for name, (_, code) in denied().items()}


def test_keys_of_the_host_can_be_neither_read_nor_planted(runner):
    add_key, keyctl = denied()["add_key"][0], denied()["keyctl"][0]
    libc = ctypes.CDLL(None, use_errno=True)
    key = libc.syscall(add_key, b"user", b"rlpipe-test", b"secret", 6, -3)  # into the session keyring
    if key < 0:
        assert ctypes.get_errno() != 0  # this machine has no keys: nothing to read
    script = f"""
buffer = ctypes.create_string_buffer(64)
print(call({keyctl}, 11, {key}, buffer, 64), buffer.value)
print(call({add_key}, b"user", b"planted", b"x", 1, -3))
"""
    said = play(runner, script).output
    assert said.split() == ["(-1,", "1)", "b''", "(-1,", "1)"] and "secret" not in said
    if key >= 0:
        libc.syscall(keyctl, 9, key, -3)  # unlink it again


def test_system_v_memory_memfds_and_attributes_hold_nothing(runner):
    script = f"""
taken = 0
for _ in range(95):
    segment, _ = call({denied()["shmget"][0]}, 0, 16 << 20, 0o1600)
    memfd, _ = call({denied()["memfd_create"][0]}, b"x", 0)
    taken += (segment >= 0) + (memfd >= 0)
open("file", "w").close()
for n in range(50):
    try:
        os.setxattr("file", f"user.a{{n}}", b"x" * 60000)
        taken += 1
    except OSError as error:
        assert error.errno == errno.ENOTSUP
print(taken)
"""
    assert play(runner, script).output == "0\n"


def test_deleted_files_that_stay_open_count_as_files_of_the_tree(runner):
    script = """
held = []
for n in range(20):  # 160 MiB: below the limit of memory, of which such files take part, above that of files
    held.append(open("/tmp/f", "wb"))
    held[-1].write(bytes(8 << 20))
    held[-1].flush()
    os.unlink("/tmp/f")
import time; time.sleep(15)
print("kept", len(held))
"""
    result = play(runner, script)
    assert result.exceeded is Limit.FILES and "kept" not in result.output


@pytest.fixture(params=["groups", "watch"])
def bound(request, monkeypatch):
    """What this machine has, and what remains where it lends no control groups."""
    if request.param == "watch":
        monkeypatch.setattr(cgroup, "controllers", dict)
    return request.param


@pytest.mark.usefixtures("bound")
def test_shared_memory_of_many_processes_is_bounded(runner):
    script = """
import time
for n in range(12):
    if not os.fork():
        area = mmap.mmap(-1, 40 << 20)
        area.write(bytes(40 << 20))
        time.sleep(9)
        os._exit(0)
time.sleep(9)
print("kept")
"""
    result = play(runner, script)
    assert result.exceeded is Limit.MEMORY and "kept" not in result.output


def test_memory_that_no_process_owns_is_held_where_there_is_a_memory_group(runner):
    script = """
import socket, time
for _ in range(50):
    if not os.fork():
        kept = []
        while True:
            try:
                kept.append(socket.socketpair())
                kept[-1][0].setblocking(False)
                while kept[-1][0].send(bytes(4096)):
                    pass
            except BlockingIOError:
                continue
            except OSError:
                time.sleep(60)
if sys.argv[1:]:
    time.sleep(60)
"""
    held = "memory" in cgroup.controllers()
    files = tree_of({"x.py": PRELUDE + script})
    result, _ = runner.run(files, f"python3 x.py {'stay' * held}", timeout_s=60.0)
    assert result.exceeded is (Limit.MEMORY if held else None)
    assert not list(cgroup.groups(f"rlpipe-sandbox-{os.getpid()}-")), "a group ends with its command"


def test_the_kernel_holds_a_group_to_its_bounds(tmp_path):
    parents = cgroup.controllers()
    group = cgroup.Group(f"rlpipe-test-{os.getpid()}", parents, memory=96 << 20, processes=5, cores=1.0)
    script = (
        "import os\n"
        "input()\n"
        "def fork():\n"
        "    try:\n"
        "        return os.fork() or os.execvp('sleep', ['sleep', '60'])\n"
        "    except BlockingIOError:\n"
        "        return 0\n"
        "print(sum(fork() > 0 for _ in range(20)), flush=True)\n"
        "kept = [bytearray(b'x') * (8 << 20) for _ in range(20)]\n"
        "print('took 160 MiB')"
    )
    try:
        with (tmp_path / "out").open("w") as out:  # no pipe: those that are left would hold it open
            command = [sys.executable, "-c", script]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out) as process:
                group.add(process.pid)
                process.communicate(b"\n")
        started, *took = (tmp_path / "out").read_text().splitlines()
        assert started == ("4" if "pids" in parents else "20")
        assert took == ([] if "memory" in parents else ["took 160 MiB"])
        assert group.ran_out_of_memory() is ("memory" in parents)
    finally:
        group.remove()
    assert not any(path.exists() for path in group.paths), "with the processes that were left in it"


def test_a_group_of_either_version_is_found_and_ended():
    """Where both are mounted, version 2 lacks the controllers; processes are put into it and killed alike."""
    prefix, ours = f"rlpipe-test-{os.getpid()}-", set(cgroup.CONTROLLERS)
    places = [own for types, _, own in cgroup._hierarchies() if not types or types & ours]
    groups = [own / f"{prefix}end" for own in places if os.access(own, os.W_OK)]
    process = subprocess.Popen(["sleep", "1000"])
    try:
        for group in groups:
            group.mkdir()
            (group / "cgroup.procs").write_text(str(process.pid))
        assert set(cgroup.groups(prefix)) == set(groups)
        if groups:  # else a machine that lends none
            cgroup.remove(groups[-1])
            assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
        for group in groups:
            cgroup.remove(group)
    assert not list(cgroup.groups(prefix))


def test_page_tables_are_counted():
    from rlpipe.envs.sandbox.bubblewrap import _memory

    script = (
        "import mmap; a = mmap.mmap(-1, 1 << 30, mmap.MAP_PRIVATE); [a[n] for n in range(0, 1 << 30, 4096)]"
    )
    command = [sys.executable, "-c", script + "; print('ready', flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        tables = _memory(process.pid) - psutil.Process(process.pid).memory_info().rss
        process.communicate(b"\n")
    assert tables >= (1 << 30) // 512, "a page of tables for every 512 pages read"


def test_honest_work_runs_under_the_filter(runner):
    script = """
import asyncio, concurrent.futures, multiprocessing, shutil, sqlite3, subprocess, tempfile, unittest
asyncio.run(asyncio.sleep(0))
assert list(concurrent.futures.ThreadPoolExecutor(2).map(abs, [-1])) == [1]
ours, theirs = multiprocessing.Pipe()
child = multiprocessing.Process(target=theirs.send, args=(7,))
child.start()
assert ours.recv() == 7
child.join()
shutil.copy2("x.py", "y.py")
shutil.copytree(".", "/tmp/copy")
sqlite3.connect(":memory:").execute("select 1")
with tempfile.TemporaryFile() as file:
    file.write(b"x")
area = mmap.mmap(-1, 4096); area[0] = 1
assert subprocess.run(["cp", "-a", "x.py", "z.py"]).returncode == 0
assert subprocess.run(["tar", "cf", "all.tar", "x.py"]).returncode == 0
unittest.main(argv=["x"], exit=False)
print("honest")
"""
    result = play(runner, script)
    assert "honest" in result.output and result.exit_code == 0, result.output


def test_git_works_where_it_is_installed(runner):
    command = (
        "command -v git >/dev/null || { echo absent; exit; }; git init -q . && git add -A && "
        "git -c user.name=a -c user.email=a@b commit -qm one && git log --oneline | wc -l"
    )
    result, _ = runner.run(tree_of({"a.py": "x = 1\n"}), command)
    assert result.output.strip().splitlines()[-1] in ("1", "absent"), result.output
    assert Path("/usr/bin/git").exists() == (result.output.strip() != "absent")


def test_what_a_killed_process_left_is_swept_and_what_lives_or_is_foreign_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[remove_leftovers.__module__], "scratch", lambda: tmp_path)
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    names = [f"rlpipe-sandbox-{pid}-abc" for pid in (dead.pid, os.getpid())] + ["rlpipe-sandbox-x-1", "other"]
    for name in names:
        (tmp_path / name / "work" / "deep").mkdir(parents=True)
    limits = {"memory": 1 << 20, "processes": 1, "cores": 1.0}
    groups = [cgroup.Group(name, cgroup.controllers(), **limits) for name in names]
    try:
        assert remove_leftovers() >= 1  # and what other runs of this machine left
        left = [name for name, group in zip(names, groups, strict=True) if all(map(Path.exists, group.paths))]
        assert left == (names[1:] if cgroup.controllers() else names)
    finally:
        for group in groups:
            group.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_a_full_scratch_disk_is_one_sentence_before_the_run_starts():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1 << 20, before[1])
    )  # a write beyond it fails as on a full disk
    try:
        with pytest.raises(ValueError, match=r"cannot write 4 MiB into /.* \(File too large\).*--shm-size"):
            check_sandbox(CONFIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    check_sandbox(CONFIG)
