"""Container sandboxes: the arguments that make them safe. No daemon runs here."""

import subprocess
from types import SimpleNamespace

import pytest

from rlpipe.config.env import EnvConfig, SandboxBackend, SandboxConfig
from rlpipe.envs.base import InfrastructureError
from rlpipe.envs.sandbox import container
from rlpipe.envs.sandbox.base import CommandResult
from rlpipe.envs.swe import workspace
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
    """Answers commands by their beginning and remembers them with their input."""

    def __init__(self, answers):
        self.answers, self.seen, self.closed = answers, [], False

    def run(self, command, *, timeout_s=None, stdin=b""):
        self.seen.append((command, stdin.decode()))
        for start, (output, code) in self.answers.items():
            if command.startswith(start):
                return CommandResult(output=output, exit_code=code)
        raise AssertionError(command)

    def close(self):
        self.closed = True


INSTANCE = Instance(
    instance_id="a__b-1",
    problem_statement="s",
    fail_to_pass=("t/test_a.py::test_x",),
    pass_to_pass=("t/test_a.py::test_y",),
    test_patch="--- a/t/test_a.py\n+++ b/t/test_a.py\n@@ -1 +1 @@\n-a\n+b\n",
)


BOTH = "PASSED t/test_a.py::test_x\nPASSED t/test_a.py::test_y"


def graded(monkeypatch, diff="the diff", passed=BOTH, code=0):
    played = ScriptedContainer({"git rev-parse": ("abc\n", 0), "git add": (diff, 0)})
    fresh = ScriptedContainer({"git apply": ("", 0), "pytest": (passed, code)})
    boxes, images = [played, fresh], []

    def make(config, image):
        images.append(image)
        return boxes[len(images) - 1]

    monkeypatch.setattr(workspace, "make_container_sandbox", make)
    config = EnvConfig(test_command="pytest {tests}", sandbox=SandboxConfig(backend=SandboxBackend.DOCKER))
    grade = workspace.ImageWorkspace(INSTANCE, config).grade()
    return grade, played, fresh, images


def test_an_image_is_graded_in_a_fresh_container_with_the_instances_tests(monkeypatch):
    grade, played, fresh, images = graded(monkeypatch)
    assert grade.solved and grade.required == 2
    assert images == ["swebench/sweb.eval.x86_64.a_1776_b-1:latest"] * 2
    assert "--cached --binary abc" in played.seen[-1][0], "against the commit it started from"
    (apply, patch), (apply_tests, tests), (run, _) = fresh.seen
    assert patch == "the diff" and "--exclude=t/test_a.py" in apply and "--exclude=conftest.py" in apply
    assert apply_tests == "git apply -" and tests == INSTANCE.test_patch
    assert run == "pytest t/test_a.py::test_x t/test_a.py::test_y"
    assert fresh.closed


@pytest.mark.parametrize(
    ("changes", "solved", "passed"),
    [
        ({"passed": "PASSED t/test_a.py::test_x\nFAILED t/test_a.py::test_y"}, False, 1),
        ({"passed": "2 passed\nOK"}, False, 0),
        ({"diff": ""}, False, 0),
        ({"passed": BOTH + "\n1 failed", "code": 1}, False, 1),  # finding 12: printed by the code
    ],
)
def test_every_required_id_must_be_reported_and_something_must_have_changed(
    monkeypatch, changes, solved, passed
):
    grade, *_ = graded(monkeypatch, **changes)
    assert (grade.solved, grade.passed) == (solved, passed)
