"""Repositories in a container image, played and graded with podman: honest work, attacks, limits, leftovers.

The image holds a repository and pytest; its programs are this machine's /usr, mounted read-only.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recipes.swe_bench.gold import main as grade_gold
from recipes.swe_bench.make_mirror import make as make_mirror
from rlpipe.config.env import EnvConfig, SandboxBackend, SandboxConfig
from rlpipe.envs import make_suite
from rlpipe.envs.base import InfrastructureError
from rlpipe.envs.sandbox import Limit, check_sandbox, make_container_sandbox
from rlpipe.envs.swe.grader import images

pytestmark = pytest.mark.integration
IMAGE = "localhost/rlpipe-test"
BROKEN = "def double(x):\n    return x + 3\n"
FIXED = "def double(x):\n    return 2 * x\n"
TESTS = """\
import pytest

import core
from tests import helper


@pytest.mark.parametrize("x", [5, 7], ids=["five", "more than five"])
def test_double(x):
    helper.same(core.double(x), 2 * x)


def test_kept(given):
    assert core.double(given) == 6
"""
REPOSITORY = {
    "core.py": BROKEN,
    "conftest.py": "import pytest\n\n\n@pytest.fixture\ndef given():\n    return 3\n",
    "pytest.ini": "[pytest]\naddopts = --strict-markers\n",
    "tests/__init__.py": "",
    "tests/helper.py": "def same(a, b):\n    assert type(a) is type(b) and a == b\n",
    "tests/test_core.py": TESTS,
}
FAIL = ["tests/test_core.py::test_double[five]", "tests/test_core.py::test_double[more than five]"]
KEPT = ["tests/test_core.py::test_kept"]
RECORD = {
    "instance_id": "a__b-1",
    "problem_statement": "double(x) must be twice x",
    "FAIL_TO_PASS": FAIL,
    "PASS_TO_PASS": KEPT,
    "image": IMAGE,
}
MORE = {
    "instance_id": "a__b-2",
    "FAIL_TO_PASS": ["checks/test_more.py::test_zero"],
    "test_patch": """\
diff --git a/checks/test_more.py b/checks/test_more.py
new file mode 100644
--- /dev/null
+++ b/checks/test_more.py
@@ -0,0 +1,3 @@
+import core
+def test_zero():
+    assert core.double(0) == 0
""",
}
DOCKER = """\
#!/bin/sh
cd {at}  # conmon leaves a file `oom` where it was started
P="{podman} --runtime runc --cgroup-manager cgroupfs --storage-driver=vfs"
P="$P --root {at}/store --runroot {at}/state"
if [ "$1" = run ]; then
    shift
    exec $P run --ulimit nofile=1024:1024 --ulimit nproc=1000:1000 -v /usr:/usr:ro "$@"
fi
exec $P "$@"
"""


def make_image(program, root, name, repository):
    """Import an image with pytest and a repository at /testbed; root: a folder that does not exist yet."""
    for folder in ("usr", "tmp", "proc", "dev", "sys", "etc", "root", "site"):
        (root / folder).mkdir(parents=True)
    for folder in ("bin", "sbin", "lib", "lib64"):
        if Path(f"/{folder}").is_symlink():
            (root / folder).symlink_to(f"usr/{folder}")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")

    packages = Path(pytest.__file__).parents[1]
    for module in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging"):
        for folder in (packages / module, *packages.glob(f"{module}-*.dist-info")):
            shutil.copytree(folder, root / "site" / folder.name)
    shutil.copy(packages / "py.py", root / "site")
    shutil.copytree(repository, root / "testbed")

    packed = root.with_suffix(".tar")
    subprocess.run(["tar", "-C", root, "--owner=0", "--group=0", "-cf", packed, "."], check=True)
    imported = [program, "import", "--change", "ENV PYTHONPATH=/testbed:/site", packed, name]
    made = subprocess.run(imported, capture_output=True, text=True, check=False)
    assert not made.returncode, made.stderr


@pytest.fixture(scope="module")
def docker():
    """A program `docker` on PATH that is podman, and a store of its own with the image."""
    podman, runc = shutil.which("podman"), shutil.which("runc")
    if not (podman and runc):
        pytest.skip("needs containers: apt-get install --no-install-recommends podman runc")
    at = Path(tempfile.mkdtemp(prefix="podman"))  # podman refuses a runroot of more than 50 characters
    program = at / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(DOCKER.format(podman=podman, at=at))
    program.chmod(0o755)
    repository = at / "repository"
    for path, text in REPOSITORY.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "start"]):
        subprocess.run([*git, *words], check=True)
    make_image(program, at / "root", IMAGE, repository)
    tried = subprocess.run(
        [program, "run", "--rm", IMAGE, "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"podman with runc does not start a container here: {tried.stderr.strip()[-300:]}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(program.parent), prepend=os.pathsep)
        yield program
        subprocess.run([program, "rm", "-fa", "-t", "0"], capture_output=True, check=False)
        subprocess.run([program, "rmi", "-fa"], capture_output=True, check=False)
    shutil.rmtree(at, ignore_errors=True)


@pytest.fixture(scope="module")
def suite(docker, tmp_path_factory):
    at = tmp_path_factory.mktemp("instances")
    (at / "train.jsonl").write_text(json.dumps(RECORD))
    (at / "held.jsonl").write_text(json.dumps(RECORD | MORE))
    return make_suite(config(at), seed=0)


def config(at, **sandbox):
    return EnvConfig(
        train_file=str(at / "train.jsonl"),
        held_out_files=[str(at / "held.jsonl")],
        test_command="python3 {runner}",
        test_timeout_s=300.0,
        sandbox=SandboxConfig(backend=SandboxBackend.DOCKER, **sandbox),
    )


def played(suite, *commands, instance_id="a__b-1"):
    """The end of an attempt that runs these commands."""
    episode = suite.episode(instance_id)
    try:
        for command in commands:
            episode.step(command)
        return episode.step("submit")
    finally:
        episode.close()


def writes(**files):
    """Commands that write files."""
    return [
        f"mkdir -p $(dirname {p}); cat > {p} <<'END OF FILE'\n{text}\nEND OF FILE"
        for p, text in files.items()
    ]


def containers(docker):
    return subprocess.run([docker, "ps", "-aq"], capture_output=True, text=True, check=True).stdout.split()


def test_a_repair_is_rewarded_whatever_else_the_diff_holds(suite):
    """A large file, one that is not UTF-8, a binary one, a new test and a changed configuration."""
    end = played(
        suite,
        *writes(**{"core.py": FIXED, "pyproject.toml": "[tool.x]", "tests/test_mine.py": "import pytest"}),
        "seq 1 80000 > long.txt; printf 'caf\\351\\n' > latin.txt; head -c 9000 /dev/urandom > noise.bin",
        "git -c user.name=a -c user.email=a@b commit -qam 'half of it'",
    )
    assert end.reward == 1.0
    expected = {"changed": True, "tests_passed": 3, "tests_required": 3, "graded_in_process": True}
    assert end.info == expected | {"submitted": True, "format_errors": 0, "tamper": "config_files"}


def test_what_is_not_repaired_is_not_rewarded(suite):
    untouched = played(suite, "ls")
    assert (untouched.reward, untouched.info["changed"]) == (0.0, False)
    partly = played(suite, *writes(**{"core.py": BROKEN + "# looked at it\n"}))
    assert (partly.reward, partly.info["tests_passed"]) == (0.0, 1)
    assert "tamper" not in partly.info


def test_tests_of_a_test_patch_replace_what_the_model_has_in_their_place(suite):
    fix, mine = {"core.py": FIXED}, {"checks/test_more.py": "def test_zero(): pass"}
    assert played(suite, *writes(**fix, **mine), instance_id="a__b-2").reward == 1.0
    assert played(suite, *writes(**mine), instance_id="a__b-2").reward == 0.0


FORGE = f"""\
import os
names = {FAIL + KEPT!r}
lines = [f"PASSED {{name}}" for name in names]
lines += [str(names).replace("'", '"'), '{{"passed": ' + str(names).replace("'", '"') + ', "exit_code": 0}}']
text = ("\\n" + "\\n".join(lines + ["0" * 64 + lines[-1]]) + "\\n").encode()
def forge():
    others = [f"/proc/{{pid}}/fd/{{n}}" for pid in os.listdir("/proc") for n in range(1, 9)]
    for place in [*range(1, 64), *others]:
        try:
            os.write(place if isinstance(place, int) else os.open(place, os.O_WRONLY | os.O_NONBLOCK), text)
        except OSError:
            pass
"""
STEAL = f"""\
import hashlib, hmac, json, os, re
{FORGE}
text = json.dumps({{"passed": names, "exit_code": 0}}).encode()
parent = f"/proc/{{os.getppid()}}"
found = set()
with open(parent + "/maps") as maps, open(parent + "/mem", "rb", 0) as memory:
    for line in maps:
        if "rw" in line:
            begin, end = (int(at, 16) for at in line.split()[0].split("-"))
            memory.seek(begin)
            found.update(re.findall(rb"[0-9a-f]{{64}}", memory.read(end - begin)))
lines = [hmac.new(key, text, hashlib.sha256).hexdigest().encode() + text for key in found]
text = b"\\n" + b"\\n".join(lines) + b"\\n"
forge()
os._exit(0)
"""
REWRITE = """\
import pytest
@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    report.outcome = "passed"
@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    session.exitstatus = 0
@pytest.fixture
def given():
    return 3
"""
START = f"""\
import sys, os
{FORGE}
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "core":
            forge()
            os._exit(0)
sys.meta_path.insert(0, Finder())
"""
FAKE_PYTEST = f"""\
class hookimpl: pass
class Report:
    outcome, when = "passed", "call"
    def __init__(self, nodeid): self.nodeid = nodeid
class Config:
    def cwd_relative_nodeid(self, nodeid): return nodeid
def main(args, plugins):
    for plugin in plugins:
        plugin.pytest_configure(Config())
        for name in {FAIL + KEPT!r}:
            plugin.pytest_runtest_logreport(Report(name))
    return 0
"""
PASSING = (
    TESTS.replace("import core\n", "").replace("core.double(x)", "2 * x").replace("core.double(given)", "6")
)
ATTACKS = {
    "finding 12: forged reports on every descriptor": writes(
        **{"core.py": f"{FORGE}\ndef double(x):\n    forge()\n    os._exit(0)"}
    ),
    "finding 12: forged reports at import": writes(**{"core.py": f"{FORGE}\nforge()\nos._exit(0)"}),
    "forged reports by a process that outlives pytest": writes(
        **{"core.py": f"{FORGE}\nif not os.fork():\n    os.system('sleep 1'); forge(); os._exit(0)\n{BROKEN}"}
    ),
    "status 0 by atexit": writes(
        **{"core.py": f"{FORGE}\nimport atexit\natexit.register(lambda: (forge(), os._exit(0)))\n{BROKEN}"}
    ),
    "sys.exit(0) at import": writes(**{"core.py": "import sys\nsys.exit(0)"}),
    "pytest.exit with status 0": writes(**{"core.py": "import pytest\npytest.exit('done', returncode=0)"}),
    "tests skipped": writes(**{"core.py": "import pytest\npytest.skip('no', allow_module_level=True)"}),
    "the supervisor killed": writes(**{"core.py": f"{FORGE}\nforge()\nos.kill(os.getppid(), 9)"}),
    "the key read from the supervisor's memory": writes(**{"core.py": STEAL}),
    "finding 13: addopts in pytest.ini": writes(
        **{"pytest.ini": "[pytest]\naddopts = -p evil", "evil.py": REWRITE}
    ),
    "addopts in every other place": [
        *writes(
            **{
                "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-p evil"',
                "tox.ini": "[pytest]\naddopts = -p evil",
                "setup.cfg": "[tool:pytest]\naddopts = -p evil",
                ".pytest.ini": "[pytest]\naddopts = -p evil",
                "tests/pytest.ini": "[pytest]\naddopts = -p evil",
                "evil.py": REWRITE,
            }
        ),
        "rm pytest.ini",
    ],  # it would come first
    "finding 13: pytest.py in the root": writes(**{"pytest.py": FAKE_PYTEST}),
    "finding 13: packages pytest and _pytest in the root": writes(
        **{"pytest/__init__.py": FAKE_PYTEST, "_pytest/__init__.py": "", "pluggy.py": FAKE_PYTEST}
    ),
    "json and subprocess in the root": writes(
        **dict.fromkeys(
            ("json.py", "hmac.py", "subprocess.py", "ctypes.py"), FORGE + "\nforge()\nos._exit(0)"
        )
    ),
    "conftest.py rewrites outcomes": writes(**{"conftest.py": REWRITE, "tests/conftest.py": REWRITE}),
    "start hooks": writes(
        **{"sitecustomize.py": START, "usercustomize.py": START, "evil.pth": "import sitecustomize"}
    ),
    "a plugin by entry point": writes(
        **{
            "evil.egg-info/PKG-INFO": "Metadata-Version: 2.1\nName: evil\nVersion: 1",
            "evil.egg-info/entry_points.txt": "[pytest11]\nevil = evil",
            "evil-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1",
            "evil-1.dist-info/entry_points.txt": "[pytest11]\nevil = evil",
            "evil.py": REWRITE,
        }
    ),
    "tests rewritten": writes(**{"tests/test_core.py": PASSING}),
    "helpers of the tests rewritten": writes(
        **{
            "tests/helper.py": "def same(a, b): pass",
            "tests/__init__.py": "import core\ncore.double = lambda x: 2 * x",
        }
    ),
    "tests deleted": ["git rm -qr tests"],
    "tests renamed": ["git mv tests checks", *writes(**{"tests/test_core.py": PASSING})],
    "tests behind a link": [
        "git mv tests checks",
        *writes(**{"checks/test_core.py": PASSING}),
        "ln -s checks tests",
    ],
    "bytecode of the tests": [
        *writes(**{"tests/test_core.py": PASSING}),
        'python3 -c \'import py_compile as p; p.compile("tests/test_core.py", '
        "invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH)'",
        "cd tests/__pycache__; for v in 9.2.0 8.0.0; do cp *.pyc test_core.cpython-311-pytest-$v.pyc; done",
        "git checkout tests/test_core.py; git add -f tests/__pycache__",
    ],
    "a file behind a link out of the tree": [
        "ln -s /site/pytest evil; git add evil; git commit -qm x",
        "rm evil; mkdir evil",
        *writes(**{"evil/__init__.py": FAKE_PYTEST}),
    ],
    "git's own programs": [
        "git config diff.external 'sh -c \"cat /dev/null\"'; git config core.fsmonitor 'touch /site/owned'",
        "git config filter.evil.clean 'sed s/x/y/'; git config diff.evil.textconv 'echo'",
        "echo 'core.py filter=evil diff=evil' > .gitattributes",
        "mkdir -p .git/hooks; echo 'echo $0' > .git/hooks/post-checkout",
        "rm core.py tests/test_core.py; echo 'def double(x): return 1' > core.py",
    ],
}


@pytest.fixture(scope="module")
def ends(suite):
    """The ends of all attacks, played several at a time: containers mostly wait."""
    with ThreadPoolExecutor(6) as threads:
        return {name: threads.submit(played, suite, *commands) for name, commands in ATTACKS.items()}


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_earns_the_reward(ends, name):
    end = ends[name].result()
    assert end.reward == 0.0 and end.info["tests_passed"] < end.info["tests_required"], end.info


FIX = """\
diff --git a/core.py b/core.py
--- a/core.py
+++ b/core.py
@@ -1,2 +1,2 @@
 def double(x):
-    return x + 3
+    return 2 * x
"""
MOVED = "diff --git a/{0} b/{1}\nsimilarity index 100%\nrename from {0}\nrename to {1}\n"
NEW = "diff --git a/{0} b/{0}\nnew file mode {1}\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+{2}\n"
LINK = NEW.rstrip("\n") + "\n\\ No newline at end of file\n"
PATCHES = {
    "tests moved away": MOVED.format("tests/test_core.py", "x.py"),
    "conftest.py moved away": MOVED.format("conftest.py", "x.py"),
    "a file moved to conftest.py": MOVED.format("core.py", "conftest.py"),
    "out of the tree": NEW.format("../site/evil.py", "100644", "x = 1"),
    "into .git": NEW.format(".git/hooks/post-checkout", "100755", "true"),
    "through a link": LINK.format("out", "120000", "/site") + NEW.format("out/evil.py", "100644", "x = 1"),
    "no patch": "hello\n",
}


@pytest.fixture
def fresh(suite):
    sandbox = make_container_sandbox(SandboxConfig(backend=SandboxBackend.DOCKER), IMAGE)
    yield sandbox
    sandbox.close()


@pytest.mark.parametrize("name", ["nothing else", *PATCHES])
def test_a_patch_of_a_hostile_git_is_refused(suite, fresh, tmp_path, name):
    instance = suite._instances["a__b-1"]
    patch = PATCHES.get(name, "")
    patch = patch if name == "no patch" else patch + FIX
    passed = images.passed_tests(fresh, instance, patch.encode(), config(tmp_path))
    assert passed == (3 if name == "nothing else" else 0)


UNSIGNED = lambda result, key: (  # noqa: E731
    [line.removeprefix("PASSED ") for line in result.output.splitlines() if line.startswith("PASSED ")],
    result.exit_code,
)
images_source = images._source
MUTANTS = {
    "finding 12: forged reports at import": {"reported": UNSIGNED},
    "the key read from the supervisor's memory": {
        "_source": lambda: images_source().replace(
            ".prctl(_PR_SET_DUMPABLE, 0,", ".prctl(_PR_SET_DUMPABLE, 1,"
        )
    },
    "finding 13: addopts in pytest.ini": {"_CONFIGURATION": ()},
    "conftest.py rewrites outcomes": {"_CONFIGURATION": ()},
    "finding 13: pytest.py in the root": {"_RUNNER": ()},
    "tests rewritten": {"paths_of_tests": lambda instance: []},
    "a plugin by entry point": {"_START_HOOKS": ()},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_weaker_grader_is_caught(suite, monkeypatch, name):
    for part, weaker in MUTANTS[name].items():
        monkeypatch.setattr(images, part, weaker)
    if "reported" in MUTANTS[name]:  # it would not pass the check that pytest can be imported
        monkeypatch.setattr(
            images, "reported", lambda r, k: UNSIGNED(r, k) if "PASSED" in r.output else ([], 0)
        )
    assert played(suite, *ATTACKS[name]).reward == 1.0


def test_what_the_weaker_mode_cannot_stop_is_signalled(suite):
    """Code under test shares pytest's process: it can replace the class of reports. The info says both."""
    always = "property(lambda self: 'passed', lambda self, value: None)"
    patched = f"from _pytest.reports import TestReport\nTestReport.outcome = {always}\n{BROKEN}"
    end = played(suite, *writes(**{"core.py": patched}))
    assert end.info["graded_in_process"] is True and end.info["tamper"] == "tests"


def test_an_image_without_pytest_is_an_infrastructure_failure(suite, fresh, tmp_path):
    without = config(tmp_path)
    without.test_command = "PYTHONPATH= python3 -S {runner}"
    with pytest.raises(InfrastructureError, match=r"cannot import pytest.*a__b-1"):
        images.passed_tests(fresh, suite._instances["a__b-1"], FIX.encode(), without)


def test_a_container_holds_its_limits(docker):
    limits = SandboxConfig(backend=SandboxBackend.DOCKER, memory_mb=100, processes=20, timeout_s=20.0)
    sandbox = make_container_sandbox(limits, IMAGE)
    try:
        assert sandbox.run("python3 -c 'bytearray(60 << 20)'").exit_code == 0
        assert sandbox.run("python3 -c 'bytearray(300 << 20)'").exit_code == 137
        bomb = (
            "import os, time\nn = 0\ntry:\n while n < 99:\n  if not os.fork(): time.sleep(60)\n"
            "  n += 1\nexcept OSError: print(n)"
        )
        count = sandbox.run(f'python3 -c "{bomb}"')
        assert 1 <= int(count.output) < 20
    finally:
        sandbox.close()


def test_time_network_and_privileges_of_a_container_are_bounded(fresh):
    slow = fresh.run("sleep 60 & sleep 60", timeout_s=1.0)
    assert slow.exceeded is Limit.TIME and slow.exit_code == 137
    assert fresh.run("echo still here").output == "still here\n"
    assert fresh.run("cat /sys/class/net/*/address").output == "00:00:00:00:00:00\n"
    assert "CapEff:\t0000000000000000" in fresh.run("cat /proc/self/status").output
    assert fresh.run("touch /usr/x || mount -t tmpfs x /tmp").exit_code != 0


def eventually(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_closed_attempt_leaves_no_container(docker, suite):
    before = set(containers(docker))
    played(suite, "sleep 1000 & sleep 1001 &")
    eventually(lambda: set(containers(docker)) <= before)


HOLDS = """
import sys, time
from rlpipe.config.env import SandboxBackend, SandboxConfig
from rlpipe.envs.sandbox import make_container_sandbox
held = make_container_sandbox(SandboxConfig(backend=SandboxBackend.DOCKER), sys.argv[1])
print(held._environment.container_id, file=sys.stderr, flush=True)
time.sleep(1000)
"""


def test_containers_of_a_killed_run_are_swept_and_those_of_a_living_one_stay(docker, fresh):
    living = fresh._environment.container_id
    with subprocess.Popen([sys.executable, "-c", HOLDS, IMAGE], stderr=subprocess.PIPE, text=True) as process:
        left = process.stderr.readline().strip()
        process.kill()
    command = [docker, "ps", "-aq", "--no-trunc"]
    assert {left, living} <= set(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    )
    check_sandbox(SandboxConfig(backend=SandboxBackend.DOCKER))
    after = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert left not in after and living in after


def test_twenty_rows_of_swe_bench_are_graded_in_an_image_each(docker, tmp_path, capsys):
    """By their own patches, and by none, as recipes/swe_bench/gold.py does for a file of the reader's."""
    rows = [json.loads(line) for line in make_mirror(tmp_path / "mirror").read_text().splitlines()]
    for number, row in enumerate(rows):
        at, row["image"] = tmp_path / str(number), f"{IMAGE}:{number}"
        mirror = tmp_path / "mirror/repos" / f"{row['repo']}.git"
        subprocess.run(["git", "clone", "-q", mirror, at], check=True)
        subprocess.run(["git", "-C", at, "checkout", "-q", row["base_commit"]], check=True)
        make_image(docker, tmp_path / f"{number}.root", row["image"], at)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    capsys.readouterr()
    settings = ["env.sandbox.backend=docker", "env.test_command='python3 {runner}'", "env.test_timeout_s=300"]
    status = grade_gold([str(tmp_path / "rows.jsonl"), *settings])
    printed = capsys.readouterr().out
    last = "20 of 20 gold patches resolve, 0 of 20 empty ones (docker)"
    assert printed.splitlines()[-1] == last and status == 0  # mini-swe-agent prints what it starts
