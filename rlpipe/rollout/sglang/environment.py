"""SGLang's own virtual environment: which interpreter, and whether what it holds is what we know.

SGLang and verl ask for different versions of transformers and torch, so they never share one.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.sglang import SglangConfig

SGLANG_VERSION = "0.5.23"
CPU_SUPPORT_VERSION = f"{SGLANG_VERSION}.1"  # of sglang_env/cpu_support
_REMEDY = "Run scripts/install_sglang"
_PROBE = """
import json
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in ("sglang", "rlpipe-sglang-cpu", "torch"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        found[name] = None
print(json.dumps(found))
"""


@dataclass(slots=True, kw_only=True)
class SglangEnvironment:
    """A checked interpreter. on_gpu: whether servers of this run use CUDA."""

    python: Path
    on_gpu: bool


def is_on_gpu(config: RolloutConfig) -> bool:
    """Whether servers run on GPUs; device auto: if this process sees one."""
    return torch.cuda.is_available() if config.device == "auto" else config.device.startswith("cuda")


def find_environment(config: SglangConfig, on_gpu: bool) -> SglangEnvironment:
    """The interpreter of `config`, checked for the SGLang this rlpipe knows.

    Raises ValueError: no such interpreter, it has no SGLang or another version, a torch without CUDA on a
    GPU, or, on a CPU, not our support package of this version.
    """
    python = _interpreter(config)
    found = _probe(python)
    if found["sglang"] is None:
        raise ValueError(
            f"rollout.sglang.python={str(python)!r} has no sglang. {_REMEDY} {_flavour(on_gpu)}, or point "
            "rollout.sglang.python at the interpreter of SGLang's environment."
        )
    if found["sglang"] != SGLANG_VERSION:
        raise ValueError(
            f"rollout.sglang.python={str(python)!r} has sglang {found['sglang']}, but this rlpipe speaks to "
            f"{SGLANG_VERSION} (names of metrics and of weight updates differ). {_REMEDY} {_flavour(on_gpu)}."
        )
    if on_gpu and str(found["torch"]).endswith("+cpu"):
        raise ValueError(
            f"rollout.sglang.python={str(python)!r} has torch {found['torch']}, a build without CUDA. "
            f"{_REMEDY} gpu, or set rollout.device=cpu."
        )
    support = found["rlpipe-sglang-cpu"]
    if not on_gpu and support != CPU_SUPPORT_VERSION:
        raise ValueError(
            f"rollout.sglang.python={str(python)!r} has rlpipe-sglang-cpu {support}, and without a GPU "
            f"version {CPU_SUPPORT_VERSION} is needed. {_REMEDY} cpu."
        )
    return SglangEnvironment(python=python, on_gpu=on_gpu)


def _interpreter(config: SglangConfig) -> Path:
    if config.python:
        python, said = Path(config.python).expanduser(), f"rollout.sglang.python={config.python!r}"
    elif venv := os.environ.get("RLPIPE_SGLANG_VENV"):
        python, said = Path(venv) / "bin" / "python", f"RLPIPE_SGLANG_VENV={venv!r}"
    else:
        python = Path(__file__).resolve().parents[3] / ".venv-sglang" / "bin" / "python"
        said = f"the default environment {str(python)!r}"
    python = python.absolute()  # not resolved: a virtual environment is where its link lies
    if not (python.is_file() and os.access(python, os.X_OK)):
        raise ValueError(
            f"{said} is no Python interpreter. {_REMEDY}, or set rollout.sglang.python to the interpreter of "
            "SGLang's virtual environment."
        )
    return python


def _probe(python: Path) -> dict[str, str | None]:
    """Versions the interpreter holds, without importing anything heavy."""
    done = subprocess.run(
        [str(python), "-I", "-c", _PROBE], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        error = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise ValueError(
            f"rollout.sglang.python={str(python)!r} does not run Python ({error[0]}). {_REMEDY}."
        )
    return json.loads(done.stdout)


def _flavour(on_gpu: bool) -> str:
    return "gpu" if on_gpu else "cpu"
