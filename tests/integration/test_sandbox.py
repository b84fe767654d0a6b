"""The bubblewrap sandbox at work: results, limits, failures told apart, and its refusal to be absent."""

import json
import os
import shutil
import stat
import subprocess
import sys

import psutil
import pytest

from rlpipe.config.env import SandboxBackend, SandboxConfig
from rlpipe.envs.base import InfrastructureError
from rlpipe.envs.sandbox import bubblewrap, check_sandbox, make_tree_runner
from rlpipe.envs.sandbox.base import Limit
from rlpipe.envs.sandbox.descendants import descendants
from rlpipe.envs.sandbox.tree import EmptyDirectory, File, Link, tree_of

pytestmark = pytest.mark.integration
TREE = tree_of({"core.py": "x = 1\n", "pkg/deep.py": ""})


@pytest.fixture
def runner():
    return make_tree_runner(SandboxConfig(memo=False, timeout_s=10))


def leftovers():
    return [path.name for path in bubblewrap.scratch().glob(f"rlpipe-sandbox-{os.getpid()}-*")]


def test_output_exit_code_and_the_tree_a_command_leaves(runner):
    command = (
        "cat core.py; echo bad >&2; mkdir new; ln -s /etc/passwd link; rm -r pkg; chmod +x core.py; exit 3"
    )
    result, tree = runner.run(TREE, command)
    assert (result.output, result.exit_code, result.exceeded) == ("x = 1\nbad\n", 3, None)
    assert tree == {
        "core.py": File(b"x = 1\n", executable=True),
        "new": EmptyDirectory(),
        "link": Link("/etc/passwd"),
    }


@pytest.mark.parametrize("shell", ["dash", "bash"])
def test_every_process_has_the_limits_whatever_shell_sets_them(shell):
    config = SandboxConfig(memory_mb=300, file_mb=7, cpu_s=9, processes=33)
    names = ("NPROC", "AS", "FSIZE", "CPU", "NOFILE", "CORE")
    ask = f"import resource as r; print(*(r.getrlimit(getattr(r, 'RLIMIT_' + n)) for n in {names}))"
    box = bubblewrap.ContainedBubblewrap(config, {})
    try:
        words = box.command_line(["python3", "-c", ask])
        inside = words[words.index("--") + 1 :]
        done = subprocess.run(
            inside, executable=shutil.which(shell), capture_output=True, text=True, check=True
        )
        contained = box.run(["python3", "-c", ask], timeout_s=60).output
    finally:
        box.cleanup()
    values = (33, 300 << 20, 7 << 20, 9, 256, 0)
    assert done.stdout == contained == " ".join(str((value, value)) for value in values) + "\n"


def test_equal_commands_on_equal_trees_give_equal_results(runner):
    command = (
        'pwd; ls -la --time-style=full-iso; id; hostname; env; python3 -c \'print(list({"a", "b", "c"}))\''
    )
    first, second = runner.run(TREE, command)[0].output, runner.run(TREE, command)[0].output
    strip = [line for line in first.splitlines() if not line.endswith((" .", " .."))]
    assert strip == [line for line in second.splitlines() if not line.endswith((" .", " .."))]
    assert strip[0] == "/work" and "sandbox" in first


def test_edits_within_a_second_never_meet_stale_bytecode(runner):
    tree = tree_of({"core.py": "x = 1\n"})
    command = "PYTHONDONTWRITEBYTECODE= python3 -c 'import core; print(core.x)'"
    for value in (1, 2, 3):
        tree = tree | tree_of({"core.py": f"x = {value}\n"})
        result, tree = runner.run(tree, command)
        assert result.output == f"{value}\n"
        assert set(tree) == {"core.py"}


def test_what_is_given_on_stdin_is_read(runner):
    data = os.urandom(300_000).hex().encode()
    result, _ = runner.run({}, "wc -c; echo done", stdin=data)
    assert result.output == f"{len(data)}\ndone\n"
    assert runner.run({}, "exec <&-; sleep 0.05; echo ok", stdin=data)[0].output == "ok\n"
    assert runner.run({}, "cat")[0].output == "", "without input a reader sees the end at once"


def test_a_command_over_its_time_is_ended_and_says_what_it_wrote(runner):
    result, tree = runner.run(TREE, "echo before; touch made; sleep 1000; echo after", timeout_s=5)
    assert (result.output, result.exceeded) == ("before\n", Limit.TIME)
    assert "made" in tree


def test_every_process_below_one_is_found_those_that_threads_start_too():
    program = (
        "import subprocess as s, threading as t; t.Thread(target=lambda: s.run(['sh', '-c', {!r}])).start()"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", program.format("sleep 60 & sleep 60 & echo up; wait")], stdout=subprocess.PIPE
    )
    with started:
        try:
            assert started.stdout.readline() == b"up\n"
            below = psutil.Process(started.pid).children(recursive=True)
            assert len(below) == 3
            assert set(descendants(started.pid, max_age_s=0)) == {process.pid for process in below}
        finally:
            for process in (*below, started):
                process.kill()


def test_output_beyond_the_bound_is_cut_and_the_command_ended():
    runner = make_tree_runner(SandboxConfig(memo=False, output_kb=4))
    result, _ = runner.run({}, "yes")
    assert result.exceeded is Limit.OUTPUT and result.output == "y\n" * 2048
    quick, _ = runner.run({}, "head -c 5000 /dev/zero | tr '\\0' x")
    assert quick.exceeded is Limit.OUTPUT and quick.output == "x" * 4096


def test_a_tree_over_its_limit_is_undone(runner):
    result, tree = runner.run(TREE, "mkdir d; for i in $(seq 3000); do > d/$i; done")
    assert result.exceeded is Limit.FILES and tree == TREE
    big, tree = runner.run(TREE, "for i in 1 2 3 4 5 6; do head -c 15000000 /dev/zero > $i; done")
    assert big.exceeded is Limit.FILES and tree == TREE


def test_no_directory_is_left_after_any_outcome(runner):
    runner.run(TREE, "true")
    runner.run(TREE, "chmod 000 pkg core.py; mkdir -p a/b/c; chmod 000 a/b")
    runner.run(TREE, "sleep 9", timeout_s=0.2)
    assert leftovers() == []


def test_a_bwrap_that_cannot_start_is_an_infrastructure_failure_not_a_failing_command(monkeypatch):
    runner = make_tree_runner(SandboxConfig(memo=False))
    real = bubblewrap._system()
    for options in (("--no-such-option",), ("--ro-bind", "/nonexistent", "/x")):
        monkeypatch.setattr(bubblewrap, "_system", lambda options=options: (*real, *options))
        with pytest.raises(InfrastructureError, match="bwrap ended with status 1"):
            runner.run(TREE, "true")
    assert leftovers() == []


def test_a_full_disk_is_an_infrastructure_failure(monkeypatch):
    def no_space(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bubblewrap, "write_tree", no_space)
    with pytest.raises(InfrastructureError, match="No space left"):
        make_tree_runner(SandboxConfig(memo=False)).run(TREE, "true")


def test_a_failing_command_is_never_an_infrastructure_failure(runner):
    for command, code in [
        ("exit 1", 1),
        ("exit 125", 125),
        ("nonsense", 127),
        ("kill -9 $$", 137),
        ("((", 2),
    ]:
        assert runner.run(TREE, command)[0].exit_code == code, command


def test_the_check_passes_here_and_names_a_missing_tool_with_its_package(monkeypatch, tmp_path):
    check_sandbox(SandboxConfig())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"bwrap.*apt-get install bubblewrap"):
        check_sandbox(SandboxConfig())
    with pytest.raises(ValueError, match=r"singularity.*not found on PATH"):
        check_sandbox(SandboxConfig(backend=SandboxBackend.SINGULARITY))


def test_the_check_says_how_to_allow_namespaces_when_bwrap_fails(monkeypatch):
    monkeypatch.setattr(bubblewrap, "_system", lambda: ("--no-such-option",))
    with pytest.raises(ValueError, match=r"does not start here.*unprivileged_userns_clone=1"):
        check_sandbox(SandboxConfig())


def test_the_contract_of_mini_swe_agent_is_kept():
    box = bubblewrap.ContainedBubblewrap(SandboxConfig(), TREE)
    try:
        answer = box.execute({"command": "cat core.py; exit 2"})
        assert answer == {"output": "x = 1\n", "returncode": 2, "exception_info": ""}
        assert box.serialize()["info"]["config"]["environment"]["cwd"] == "/work"
        with pytest.raises(ValueError, match="put `cd` in the command"):
            box.execute({"command": "ls"}, cwd="/")
    finally:
        box.cleanup()
    assert not box.working_dir.exists()


FAKE_DOCKER = """#!/bin/sh
printf '%s\\n' "$*" >> "{log}"
[ -e "{gone}" ] && {{ echo "Cannot connect to the Docker daemon" >&2; exit 1; }}
case "$1" in
  run) echo 0123abcd ;;
  inspect) echo true ;;
  exec) while [ "$1" != 0123abcd ]; do shift; done; shift; exec "$@" ;;
esac
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A `docker` that runs commands right here and keeps a log; `gone` makes its daemon disappear."""
    log, gone = tmp_path / "log", tmp_path / "gone"
    script = tmp_path / "docker"
    script.write_text(FAKE_DOCKER.format(log=log, gone=gone))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return log, gone


def test_a_container_command_is_run_and_a_dead_daemon_is_told_from_a_failing_command(docker):
    from rlpipe.envs.sandbox import make_container_sandbox

    log, gone = docker
    sandbox = make_container_sandbox(SandboxConfig(backend=SandboxBackend.DOCKER), "img")
    try:
        result = sandbox.run("cat; exit 4", stdin=b"hello")
        assert (result.output, result.exit_code, result.exceeded) == ("hello", 4, None)
        slow = sandbox.run("sleep 1000", timeout_s=1)
        assert slow.exceeded is Limit.TIME
        gone.touch()
        with pytest.raises(InfrastructureError, match=r"container is gone.*Cannot connect"):
            sandbox.run("true")
        with pytest.raises(InfrastructureError, match="docker run img"):
            make_container_sandbox(SandboxConfig(backend=SandboxBackend.DOCKER), "img")
    finally:
        sandbox.close()
    started = log.read_text().splitlines()[0]
    assert started.startswith("run -d --name") and "--network=none" in started and "-w /testbed" in started


def test_the_status_of_bwrap_cannot_be_forged_from_inside(runner):
    forged = json.dumps({"exit-code": 0})
    command = f"for fd in $(seq 3 30); do eval \"echo '{forged}' >&$fd\" 2>/dev/null; done; exit 9"
    assert runner.run({}, command)[0].exit_code == 9
