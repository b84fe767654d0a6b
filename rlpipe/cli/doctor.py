"""Print what this machine lacks for rlpipe, and the exact command or change for each item.

    rlpipe doctor [--json] [--config-dir DIR] [+recipe=NAME SETTING=VALUE ...]

In a checkout, `scripts/doctor` runs this module with any Python 3.11 or 3.12, even before anything is
installed; in a virtual environment, it checks that environment. In a checkout, versions are compared with the
tested ones; for an installed wheel, `pip check` compares them. With the settings of a run, the output
includes the memory that each process needs. The exit status is 1 if a requirement is missing or the run does
not fit.
"""

import sys

if not (3, 11) <= sys.version_info < (3, 13):
    sys.exit(
        f"python {sys.version.split()[0]} is not supported: use 3.11 or 3.12 (python3.11 scripts/doctor)."
    )

import argparse
import importlib
import importlib.util
import io
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent
CHECKOUT = (ROOT / "constraints.txt").is_file()  # False: an installed wheel
IMPORT_NAMES = {  # distribution -> module, if they differ by more than - and _
    "hydra-core": "hydra",
    "megatron-core": "megatron.core",
    "mini-swe-agent": "minisweagent",
}
SHIPPED = (
    *("configs/config.yaml", "models/tiny/config.json", "models/tiny/model.safetensors"),
    *("data/swe/train.jsonl", "data/swe/held_instances.jsonl", "data/swe/held_families.jsonl"),
)
PIP = (sys.executable, "-m", "pip", "install")
GIB = 1 << 30


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    INFO = "info"  # information only
    WARN = "warn"  # works, but not as well as possible
    MISSING = "missing"  # required


@dataclass(slots=True, kw_only=True)
class Finding:
    """One line of the output: the name of a check, its result, and a hint (empty if none is needed)."""

    level: Level
    name: str
    found: str
    remedy: str = ""


def ok_if(good: bool, name: str, found: str, remedy: str, *, otherwise: Level = Level.MISSING) -> Finding:
    """Return a finding, with the hint only if the check failed."""
    level = Level.OK if good else otherwise
    return Finding(level=level, name=name, found=found, remedy="" if good else remedy)


def check_python() -> Iterator[Finding]:
    """Report the interpreter and its virtual environment."""
    inside = sys.prefix != sys.base_prefix
    where = f"virtual environment {sys.prefix}" if inside else "no virtual environment"
    yield Finding(level=Level.OK, name="python", found=f"{sys.version.split()[0]}, {where}")


def check_compiled() -> Iterator[Finding]:
    """Report modules that every process has to compile, because nothing stores what Python compiles."""
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.origin:
        return

    # Installers may leave modules uncompiled, and many container images set this variable.
    stored = Path(importlib.util.cache_from_source(torch.origin))
    folder = Path(torch.origin).parent
    if stored.exists() or (os.access(folder, os.W_OK) and not sys.dont_write_bytecode):
        return

    packages = shlex.quote(str(folder.parent))
    yield Finding(
        level=Level.WARN,
        name="compiled modules",
        found="none of torch, and Python may not store them: every process starts more slowly",
        remedy=f"unset PYTHONDONTWRITEBYTECODE, or run once: {sys.executable} -m compileall -q {packages}",
    )


def check_packages() -> Iterator[Finding]:
    """Check each direct dependency: installed, importable, and at the tested version."""
    if CHECKOUT:
        lines = (ROOT / pins_file()).read_text().split()
        pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
        needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    else:
        needed, pins = [line for line in requires("rlpipe") or [] if "extra ==" not in line], {}

    # If no package is installed, one line is enough.
    names = [re.split("[^A-Za-z0-9._-]", line)[0] for line in needed]
    if not any(installed(name) for name in names):
        yield Finding(level=Level.MISSING, name="packages", found="none installed", remedy=install_all())
        return

    # Before the imports: setuptools, once imported, puts the packages that it contains on the path.
    others = check_others(pins) if CHECKOUT else check_fit()

    for name in names:
        yield check_package(name, pins.get(name, ""))

    yield others


def check_package(name: str, pin: str) -> Finding:
    """Check a distribution by importing it, which also tests compiled code. pin: tested version; "": any."""
    remedy = shlex.join([*PIP, "--force-reinstall", "--no-deps", f"{name}=={pin}" if pin else name])
    present = installed(name)
    if not present:
        return Finding(level=Level.MISSING, name=name, found="not installed", remedy=install_all())

    from rlpipe.config.home import provide_home

    # Some packages fail on import without a writable home folder, which a new installation would not solve.
    provide_home()
    module = IMPORT_NAMES.get(name, name.replace("-", "_"))
    started = time.monotonic()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            importlib.import_module(module)
    # A broken package may raise any exception, and the user needs to see it.
    except Exception as error:
        broken = f"{present}, but `import {module}` fails: {type(error).__name__}: {error}"
        return Finding(level=Level.MISSING, name=name, found=broken, remedy=remedy)

    if pin and present != pin:
        return Finding(level=Level.WARN, name=name, found=f"{present}, tested with {pin}", remedy=remedy)
    return Finding(level=Level.OK, name=name, found=f"{version(name)} ({time.monotonic() - started:.1f} s)")


def check_others(pins: dict[str, str]) -> Finding:
    """Compare all installed versions with the pins in one finding; packages for tests only may be absent."""
    different = [
        f"{n} {installed(n)}, tested with {pin}" for n, pin in pins.items() if installed(n) not in ("", pin)
    ]
    summary = "; ".join(different[:4]) + ("; ..." if len(different) > 4 else "") or "as tested"
    return ok_if(not different, "all versions", summary, install_all(), otherwise=Level.WARN)


def check_fit() -> Finding:
    """Check the versions of an installed wheel's dependencies with pip, in one finding."""
    done = subprocess.run([*PIP[:3], "check"], capture_output=True, text=True)
    lines = (done.stdout + done.stderr).strip().splitlines()
    summary = "; ".join(lines[:4]) + ("; ..." if len(lines) > 4 else "")
    return ok_if(done.returncode == 0, "all versions", summary, install_all(), otherwise=Level.WARN)


def pins_file() -> str:
    """Return the file with the tested versions for this machine; scripts/lib/setup.sh uses the same file."""
    from rlpipe.config.machine import has_gpus

    pins = os.environ.get("RLPIPE_PINS") or ("gpu" if has_gpus() else "cpu")
    return "constraints_gpu.txt" if pins == "gpu" else "constraints.txt"


def installed(name: str) -> str:
    """Return the version of a distribution without its local label (`+cpu`); empty if not installed."""
    try:
        return version(name).split("+")[0]
    except PackageNotFoundError:
        return ""


def install_all() -> str:
    """Return the command that installs every dependency, or advice on the installation."""
    if not CHECKOUT:
        return "install the wheel again, with its dependencies, in a virtual environment of its own"
    if sys.prefix == sys.base_prefix and not Path(sys.prefix, "conda-meta").exists():
        return "run scripts/quickstart; where it has run, .venv/bin/python scripts/doctor"
    return shlex.join([*PIP, "-e", str(ROOT), "-c", str(ROOT / pins_file())])


def check_sandbox() -> Iterator[Finding]:
    """Check that the tools of the sandbox are installed, and that a sandbox starts."""
    for tool, package in (("bwrap", "bubblewrap"), ("prlimit", "util-linux"), ("setpriv", "util-linux")):
        path = shutil.which(tool)
        if tool == "setpriv" and os.geteuid() != 0:
            continue  # only root has privileges to drop
        yield ok_if(path is not None, tool, path or "not found", f"apt-get install {package}")

    # The kernel or a container may forbid bwrap although it is installed, so start it once.
    if shutil.which("bwrap") is None:
        return
    command = [
        "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "true",
    ]

    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    lines = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    remedy = (
        "allow user namespaces: sysctl -w kernel.unprivileged_userns_clone=1 (Debian), "
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu 24.04 and later), "
        "docker run --privileged (in a container)"
    )

    yield ok_if(done.returncode == 0, "sandbox start", "works" if done.returncode == 0 else lines[0], remedy)
    yield from check_bounds()


def check_bounds() -> Iterator[Finding]:
    """Check which limits of the sandbox this machine can enforce."""
    options = subprocess.run(["bwrap", "--help"], capture_output=True, text=True).stdout
    machine, kernel = platform.machine(), Path("/proc/self/status").read_text()

    # The system call filter supports two processor architectures.
    filters = "--seccomp" in options and "Seccomp:" in kernel and machine in ("x86_64", "aarch64")
    yield ok_if(
        filters,
        "sandbox filter",
        f"system calls, on {machine}" if filters else f"none on {machine}",
        "use x86-64 or ARM, and a kernel with CONFIG_SECCOMP_FILTER",
    )

    # In a nested user namespace, a command would get new privileges.
    nested = "--disable-userns" in options
    yield ok_if(
        nested,
        "sandbox namespaces",
        "no further ones inside" if nested else "commands may make user namespaces of their own",
        "install bwrap 0.8 or later",
        otherwise=Level.WARN,
    )

    # Control groups enforce the limits; without them, memory is only checked periodically.
    groups = runpy.run_path(str(PACKAGE / "envs" / "sandbox" / "cgroup.py"))
    controllers = groups["controllers"]()
    versions = {2 if groups["is_version_2"](parent) else 1 for parent in controllers.values()}
    pipes = Path("/proc/sys/fs/pipe-user-pages-soft").read_text().strip()
    looks = (
        "memory by a look every 0.1 s, which a burst outruns and which sees no buffers of sockets; pipes by "
    )
    yield ok_if(
        "memory" in controllers,
        "sandbox groups",
        (
            f"control groups, version {versions.pop()}: {', '.join(controllers)}"
            if controllers
            else "no control groups"
        )
        + (f"; {looks}pipe-user-pages-soft={pipes}" if "memory" not in controllers else "")
        + "; of each process by RLIMIT_AS, RLIMIT_NPROC, RLIMIT_CPU",
        "run in a unit with delegated controllers (systemd-run --user --scope -p Delegate=yes COMMAND), or "
        "in a container that may write its groups (docker run --privileged)",
        otherwise=Level.INFO,
    )


def check_machine() -> Iterator[Finding]:
    """Check cores, memory, disk, and the shared memory in which Ray stores its objects."""
    cores = len(os.sched_getaffinity(0))
    yield ok_if(cores >= 2, "cores", str(cores), "give it 2 cores or more", otherwise=Level.WARN)

    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory = int(meminfo["MemAvailable"].split()[0]) << 10
    yield size("free memory", memory, 4 * GIB, "close other programs, or use cluster=inline (no Ray)")

    disk = shutil.disk_usage(ROOT).free
    yield size("free disk", disk, 2 * GIB, f"free some space on the disk of {ROOT}")

    if not Path("/dev/shm").is_dir():
        yield Finding(
            level=Level.WARN, name="/dev/shm", found="not there", remedy="use cluster=inline (no Ray)"
        )
        return

    shared = shutil.disk_usage("/dev/shm").free
    yield size("/dev/shm", shared, GIB, "docker run --shm-size=2g, or use cluster=inline (no Ray)")


def size(name: str, free: int, wanted: int, remedy: str) -> Finding:
    """Return a finding on the number of free bytes."""
    measured = f"{free / GIB:.1f} GiB"
    short = f"{measured}, {wanted // GIB} GiB wanted"
    return ok_if(free >= wanted, name, measured if free >= wanted else short, remedy, otherwise=Level.WARN)


def check_accelerator() -> Iterator[Finding]:
    """Report whether there is a GPU that torch can use."""
    from rlpipe.config.machine import cpu_decodes_fast_in_bfloat16, cpu_has_fast_bfloat16, has_gpus

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        yield Finding(
            level=Level.OK, name="gpu", found=f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        )
    elif has_gpus():
        remedy = "install a CUDA build of this version of torch"
        yield Finding(
            level=Level.WARN, name="gpu", found="there is one, but this torch cannot use it", remedy=remedy
        )
    else:
        speed = "slow: set float32 and fp32"
        if cpu_has_fast_bfloat16():
            speed = "fast"
        elif cpu_decodes_fast_in_bfloat16():
            speed = "fast in decode steps and slow in training: set float32 and fp32"
        found = f"none; everything runs on the CPU, where bfloat16 is {speed}"
        yield Finding(level=Level.INFO, name="gpu", found=found)


def check_nccl() -> Iterator[Finding]:
    """Compare the NCCL version of this environment, the trainer's, with that of SGLang's servers."""
    if not installed("rlpipe"):
        return
    try:
        from rlpipe.config.sglang import SglangConfig
        from rlpipe.rollout.sglang.environment import local_nccl, nccl_differs, served_nccl

        local, served = local_nccl(), served_nccl(SglangConfig())
    except (ImportError, ValueError):
        return  # another finding reports what is missing, or servers have no environment here

    if not (local and served):
        return
    yield ok_if(
        not nccl_differs(local, served),
        "nccl",
        local if local == served else f"trainer {local}, SGLang {served}",
        "install the same torch in both environments (constraints_gpu.txt and scripts/install_sglang gpu): "
        "rollout.sglang.weight_transfer=collective is refused until then",
        otherwise=Level.WARN,
    )


def check_wandb() -> Iterator[Finding]:
    """Report whether runs would be uploaded to W&B."""
    if not installed("rlpipe"):
        return
    from rlpipe.metrics.sinks import logged_in

    state = "logged in" if logged_in() else "not logged in, records stay in the run directory (`wandb login`)"
    yield Finding(level=Level.INFO, name="wandb", found=state)


def check_shipped() -> Iterator[Finding]:
    """Check the files that come with rlpipe."""
    top = ROOT if CHECKOUT else PACKAGE / "_data"
    absent = [name for name in SHIPPED if not (top / name).is_file()]
    state = f"{len(SHIPPED)} files" if not absent else f"not there: {', '.join(absent)}"
    remedy = "git checkout -- configs data models" if CHECKOUT else install_all()
    yield ok_if(not absent, "shipped files", state, remedy)


def check_run(settings: list[str]) -> Iterator[Finding]:
    """Report the memory of each process of a run with these settings, and whether the launch would fail."""
    try:
        from rlpipe.cli.run import check_before, config_of
        from rlpipe.launch import check_run_directory, check_task
        from rlpipe.preflight.learning_rate import rate_note
        from rlpipe.preflight.memory_estimate import checkpoint_of_run, estimate, gpu_bytes
        from rlpipe.preflight.object_store import store_memory
        from rlpipe.preflight.settings import check
    except ModuleNotFoundError as error:  # before anything is installed
        yield Finding(level=Level.MISSING, name="launch", found=f"not checked: {error}", remedy=install_all())
        return

    try:
        config, resolved = config_of(settings)
        check(config)

        # Yield the estimates first, so that they are printed even if the launch would fail.
        gpu_memory = gpu_bytes(config)
        for memory in (
            *estimate(config, gpu_memory),
            checkpoint_of_run(config, gpu_memory),
            store_memory(config),
        ):
            if memory is None:
                continue
            yield Finding(level=Level.INFO, name="memory", found=str(memory))

        if note := rate_note(config):
            yield Finding(level=Level.WARN, name="learning rate", found=note)

        check_before(config)
        check_task(config)
        check_run_directory(config, resolved)
    except ValueError as error:
        yield Finding(level=Level.MISSING, name="launch", found=f"refused here: {error}")
    else:
        yield Finding(level=Level.OK, name="launch", found="nothing wrong found")


CHECKS = (
    *(check_python, check_packages, check_compiled, check_sandbox, check_machine),
    *(check_accelerator, check_nccl, check_wandb, check_shipped),
)


def show(findings: list[Finding]) -> None:
    """Print one aligned line per finding, with its hint below it."""
    colors = {Level.OK: "32", Level.INFO: "36", Level.WARN: "33", Level.MISSING: "31"}
    width = max(len(f.name) for f in findings)
    for finding in findings:
        mark = f"{finding.level:<7}"
        if sys.stdout.isatty() and "NO_COLOR" not in os.environ:
            mark = f"\033[{colors[finding.level]}m{mark}\033[0m"
        print(f"{mark}  {finding.name:<{width}}  {finding.found}")

        if finding.remedy:
            print(f"{'':7}  {'':{width}}  -> {finding.remedy}")

    # The last line is the summary.
    missing = sum(f.level is Level.MISSING for f in findings)
    warned = sum(f.level is Level.WARN for f in findings)
    notes = f", {warned} to look at" if warned else ""
    print(f"\n{missing} required missing{notes}" if missing else f"\nready{notes}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks and print the findings; return 1 if a requirement is missing, else 0."""
    parser = argparse.ArgumentParser(prog="rlpipe doctor", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    parser.add_argument("--config-dir", metavar="DIR", help="folder of further recipes, as of rlpipe run")
    parser.add_argument("settings", nargs="*", help="of a run, as rlpipe run takes them")
    options = parser.parse_intermixed_args(arguments)

    # Check this copy of rlpipe, even if another one is installed.
    sys.path.insert(0, str(ROOT))
    findings = [finding for check in CHECKS for finding in check()]
    if options.settings:
        # The user's code may print to stdout, where only the JSON belongs.
        with redirect_stdout(sys.stderr):
            folder = ["--config-dir", options.config_dir] if options.config_dir else []
            findings += check_run([*folder, *options.settings])

    if options.json:
        print(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        show(findings)

    return int(any(f.level is Level.MISSING for f in findings))


if __name__ == "__main__":
    sys.exit(main())
