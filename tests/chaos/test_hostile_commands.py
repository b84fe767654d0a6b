"""Commands that mean harm: each is contained in time, the next one works, and no process stays behind."""

import os
import socket
import sys
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest

from rlpipe.config.env import SandboxConfig
from rlpipe.envs.sandbox import bubblewrap, make_tree_runner
from rlpipe.envs.sandbox.base import Limit
from rlpipe.envs.sandbox.local import TreeSandbox
from rlpipe.envs.sandbox.tree import Link, remove_tree, tree_of

pytestmark = pytest.mark.chaos

TIMEOUT_S = 2.0
GRACE_S = 60.0  # to end and clean up, on a busy machine
CONFIG = SandboxConfig(memo=False, timeout_s=TIMEOUT_S, processes=40, memory_mb=256, output_kb=64)
TREE = tree_of({"core.py": "x = 1\n"})


class Host:
    """Runs hostile commands and looks at this machine: what they started, and what they left."""

    def __init__(self):
        self.mark = f"hostile{uuid.uuid4().hex}"
        self.runner = make_tree_runner(CONFIG)
        self.most = self.most_rss = 0
        self.timeout_s = TIMEOUT_S

    def run(self, command, tree=TREE):
        """Run a command that is marked by its text and, in what it executes, by its environment."""
        done = threading.Event()
        watch = threading.Thread(target=self._count, args=(done,))
        watch.start()
        started = time.monotonic()
        result, left = self.runner.run(tree, f"export MARK={self.mark}; {command}", timeout_s=self.timeout_s)
        seconds = time.monotonic() - started
        done.set()
        watch.join()
        assert seconds < self.timeout_s + GRACE_S, f"took {seconds:.1f} s"
        return result, left

    def _count(self, done):
        while not done.wait(0.05):
            alive = self.alive()
            self.most = max(self.most, len(alive))
            self.most_rss = max(self.most_rss, sum(_rss(process) for process in alive))

    def alive(self):
        """Processes that a hostile command started and that still live, wherever they went."""
        found = []
        for process in psutil.process_iter():
            try:
                marked = (
                    self.mark in " ".join(process.cmdline()) or process.environ().get("MARK") == self.mark
                )
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found


def _rss(process):
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


@pytest.fixture
def host():
    """Afterwards: nothing lives, nothing lies around, and an ordinary command works."""
    one = Host()
    yield one
    assert one.alive() == []
    result, tree = one.runner.run(TREE, "cat core.py")
    assert (result.output, result.exit_code, tree) == ("x = 1\n", 0, TREE)
    assert list(bubblewrap.scratch().glob(f"rlpipe-sandbox-{os.getpid()}-*")) == []


@pytest.mark.parametrize(
    "bomb",
    [
        ":(){ :|:& };: ; sleep 60",
        "f() { f & f; }; f",
        "python3 -c 'import os\nwhile True:\n    try: os.fork()\n    except OSError: pass'",
        "python3 -c 'import os\nwhile True:\n    try:\n        if os.fork() == 0: os.setsid()\n"
        "    except OSError: pass'",
        "ulimit -u unlimited; prlimit --nproc=100000 --pid $$; :(){ :|:& };: ; sleep 60",
    ],
)
def test_a_fork_bomb_reaches_its_limit_and_dies(host, bomb):
    host.run(bomb)
    outside = 3  # setpriv or bwrap, and process 1 of the sandbox, carry the command in their arguments
    assert host.most <= CONFIG.processes + outside


def test_more_processes_than_allowed_would_be_seen_by_this_test(host):
    """The count above is able to find too many: a higher limit is exceeded by the same bomb."""
    host.runner = make_tree_runner(SandboxConfig(memo=False, timeout_s=TIMEOUT_S, processes=80))
    host.run(":(){ :|:& };: ; sleep 60")
    assert host.most > CONFIG.processes + 3


def test_one_process_cannot_take_more_memory_than_allowed(host):
    result, _ = host.run("python3 -c 'x = bytearray(10**9)'; echo status $?")
    assert "MemoryError" in result.output and "status 1" in result.output


def test_many_processes_together_cannot_take_more_memory_than_allowed(host):
    hog = "python3 -c 'import time; x = bytearray(10**8); time.sleep(60)'"
    host.timeout_s = 60.0  # to start twenty interpreters on a busy machine; it ends at its limit
    result, _ = host.run(f"for i in $(seq 20); do {hog} & done; wait")
    assert result.exceeded is Limit.MEMORY
    assert host.most_rss < 2 * 10**9, "without the watch it were 2 GB and more"


@pytest.mark.parametrize("command", ["yes", "cat /dev/zero", "yes & yes & wait", "yes >&2"])
def test_infinite_output_is_cut(host, command):
    result, _ = host.run(command)
    assert result.exceeded is Limit.OUTPUT and len(result.output) == CONFIG.output_kb << 10


@pytest.mark.parametrize("place", ["/work", "/tmp"])
def test_a_huge_file_cannot_be_written(host, place):
    result, tree = host.run(f"cat /dev/zero > {place}/big; stat -c %s {place}/big; rm {place}/big")
    assert str(CONFIG.file_mb << 20) in result.output and tree == TREE
    sparse, _ = host.run(f"truncate -s 1T {place}/sparse; echo status $?; rm -f {place}/sparse")
    assert "status 0" not in sparse.output


@pytest.mark.parametrize(
    "command",
    [
        "i=0; while :; do i=$((i+1)); head -c 8000000 /dev/zero > $i; done",
        "i=0; while :; do i=$((i+1)); head -c 8000000 /dev/zero > /tmp/$i; done",
        "i=0; while :; do i=$((i+1)); > $i; done",
        'python3 -c \'import os\nwhile True: os.mkdir("d"); os.chdir("d")\'',
    ],
)
def test_filling_the_disk_with_files_is_ended_and_undone(host, command):
    result, tree = host.run(command)
    assert result.exceeded is Limit.FILES
    assert tree == TREE or "/tmp" in command


def test_nothing_outside_can_be_written(host, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    places = [
        "/etc/x",
        "/usr/x",
        "/usr/bin/x",
        "/x",
        "/dev/x",
        "/dev/shm/x",
        "/proc/sys/kernel/hostname",
        "../x",
    ]
    for place in [*places, str(precious), f"{tmp_path}/new", str(Path.home() / "x")]:
        result, _ = host.run(f"echo harm > {place}; echo status $?")
        assert "status 0" not in result.output, place
    host.run("rm -rf --no-preserve-root / 2> /dev/null")
    assert precious.read_text() == "mine" and list(tmp_path.iterdir()) == [precious]


def test_nothing_of_the_host_but_its_programs_can_be_seen(host, tmp_path):
    (tmp_path / "precious").write_text("mine")
    result, _ = host.run(
        f"ls -a / /etc /tmp; ls /root /home /var /opt /sys {tmp_path}; find / -name precious"
    )
    assert "precious" not in result.output.replace(str(tmp_path), "")
    for name in ("passwd", "shadow", "root", "home", "var"):
        assert name not in result.output.split("\n"), name


def test_no_mount_no_device_and_no_capability(host):
    command = (
        "mount -t tmpfs none /tmp; mount -o remount,rw /usr; mknod /tmp/sda b 8 0; chroot /usr; "
        "grep Cap /proc/self/status; grep NoNewPrivs /proc/self/status"
    )
    result, _ = host.run(command)
    lines = dict(line.split(":\t") for line in result.output.splitlines() if ":\t" in line)
    assert {lines[name] for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")} == {"0" * 16}
    assert lines["NoNewPrivs"] == "1"
    assert host.run("mknod /tmp/sda b 8 0; echo status $?")[0].output.endswith("status 1\n")


def test_the_network_is_out_of_reach_even_on_this_machine(host):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass  # the server does answer
        accepted = server.accept()[0]
        accepted.close()
        server.settimeout(0.2)
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1); print('reached')"
        attempt = f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo reached"
        result, _ = host.run(f'cat /proc/net/dev; ({attempt}); python3 -c "{code}"')
        with pytest.raises(TimeoutError):
            server.accept()
    assert "reached" not in result.output and result.output.count("refused") >= 2
    devices = [line.split(":")[0].strip() for line in result.output.splitlines() if ":  " in line]
    assert "lo" in devices and not [name for name in devices if name.startswith(("eth", "en", "wl"))]


def test_an_abstract_socket_of_the_host_is_out_of_reach(host):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{host.mark}")
        server.listen()
        connect = f'socket.socket(socket.AF_UNIX).connect("\\0{host.mark}")'
        result, _ = host.run(f"python3 -c 'import socket; {connect}; print(\"reached\")'")
    assert "reached" not in result.output and "refused" in result.output


@pytest.mark.parametrize(
    "command",
    [
        "kill -9 -1",
        "kill -9 $PPID; kill -9 1; kill -TERM 1; echo still here",
        "kill -9 $$",
        "for i in $(seq 1 400); do kill -9 $i; done 2> /dev/null",
        pytest.param(f"kill -9 {os.getpid()}", id="kill the tests"),
        "kill -STOP 1; kill -STOP $PPID",
    ],
)
def test_nobody_outside_can_be_killed(host, command):
    bystander = psutil.Popen(["sleep", "60"])
    try:
        result, _ = host.run(command)
        assert result.exceeded is None
        assert bystander.is_running() and bystander.status() != psutil.STATUS_ZOMBIE
    finally:
        bystander.kill()
        bystander.wait()


def test_a_command_that_stops_itself_is_ended_in_time(host):
    assert host.run("kill -STOP $$")[0].exceeded is Limit.TIME


def test_secrets_of_the_environment_cannot_be_read(host, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hunter2hunter2")
    assert os.environ["WANDB_API_KEY"] in os.popen("env").read(), "a child of ours would have it"
    command = "env; set; cat /proc/*/environ /proc/*/task/*/environ | tr '\\0' '\\n'; cat /proc/$PPID/cmdline"
    result, _ = host.run(command)
    assert "hunter2" not in result.output and "WANDB" not in result.output
    assert "PATH=/usr/local/bin:/usr/bin:/bin" in result.output, "it did read environments"


def test_open_files_of_the_host_are_not_inherited(host, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    with secret.open() as file:
        os.set_inheritable(file.fileno(), True)
        result, _ = host.run(
            'for fd in $(seq 3 200); do eval "cat <&$fd"; done 2> /dev/null; ls /proc/self/fd'
        )
    assert "hunter2" not in result.output


def test_links_out_of_the_work_tree_are_followed_by_nobody(host, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    sandbox = TreeSandbox(host.runner, TREE)
    sandbox.run(
        f"rm core.py; ln -s {secret} core.py; ln -s {tmp_path} out; ln -s /etc/passwd users; ln -s / all"
    )
    assert sandbox.tree == {
        "core.py": Link(str(secret)),
        "out": Link(str(tmp_path)),
        "users": Link("/etc/passwd"),
        "all": Link("/"),
    }
    later = sandbox.run(
        "cat core.py out/secret users; echo harm > core.py; echo harm > out/new; cat all/etc/shadow"
    )
    assert "hunter2" not in later.output and "root:" not in later.output
    assert secret.read_text() == "hunter2" and list(tmp_path.iterdir()) == [secret]


def test_swapping_directories_for_links_while_the_host_looks_reads_and_removes_nothing(host, tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("mine")
    swap = f"mkdir d; while :; do mv d e; ln -s {victim} d; rm d; mv e d; done 2> /dev/null"
    _, tree = host.run(swap)
    assert (victim / "file").read_text() == "mine"
    assert b"mine" not in [getattr(entry, "content", b"") for entry in tree.values()]


@pytest.mark.parametrize(
    "command",
    [
        "sleep 300 & echo done",
        "setsid nohup sleep 300 > /dev/null 2>&1 < /dev/null & echo done",
        "(trap '' HUP TERM INT; while :; do sleep 0.1; done) > /dev/null 2>&1 & echo done",
        "python3 -c 'import os, time\nif os.fork() == 0: os.setsid(); os.fork(); time.sleep(300)'; echo done",
    ],
)
def test_a_background_process_ends_with_its_command(host, command):
    host.timeout_s = 60.0  # who waited for the background process would reach it
    result, _ = host.run(command)
    assert result.output == "done\n" and result.exceeded is None


def test_a_background_process_cannot_change_the_tree_later(host):
    command = "(while :; do date +%N > core.py; done) > /dev/null 2>&1 & sleep 0.2; echo done"
    sandbox = TreeSandbox(host.runner, TREE)
    sandbox.run(command)
    first = sandbox.run("cat core.py").output
    time.sleep(0.3)
    assert sandbox.run("cat core.py").output == first


def test_unkillable_looking_directories_are_removed(host):
    result, _ = host.run("mkdir -p a/b/c; touch a/b/c/f; chmod 000 a/b/c a/b a; mkdir -m 000 x; echo ok")
    assert result.output == "ok\n"


def test_many_hostile_commands_at_once_leave_the_others_alone(host):
    bombs = [":(){ :|:& };: ; sleep 60", "yes", "kill -9 -1", "python3 -c 'x = bytearray(10**9)'"]
    results = []
    attackers = [
        threading.Thread(target=lambda bomb=bomb: host.runner.run(TREE, f"export MARK={host.mark}; {bomb}"))
        for bomb in bombs
    ]
    for thread in attackers:
        thread.start()
    for number in range(10):
        results.append(
            host.runner.run(TREE, f"echo {number}; python3 -c 'print(6 * 7)'", timeout_s=20)[0].output
        )
    for thread in attackers:
        thread.join()
    assert results == [f"{number}\n42\n" for number in range(10)]


def test_when_this_process_is_killed_its_commands_die_with_it(host, tmp_path):
    command = f"export MARK={host.mark}; (sleep 60 & sleep 60)"
    code = (
        "from rlpipe.config.env import SandboxConfig; from rlpipe.envs.sandbox import make_tree_runner; "
        f"make_tree_runner(SandboxConfig(timeout_s=60)).run({{}}, {command!r})"
    )
    worker = psutil.Popen([sys.executable, "-c", code], env=dict(os.environ, PYTHONPATH=str(Path.cwd())))
    try:
        _await(lambda: len(host.alive()) >= 4)
    finally:
        worker.kill()
        worker.wait()
    _await(lambda: host.alive() == [])
    for directory in bubblewrap.scratch().glob(f"rlpipe-sandbox-{worker.pid}-*"):
        remove_tree(directory)  # nobody else can: its owner was killed


def _await(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
