"""Container sandboxes: the arguments that make them safe, and what a report from one must be. No daemon."""

import base64
import hashlib
import hmac
import json
import shlex
import subprocess
from types import SimpleNamespace

import pytest

from rlpipe.config.env import EnvConfig, SandboxBackend, SandboxConfig
from rlpipe.envs.base import InfrastructureError
from rlpipe.envs.sandbox import container
from rlpipe.envs.sandbox.base import CommandResult, Limit
from rlpipe.envs.swe import workspace
from rlpipe.envs.swe.grader.images import reported
from rlpipe.envs.swe.instances import Instance

pytestmark = pytest.mark.unit
LIMITS = SandboxConfig(memory_mb=1000, processes=99, file_mb=2, cpu_s=7)


def made(monkeypatch, name, **state):
    """Replace a mini-swe-agent environment by one that only remembers how it was made."""

    def build(**settings):
        defaults = {"executable": name.removesuffix("Environment").lower(), "global_args": ["--quiet"]}
        return SimpleNamespace(config=SimpleNamespace(**(defaults | settings)), **state)

    monkeypatch.setattr(container, name, build)


def test_docker_starts_without_network_or_capabilities_and_within_limits(monkeypatch):
    made(monkeypatch, "DockerEnvironment", container_id="abc")
    sandbox = container.DockerSandbox(LIMITS, "image:1")
    args = sandbox._environment.config.run_args
    for needed in (
        *("--rm", "--network=none", "--cap-drop=ALL", "--security-opt=no-new-privileges"),
        *("--memory=1000m", "--memory-swap=1000m", "--pids-limit=99"),
        *("--ulimit=fsize=2097152", "--ulimit=cpu=7"),
    ):
        assert needed in args
    assert sandbox._environment.config.image == "image:1"
    line = sandbox.exec_line("ls", timeout_s=2.5)
    assert line[:5] == ["docker", "exec", "-i", "-w", "/testbed"]
    assert line[line.index("abc") :] == ["abc", "timeout", "-s", "KILL", "3", "bash", "-c", "ls"]
    assert not any(word.startswith(("--privileged", "--volume", "-v")) for word in [*args, *line])


def test_singularity_runs_contained_without_network_or_the_hosts_environment(monkeypatch):
    made(monkeypatch, "SingularityEnvironment", sandbox_dir="/box")
    sandbox = container.SingularitySandbox(LIMITS, "docker://image:1")
    line = sandbox.exec_line("ls", timeout_s=5)
    for needed in ("--contain", "--cleanenv", "--no-home", "--pid", "--network=none", "--pids-limit=99"):
        assert needed in line
    assert line[:3] == ["singularity", "--quiet", "exec"]
    assert line[line.index("/box") :] == ["/box", "timeout", "-s", "KILL", "5", "bash", "-c", "ls"]


def test_an_image_that_cannot_be_started_is_an_infrastructure_failure(monkeypatch):
    def fail(**settings):
        raise subprocess.CalledProcessError(125, ["docker"], stderr="no such image")

    monkeypatch.setattr(container, "DockerEnvironment", fail)
    monkeypatch.setattr(container, "SingularityEnvironment", fail)
    with pytest.raises(InfrastructureError, match="docker run x: no such image"):
        container.DockerSandbox(LIMITS, "x")
    with pytest.raises(InfrastructureError, match="singularity build x: no such image"):
        container.SingularitySandbox(LIMITS, "x")


class ScriptedContainer:
    """Answers commands by their beginning; the grader's program answers with a report signed by `key`."""

    def __init__(self, answers, reports=(), key=None):
        self.answers, self.reports, self.key = answers, list(reports), key
        self.seen, self.closed = [], False

    def run(self, command, *, timeout_s=None, stdin=b"", output_kb=0):
        self.seen.append((command, stdin.decode("latin-1"), output_kb))
        for start, (output, code) in self.answers.items():
            if command.startswith(start):
                return CommandResult(output=output, exit_code=code)
        order = json.loads(stdin)
        text = self.reports.pop(0)
        return CommandResult(output=f"noise\n{signed(text, self.key or order['key'])}\nnoise", exit_code=0)

    def close(self):
        self.closed = True


def signed(text, key):
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest() + text


INSTANCE = Instance(
    instance_id="a__b-1",
    problem_statement="s",
    fail_to_pass=("t/test_a.py::test_x",),
    pass_to_pass=("t/test_a.py::test_y",),
    test_patch="--- a/t/test_a.py\n+++ b/t/test_a.py\n@@ -1 +1 @@\n-a\n+b\n",
)


IDS = list(INSTANCE.tests)
LATIN = b"+caf\xe9\n"


def report(passed, exit_code=0):
    return json.dumps({"passed": passed, "exit_code": exit_code})


STARTS, ALL = report([]), report(IDS)


def graded(monkeypatch, diff=LATIN, result=ALL, probe=STARTS, key=None, code=0):
    encoded = base64.b64encode(diff).decode()
    played = ScriptedContainer({"git rev-parse": ("abc\n", 0), "set -o pipefail": (encoded, code)})
    fresh = ScriptedContainer({"git apply": ("", 0)}, [probe, result], key)
    boxes, images_made = [played, fresh], []

    def make(config, image):
        images_made.append(image)
        return boxes[len(images_made) - 1]

    monkeypatch.setattr(workspace, "make_container_sandbox", make)
    config = EnvConfig(sandbox=SandboxConfig(backend=SandboxBackend.DOCKER))
    return workspace.ImageWorkspace(INSTANCE, config).grade(), played, fresh, images_made


def test_an_image_is_graded_in_a_fresh_container_with_the_instances_tests(monkeypatch):
    grade, played, fresh, made_of = graded(monkeypatch)
    assert grade.solved and grade.required == 2 and grade.in_process
    assert made_of == ["swebench/sweb.eval.x86_64.a_1776_b-1:latest"] * 2
    command, _, output_kb = played.seen[-1]
    assert "--binary --no-renames" in command and " abc;" in command, "against the commit it started from"
    assert output_kb == SandboxConfig().tree_mb << 10, "a large diff is no unchanged repository"
    (probe, _, _), (apply, patch, _), (apply_tests, tests, _), (run, order, report_kb) = fresh.seen
    assert patch == LATIN.decode("latin-1"), "whatever its encoding"
    excluded = {"t/test_a.py", "conftest.py", "*/conftest.py", "pytest.ini", "*/pyproject.toml"}
    assert excluded <= {word.removeprefix("--exclude=") for word in shlex.split(apply)}
    assert apply_tests == "git apply -" and tests == INSTANCE.test_patch
    assert run == probe and run.startswith("python -I -S -c ")
    order = json.loads(order)
    assert order["tests"] == IDS and order["key"] not in run
    assert report_kb == SandboxConfig().tree_mb << 10, "thousands of names are a long report"
    assert fresh.closed


@pytest.mark.parametrize(
    ("changes", "changed", "passed"),
    [
        ({"result": report(IDS[:1])}, True, 1),
        ({"result": report([])}, True, 0),
        ({"result": report(["t/test_a.py"])}, True, 0),
        ({"result": report(IDS, exit_code=1)}, True, 1),  # outcomes and exit code must agree
        ({"result": report(IDS, exit_code=-9)}, True, 1),
        ({"result": report(None)}, True, 0),
        ({"result": report([1, 2])}, True, 0),
        ({"result": "{}"}, True, 0),
        ({"diff": b"rename from conftest.py\n"}, True, 0),
        ({"diff": b""}, False, 0),
        ({"code": 1}, False, 0),
    ],
)
def test_every_required_id_must_be_reported_and_something_must_have_changed(
    monkeypatch, changes, changed, passed
):
    grade, *_ = graded(monkeypatch, **changes)
    assert (grade.solved, grade.changed, grade.passed) == (False, changed, passed)


def test_a_report_counts_only_with_the_signature_and_of_a_run_within_its_limits():
    good = signed(report(IDS), "key")
    assert reported(CommandResult(output=good, exit_code=0), "key") == (IDS, 0)
    for output in (
        report(IDS),
        signed(report(IDS), "other"),
        "0" * 64 + report(IDS),
        good[:-1],
        "é" * 64,
        "",
    ):
        assert reported(CommandResult(output=output, exit_code=0), "key") == ([], 1)
    assert reported(CommandResult(output=good, exit_code=137, exceeded=Limit.TIME), "key") == ([], 1)


def test_an_image_whose_command_starts_no_pytest_is_an_infrastructure_failure(monkeypatch):
    with pytest.raises(InfrastructureError, match=r"test_command.*cannot import pytest.*a__b-1"):
        graded(monkeypatch, probe=report(None, 1))
