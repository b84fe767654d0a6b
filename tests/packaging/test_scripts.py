"""The set-up scripts: what they call, that a second run installs nothing, what they say is missing.

A stand-in for the virtual environment's Python records its arguments, so nothing is installed here;
`bash .ci/run` and the quickstart itself exercise the real thing.
"""

import json
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.helpers.cli import ROOT

pytestmark = pytest.mark.packaging
BASICS = {"sh", "cat", "cksum", "cp", "date", "dirname", "env", "find", "grep", "id", "mktemp"}
TOOLS = sorted(BASICS | {"rm", "sleep", "tail"})


@pytest.fixture
def tools(tmp_path):
    """A PATH with the shell tools the scripts use and a bwrap, but no Python and no package manager."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in [*TOOLS, "bwrap"]:
        (folder / name).symlink_to(shutil.which(name) or pytest.fail(f"{name} is missing on this machine"))
    return folder


@pytest.fixture
def venv(tmp_path):
    """A virtual environment whose Python only writes down what it was asked to do."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    python.chmod(0o755)
    return folder


def script(name, *arguments, cwd, **environment):
    return subprocess.run(
        [str(ROOT / "scripts" / name), *arguments],
        cwd=cwd,
        env={"HOME": str(cwd), "TMPDIR": str(cwd), **{k: str(v) for k, v in environment.items()}},
        capture_output=True,
        text=True,
        timeout=60,
    )


def calls(tmp_path):
    lines = (tmp_path / "calls").read_text().splitlines()
    (tmp_path / "calls").unlink()
    return lines


def test_quickstart_installs_checks_and_runs_the_main_job(tmp_path, tools, venv):
    done = script("quickstart", "run.steps=3", cwd=tmp_path, PATH=tools, RLPIPE_VENV=venv)
    assert done.returncode == 0, done.stderr
    torch, everything, doctor, job = calls(tmp_path)
    assert torch.startswith("-m pip install") and torch.endswith(f"-c {ROOT}/constraints.txt torch")
    assert everything.endswith(f"-c {ROOT}/constraints.txt -e {ROOT}")
    assert doctor == f"{ROOT}/scripts/doctor"
    assert job.startswith(f"-m rlpipe.run +recipe=swe_rl run.steps=3 run.dir={ROOT}/runs/swe_rl/")
    assert f"{ROOT}/runs/swe_rl/" in done.stdout and "report.html" in done.stdout


def test_a_machine_with_gpus_gets_the_pins_whose_nccl_is_the_servers(tmp_path, tools, venv):
    """Found by nvidia-smi; RLPIPE_PINS says it for an image that is built without one."""
    gpu = tools / "nvidia-smi"
    gpu.write_text("#!/bin/sh\n")
    gpu.chmod(0o755)
    assert script("quickstart", cwd=tmp_path, PATH=tools, RLPIPE_VENV=venv).returncode == 0
    torch, everything, *_ = calls(tmp_path)
    assert torch.endswith(f"-c {ROOT}/constraints_gpu.txt torch")
    assert everything.endswith(f"-c {ROOT}/constraints_gpu.txt -e {ROOT}[gpu]")

    cpu = {"PATH": tools, "RLPIPE_VENV": venv, "RLPIPE_PINS": "cpu"}
    assert script("quickstart", "--real", cwd=tmp_path, **cpu).returncode == 0
    assert calls(tmp_path)[1].endswith(f"-c {ROOT}/constraints.txt -e {ROOT}[fetch]")
    assert script("quickstart", "--real", cwd=tmp_path, **(cpu | {"RLPIPE_PINS": "gpu"})).returncode == 0
    assert calls(tmp_path)[1].endswith(f"-c {ROOT}/constraints_gpu.txt -e {ROOT}[fetch,gpu]")


def test_a_second_quickstart_installs_nothing(tmp_path, tools, venv):
    assert script("quickstart", cwd=tmp_path, PATH=tools, RLPIPE_VENV=venv).returncode == 0
    calls(tmp_path)
    assert script("quickstart", cwd=tmp_path, PATH=tools, RLPIPE_VENV=venv).returncode == 0
    assert not [call for call in calls(tmp_path) if "pip install" in call]


def test_quickstart_runs_the_recipe_and_the_folder_it_is_given(tmp_path, tools, venv):
    given = ["+recipe=reasoning_rl", "run.dir=here"]
    assert script("quickstart", *given, cwd=tmp_path, PATH=tools, RLPIPE_VENV=venv).returncode == 0
    assert calls(tmp_path)[-1] == "-m rlpipe.run +recipe=reasoning_rl run.dir=here"


def test_quickstart_of_a_real_model_fetches_it_and_runs_its_recipe(tmp_path, tools, venv):
    given = ["--real", "run.steps=2", "run.dir=here"]
    assert script("quickstart", *given, cwd=tmp_path, PATH=tools, RLPIPE_VENV=venv).returncode == 0
    _, everything, doctor, fetched, job = calls(tmp_path)
    assert everything.endswith(f"-e {ROOT}[fetch]") and doctor.endswith("doctor")
    assert fetched == "-m rlpipe fetch smollm2"
    assert job == "-m rlpipe.run +recipe=smollm_rl run.steps=2 run.dir=here"


def test_quickstart_stops_where_an_installation_fails(tmp_path, tools, venv):
    (venv / "bin" / "python").write_text("#!/bin/sh\necho no such package\nexit 1\n")
    done = script("quickstart", cwd=tmp_path, PATH=tools, RLPIPE_VENV=venv, RLPIPE_SETUP_PAUSE=0)
    assert done.returncode == 1
    assert "no such package" in done.stderr
    assert "starting" not in done.stdout


def test_an_installation_that_fails_once_is_tried_again(tmp_path, tools, venv):
    python = venv / "bin" / "python"
    log = tmp_path / "calls"
    python.write_text(f'#!/bin/sh\n[ -e {log} ]; answer=$?\necho "$@" >> {log}\nexit $answer\n')
    done = script("quickstart", cwd=tmp_path, PATH=tools, RLPIPE_VENV=venv, RLPIPE_SETUP_PAUSE=0)
    assert done.returncode == 0, done.stderr
    first, second, *_ = calls(tmp_path)
    assert first == second and first.endswith("constraints.txt torch")
    assert "try 1 of 3" in done.stdout


@pytest.mark.parametrize("name", ["quickstart", "test"])
def test_without_python_the_scripts_say_which_one_they_need(tmp_path, tools, name):
    environment = {"RLPIPE_VENV": tmp_path / "new"} if name == "quickstart" else {}
    done = script(name, cwd=tmp_path, PATH=tools, **environment)
    assert done.returncode == 1
    assert "3.11 or 3.12" in done.stderr and "RLPIPE_PYTHON" in done.stderr


@pytest.mark.parametrize("name", ["quickstart", "test"])
def test_without_bubblewrap_and_a_way_to_install_it_the_scripts_name_the_package(tmp_path, tools, name):
    (tools / "bwrap").unlink()
    done = script(name, cwd=tmp_path, PATH=tools)
    assert done.returncode == 1
    assert "bubblewrap" in done.stderr


def test_install_sglang_brings_torch_first_then_exactly_the_pins(tmp_path, tools, venv):
    """Dependencies are never resolved: what SGLang declares would bring a CUDA build of torch."""
    done = script("install_sglang", "cpu", venv, cwd=tmp_path, PATH=tools)
    assert done.returncode == 0, done.stderr
    torch, pinned, support = calls(tmp_path)
    assert torch.endswith("torch==2.13.0")
    assert "--no-deps" in pinned and pinned.endswith(f"-r {ROOT}/sglang_env/requirements_cpu.txt")
    assert "--no-deps" in support and not support.endswith(str(ROOT / "sglang_env" / "cpu_support"))
    assert f"rollout.sglang.python={venv}/bin/python" in done.stdout
    assert script("install_sglang", "cpu", venv, cwd=tmp_path, PATH=tools).returncode == 0
    assert not (tmp_path / "calls").exists()  # a second run installs nothing


def test_install_sglang_for_a_gpu_leaves_the_cpu_support_out(tmp_path, tools, venv):
    assert script("install_sglang", "gpu", venv, cwd=tmp_path, PATH=tools).returncode == 0
    (only,) = calls(tmp_path)
    assert only.endswith(f"-r {ROOT}/sglang_env/requirements_gpu.txt") and "cpu" not in only


def test_install_sglang_refuses_another_kind(tmp_path, tools):
    done = script("install_sglang", "tpu", cwd=tmp_path, PATH=tools)
    assert done.returncode == 1 and "what is 'tpu'?" in done.stderr


def test_sglang_pins_are_those_the_engine_knows():
    from rlpipe.rollout.sglang.environment import CPU_SUPPORT_VERSION, SGLANG_VERSION

    for kind in ("cpu", "gpu"):
        assert f"sglang=={SGLANG_VERSION}\n" in (ROOT / f"sglang_env/requirements_{kind}.txt").read_text()
    project = tomllib.loads((ROOT / "sglang_env/cpu_support/pyproject.toml").read_text())["project"]
    assert project["version"] == CPU_SUPPORT_VERSION


def doctor(*options, path, settings=()):
    done = subprocess.run(
        [sys.executable, *options, str(ROOT / "scripts" / "doctor"), "--json", *settings],
        env={"PATH": str(path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, {finding["name"]: finding for finding in json.loads(done.stdout)}


def test_doctor_is_content_with_the_environment_of_the_tests(tmp_path):
    path, settings = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", ("+recipe=swe_rl", "cluster=inline")
    status, findings = doctor(path=path, settings=settings)
    missing = [finding for finding in findings.values() if finding["level"] == "missing"]
    assert status == 0 and not missing, missing
    assert findings["verl"]["level"] == "ok"
    assert "embedded engine: " in findings["memory"]["found"]
    assert findings["sandbox start"]["level"] == "ok"


def test_doctor_with_a_run_names_the_remedy_before_anything_is_installed():
    command = [sys.executable, "-I", "-S", str(ROOT / "scripts" / "doctor"), "+recipe=swe_rl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr == ""
    assert "launch" in done.stdout and "not checked: No module named" in done.stdout


def test_doctor_names_the_remedy_for_what_is_missing(tmp_path):
    status, findings = doctor("-S", path=tmp_path)  # -S: no site-packages
    assert status == 1
    assert findings["packages"]["level"] == "missing"
    assert "scripts/quickstart" in findings["packages"]["remedy"]
    assert findings["bwrap"]["level"] == "missing"
    assert findings["bwrap"]["remedy"] == "apt-get install bubblewrap"


def test_files_whose_seconds_order_the_tests_exist():
    files = json.loads((ROOT / "tests" / "seconds.json").read_text())
    assert [file for file in files if not (ROOT / file).is_file()] == []
