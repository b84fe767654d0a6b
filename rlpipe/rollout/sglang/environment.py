"""The virtual environment of SGLang: its interpreter, and the package versions that rlpipe supports.

SGLang and verl need different versions of transformers, so they never share an environment. On a machine with
GPUs both have the same torch (constraints_gpu.txt), and so the same NCCL.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.sglang import SglangConfig, WeightTransfer

SGLANG_VERSION = "0.5.23"
CPU_SUPPORT_VERSION = f"{SGLANG_VERSION}.1"  # version of sglang_env/cpu_support
_HINT = "Run scripts/install_sglang"
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")  # packages that provide NCCL for torch with CUDA
_PROBE = f"""
NCCL = {_NCCL}
import json
from importlib.metadata import PackageNotFoundError, version
versions = dict()
for name in ("sglang", "rlpipe-sglang-cpu", "torch", *NCCL):
    try:
        versions[name] = version(name)
    except PackageNotFoundError:
        versions[name] = None
print(json.dumps(versions))
"""


@dataclass(slots=True, kw_only=True)
class SglangEnvironment:
    """A checked interpreter. on_gpu: whether this run's servers use CUDA."""

    python: Path
    on_gpu: bool


def is_on_gpu(config: RolloutConfig) -> bool:
    """Return whether servers run on GPUs; with device auto, whether this process sees a GPU."""
    return torch.cuda.is_available() if config.device == "auto" else config.device.startswith("cuda")


def find_environment(config: SglangConfig, *, on_gpu: bool) -> SglangEnvironment:
    """Find the interpreter for `config`, and check that it has the supported version of SGLang.

    Raises ValueError if there is no such interpreter, if it has no SGLang or another version, if on a GPU its
    torch has no CUDA, or if on a CPU it lacks rlpipe's support package of the right version.
    """
    python = _interpreter(config)
    versions = _probe(python)
    flavour = "gpu" if on_gpu else "cpu"

    # Each check has a separate hint, because the installation differs for GPU and CPU.
    if versions["sglang"] is None:
        raise ValueError(
            f"rollout.sglang.python={str(python)!r} has no sglang. {_HINT} {flavour}, or point "
            "rollout.sglang.python at the interpreter of SGLang's environment."
        )
    if versions["sglang"] != SGLANG_VERSION:
        raise ValueError(
            f"rollout.sglang.python={str(python)!r} has sglang {versions['sglang']}, but this rlpipe "
            f"needs {SGLANG_VERSION} (names of metrics and of weight updates differ). {_HINT} {flavour}."
        )
    if on_gpu and str(versions["torch"]).endswith("+cpu"):
        raise ValueError(
            f"rollout.sglang.python={str(python)!r} has torch {versions['torch']}, a build without CUDA. "
            f"{_HINT} gpu, or set rollout.device=cpu."
        )
    support = versions["rlpipe-sglang-cpu"]
    if not on_gpu and support != CPU_SUPPORT_VERSION:
        raise ValueError(
            f"rollout.sglang.python={str(python)!r} has rlpipe-sglang-cpu {support}, and without a GPU "
            f"version {CPU_SUPPORT_VERSION} is needed. {_HINT} cpu."
        )

    # A broadcast between two versions of NCCL would fail only at the first update.
    local, served = local_nccl(), _nccl(versions)
    if on_gpu and config.weight_transfer is WeightTransfer.COLLECTIVE and nccl_differs(local, served):
        raise ValueError(
            f"rollout.sglang.weight_transfer=collective: the trainer has NCCL {local}, and "
            f"rollout.sglang.python={str(python)!r} has {served}; NCCL refuses a group of two versions. "
            f"Give both the same torch: pip install by constraints_gpu.txt here, {_HINT[4:]} gpu there. "
            "Or set weight_transfer=shared or disk."
        )
    return SglangEnvironment(python=python, on_gpu=on_gpu)


def local_nccl() -> str:
    """Return the version of NCCL in this environment, which is the trainer's; empty if there is none."""
    versions = {}
    for name in _NCCL:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return _nccl(versions)


def served_nccl(config: SglangConfig) -> str:
    """Return the version of NCCL in SGLang's environment; empty if there is none.

    Raises ValueError when there is no such environment.
    """
    return _nccl(_probe(_interpreter(config)))


def nccl_differs(local: str, served: str) -> bool:
    """Return whether two versions of NCCL are known and incompatible."""
    return bool(local and served) and local != served


def _nccl(versions: Mapping[str, str | None]) -> str:
    """Return the version of NCCL in a table of package versions; empty if there is none."""
    return next((version for name in _NCCL if (version := versions.get(name))), "")


def _interpreter(config: SglangConfig) -> Path:
    """Return the interpreter from the settings, else from the environment variable, else the default."""
    if config.python:
        python, source = Path(config.python).expanduser(), f"rollout.sglang.python={config.python!r}"
    elif venv := os.environ.get("RLPIPE_SGLANG_VENV"):
        python, source = Path(venv) / "bin" / "python", f"RLPIPE_SGLANG_VENV={venv!r}"
    else:
        python = Path(__file__).resolve().parents[3] / ".venv-sglang" / "bin" / "python"
        source = f"the default environment {str(python)!r}"

    python = python.absolute()  # do not resolve the link: it is the link that is in the virtual environment
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise ValueError(
            f"{source} is not a Python interpreter. {_HINT}, or set rollout.sglang.python to the interpreter "
            "of SGLang's virtual environment."
        )
    return python


def _probe(python: Path) -> dict[str, str | None]:
    """Read the package versions of the interpreter, without importing anything heavy."""
    done = subprocess.run(
        [str(python), "-I", "-c", _PROBE], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        error = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise ValueError(f"rollout.sglang.python={str(python)!r} does not run Python ({error[0]}). {_HINT}.")
    return json.loads(done.stdout)
