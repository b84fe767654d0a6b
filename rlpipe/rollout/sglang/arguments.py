"""Makes SGLang's command line and environment from the settings, and checks the result in `/server_info`.

Owns the mapping from rlpipe's decoding modes to SGLang's flags:

| spec.mode    | SGLang                                                                    |
| none         | no speculation                                                            |
| target_only  | NEXTN, top-k 1: the draft's argmax, accepted with probability p           |
| rejection    | NEXTN, top-k 1, --speculative-use-rejection-sampling                      |
| block        | the same with --speculative-use-block-verification (CUDA only)            |
| greedy       | as target_only; requests must have temperature 0, where SGLang takes argmax |
| tree         | refused: SGLang's tree has no sampled drafts                              |

NEXTN drafts with the MTP layer; for spec.drafter=eagle3 the algorithm is EAGLE3.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpipe.config.cuda_graphs import captured_batches
from rlpipe.config.paths import resolve, shipped
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.sglang import WeightTransfer
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.drafts.kinds import DRAFTERS
from rlpipe.models import family_of, read_architecture
from rlpipe.models.checkpoint import read_config, read_json, require_mtp
from rlpipe.models.grafted import fits_mimo, is_grafted
from rlpipe.rollout.sglang.environment import SGLANG_VERSION
from rlpipe.rollout.sglang.gpu_share import server_fraction
from rlpipe.rollout.sglang.routes import check_routes
from rlpipe.spec import gamma
from rlpipe.weights.shared_memory import LOADER, SERVED

_PLUGIN = "sglang_env/plugin"
_WORKERS = "--tokenizer-worker-num"
_LARGEST_REUSED = 64 << 20  # bytes: a CPU server's allocator reuses freed memory of up to this size
_GRAPH_SECONDS = 0.5  # to capture one CUDA graph, including two runs before it (an assumption)
_SAMPLED = (SpecMode.REJECTION, SpecMode.BLOCK)


def check_supported(
    rollout: RolloutConfig, spec: SpecConfig, model_path: str | Path, *, on_gpu: bool
) -> None:
    """Refuse at launch settings that the server would refuse only later, or would silently change.

    `config.checks.check_sglang` refuses settings that SGLang never supports. Raises ValueError with the
    problem, the value and a hint.
    """
    if spec.mode is SpecMode.BLOCK and not on_gpu:
        raise ValueError(
            "spec.mode=block: SGLang's block verification is a CUDA kernel and this machine has no GPU. Use "
            "spec.mode=rejection, or rollout.engine=embedded."
        )
    if any(argument.partition("=")[0] == _WORKERS for argument in rollout.sglang.extra_arguments):
        raise ValueError(
            f"rollout.sglang.extra_arguments has {_WORKERS}: the version of new weights and what "
            "rlpipe's plugin does would reach only one of these processes. Leave it out: requests that come "
            "at once travel as one, and more servers are rollout.workers."
        )
    check_routes(rollout, spec, on_gpu=on_gpu)

    target = read_config(model_path)
    if (name := target["model_type"]).endswith("_text"):
        raise ValueError(
            f"{str(model_path)!r} is of type {name!r}, for which SGLang has no class. Use the checkpoint "
            f"that it was cut from, of type {name.removesuffix('_text')!r}: only its text part is trained."
        )
    if name == "mimo" and "auto_map" not in target and not spec.needs_draft:
        raise ValueError(
            f"{str(model_path)!r} is of type 'mimo', which the server's transformers does not know, and "
            'brings no code for it (auto_map). Set model_type to "qwen2" in its config.json, with '
            'architectures ["MiMoForCausalLM"]: the weights are the same. Or set rollout=embedded.'
        )
    if target.get("architectures") == ["MiMoForCausalLM"] and not read_architecture(target).qkv_bias:
        raise ValueError(
            f"{str(model_path)!r} has no biases on query, key and value, and SGLang's class for MiMo reads "
            "them: add biases of zero and set attention_bias to true, or set rollout=embedded."
        )
    if not on_gpu and target.get("linear_num_key_heads"):
        raise ValueError(
            f"{str(model_path)!r} is of type {target['model_type']!r}, whose gated delta nets SGLang "
            "computes on a GPU only: run it on a machine with one (rollout.device=auto)."
        )
    without_plugin = not on_gpu and not rollout.sglang.plugin
    if without_plugin and family_of(target).latent:
        raise ValueError(
            f"rollout.sglang.plugin=false and {str(model_path)!r} is of type {target['model_type']!r}, whose "
            "latent attention SGLang computes on a CPU only with rlpipe's plugin. Set "
            "rollout.sglang.plugin=true, or use rollout=embedded."
        )

    if spec.mode is SpecMode.NONE:
        return

    if spec.needs_draft:
        if rollout.sglang.weight_transfer is WeightTransfer.DISK:  # one checkpoint is read into both models
            raise ValueError(
                f"rollout.sglang.weight_transfer=disk with spec.drafter={spec.drafter}: SGLang reads one "
                "checkpoint into target and draft. Set weight_transfer=auto, shared or collective."
            )
        DRAFTERS[spec.drafter].check_sglang(spec, target, rollout.sglang)
        return

    # the draft is the target's MTP layer
    require_mtp(target, model_path, spec.mode)
    DRAFTERS[spec.drafter].check_sglang(spec, target, rollout.sglang)
    if (layers := int(target["num_nextn_predict_layers"])) > 1:
        raise ValueError(
            f"spec.mode={spec.mode}: SGLang's draft of a {target['model_type']!r} holds one MTP layer and "
            f"would load the {layers} of {str(model_path)!r} one over the other. Set rollout=embedded, or "
            "spec.mode=none."
        )
    if is_grafted(target) and not fits_mimo(read_architecture(target)):
        raise ValueError(
            f"spec.mode={spec.mode}: {str(model_path)!r} is a {target['model_type']!r} with a grafted MTP "
            "layer, and SGLang's class for such a layer (MiMo) has no norms of queries and keys, and biases "
            "on query, key and value only. Set rollout=embedded, or spec.mode=none."
        )
    if without_plugin and not family_of(target).draft_on_cpu:
        raise ValueError(
            f"spec.mode={spec.mode}: SGLang's MTP draft of a {target['model_type']!r} starts on a CPU only "
            "with rlpipe's plugin. Set rollout.sglang.plugin=true, rollout=embedded, or spec.mode=none."
        )


def command(
    rollout: RolloutConfig, spec: SpecConfig, model_path: str | Path, *, port: int, on_gpu: bool, version: int
) -> list[str]:
    """Return the arguments of the interpreter for a server that serves `model_path` as `version`."""
    sglang = rollout.sglang
    arguments: list[Any] = ["-m", "sglang.launch_server", "--model-path", model_path]
    arguments += ["--host", sglang.host, "--port", port, "--device", "cuda" if on_gpu else "cpu"]
    arguments += ["--skip-tokenizer-init", "--skip-server-warmup", "--log-level", "info"]
    arguments += ["--custom-weight-loader", LOADER]
    arguments += ["--dtype", rollout.dtype, "--weight-version", version, "--tensor-parallel-size", sglang.tp]
    # with speculation SGLang would silently lower the default to 48
    arguments += ["--max-running-requests", rollout.max_running]
    arguments += ["--context-length", context_length(rollout, spec)]
    arguments += ["--chunked-prefill-size", rollout.prefill_tokens, "--enable-priority-scheduling"]

    backend = sglang.attention_backend
    if not on_gpu:
        backend = backend or "torch_native"
        arguments += ["--sleep-on-idle"]  # otherwise an idle scheduler keeps a core busy
        arguments += ["--max-total-tokens", rollout.max_running * context_length(rollout, spec)]
        # The line above limits the cache. SGLang only compares this fraction with the host's free memory, and
        # a server with a small fraction fails to start if another process grows meanwhile.
        arguments += ["--mem-fraction-static", sglang.memory_fraction or 0.5]
    else:
        arguments += ["--base-gpu-id", rollout.device.partition(":")[2] or 0]
        if sglang.memory_fraction:
            fraction = server_fraction(sglang.memory_fraction, rollout.device)
            arguments += ["--mem-fraction-static", fraction]
    if backend:
        arguments += ["--attention-backend", backend]

    model = read_json(Path(model_path) / "config.json", "model.path")
    model |= model.get("text_config") or {}
    shared = ("n_shared_experts", "shared_expert_intermediate_size")
    if any(map(model.get, shared)):  # otherwise they appear under the names of other experts
        arguments += ["--disable-shared-experts-fusion"]

    if rollout.replay_routes:
        arguments += ["--enable-return-routed-experts"]
    if sglang.deterministic:
        arguments += ["--enable-deterministic-inference"]

    if spec.mode is not SpecMode.NONE:
        arguments += ["--speculative-algorithm", spec.drafter.kind.sglang]
        arguments += ["--speculative-draft-model-path", resolve(spec.draft_path or str(model_path))]
        arguments += ["--speculative-num-steps", spec.gamma, "--speculative-eagle-topk", 1]
        arguments += ["--speculative-num-draft-tokens", spec.gamma + 1]
        if spec.mode in _SAMPLED:
            arguments += ["--speculative-use-rejection-sampling"]
        if spec.mode is SpecMode.BLOCK:
            arguments += ["--speculative-use-block-verification"]

    return [str(argument) for argument in arguments] + list(sglang.extra_arguments)


def context_length(rollout: RolloutConfig, spec: SpecConfig) -> int:
    """Return the maximum length of a request, including drafts of the last step, as SGLang counts it."""
    return rollout.max_context + (spec.gamma + 1 if spec.mode is not SpecMode.NONE else 0) + 1


def start_seconds(rollout: RolloutConfig, spec: SpecConfig, *, on_gpu: bool) -> float:
    """Return the start timeout of a server in seconds, plus time for graphs of an adaptive gamma.

    Each further gamma needs graphs for verify, extend and two kinds of drafting, at the sizes of
    `rare_sizes`.
    """
    if not (on_gpu and spec.adaptive):
        return rollout.sglang.start_timeout
    sizes = gamma.rare_sizes(captured_batches(rollout.max_running, drafts=True))
    return rollout.sglang.start_timeout + _GRAPH_SECONDS * 4 * spec.gamma * len(sizes)


def server_environment(
    rollout: RolloutConfig, *, on_gpu: bool, adaptive: bool = False, draft_vocab: Path | None = None
) -> dict[str, str]:
    """Return the server's environment variables: this process's, except those of its interpreter.

    adaptive: whether the server chooses the number of drafts.
    draft_vocab: file with the draft vocabulary; None for all.
    """
    interpreter = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", "TRITON_INTERPRET")
    variables = {name: value for name, value in os.environ.items() if name not in interpreter}

    path = [str(SERVED), str(shipped(_PLUGIN))] if rollout.sglang.plugin else [str(SERVED)]
    variables |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": ":".join(path)}
    variables |= {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # for max_context plus the drafts
    if rollout.sglang.plugin:  # the plugin imports only the served model's file, SGLang all 259
        variables.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "rlpipe_sglang.model_files")
    if adaptive:
        variables |= {"RLPIPE_GAMMA": str(Path(gamma.__file__))}
    if draft_vocab is not None:
        variables |= {"RLPIPE_DRAFT_VOCAB": str(draft_vocab)}
    if not on_gpu:
        variables |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_OPT_USE_GUMBEL_SAMPLE": "0",  # use torch.multinomial: SGLang's Gumbel kernel needs a GPU
            "TORCHDYNAMO_DISABLE": "1",  # compilation at the first request takes 15 s
            "OMP_NUM_THREADS": str(rollout.threads),
            # otherwise each large tensor is mapped anew, page by page, and unmapped when freed
            "MALLOC_MMAP_THRESHOLD_": str(_LARGEST_REUSED),
            "MALLOC_TRIM_THRESHOLD_": str(_LARGEST_REUSED),
        }
    return variables


def check_server_info(info: Mapping[str, Any], rollout: RolloutConfig, spec: SpecConfig) -> None:
    """Check that the server runs with the flags of its command line, as SGLang changes some silently.

    Raises RuntimeError that names each difference, or the reason why rlpipe's plugin cannot work.
    """
    expected: dict[str, Any] = {
        "version": SGLANG_VERSION,
        "skip_tokenizer_init": True,
        "max_running_requests": rollout.max_running,
        "dtype": str(rollout.dtype),
        "speculative_algorithm": None,
    }
    if rollout.replay_routes:
        expected["enable_return_routed_experts"] = True
    if spec.mode is not SpecMode.NONE:
        expected |= {
            # SGLang replaces NEXTN by EAGLE
            "speculative_algorithm": spec.drafter.kind.sglang.replace("NEXTN", "EAGLE"),
            "speculative_num_steps": spec.gamma,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": spec.gamma + 1,
            "speculative_use_rejection_sampling": spec.mode in _SAMPLED,
            "speculative_use_block_verification": spec.mode is SpecMode.BLOCK,
            "speculative_adaptive": spec.adaptive,
        }

    wrong = [
        f"{name}={info.get(name)!r} instead of {value!r}"
        for name, value in expected.items()
        if info.get(name) != value
    ]
    if wrong:
        raise RuntimeError(
            f"the SGLang server does not run as configured: {'; '.join(wrong)}. Look for conflicting "
            "rollout.sglang.extra_arguments."
        )
    if rollout.sglang.plugin:
        states = info.get("internal_states") or [{}]
        _require_plugin(states)
        if spec.draft_vocab and spec.needs_mtp:
            _require_draft_vocab(states, spec.draft_vocab)


def _require_plugin(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless every process of a server has rlpipe's plugin. states: one per scheduler."""
    for report in (state.get("rlpipe_plugin") or {} for state in states):
        for role in ("scheduler", "http"):
            if (status := report.get(role)) != "ok":
                raise RuntimeError(
                    f"rlpipe's plugin does not work in the SGLang server's {role} process: "
                    f"{status or 'it did not load, see the log of the server (is SGLANG_PLUGINS set?)'}. Set "
                    "rollout.sglang.plugin=false to do without it: entropies are estimates then."
                )


def _require_draft_vocab(states: Sequence[Mapping[str, Any]], table: str) -> None:
    """Raise if a server ignores the draft vocabulary. states: one per scheduler. table: its file."""
    if not all((state.get("rlpipe_plugin") or {}).get("draft_vocab") for state in states):
        raise RuntimeError(
            f"spec.draft_vocab={table!r}, and the SGLang server drafts among all tokens: see its log. Set "
            "spec.draft_vocab='' to do without a table."
        )
