"""Settings -> SGLang's command line, its environment, and what `/server_info` must then say.

Owns the mapping of our decoding modes onto SGLang's flags:

| spec.mode    | SGLang                                                                    |
| none         | no speculation                                                            |
| target_only  | NEXTN, top-k 1: the draft's argmax, accepted with probability p           |
| rejection    | NEXTN, top-k 1, --speculative-use-rejection-sampling                      |
| block        | the same with --speculative-use-block-verification (CUDA only)            |
| greedy       | as target_only; requests must have temperature 0, where SGLang takes argmax |
| tree         | refused: SGLang's tree has no sampled drafts                              |

NEXTN drafts with the MTP layer; for spec.drafter=eagle3 read EAGLE3.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpipe.config.paths import resolve, shipped
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.sglang import WeightTransfer
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.drafts.kinds import DRAFTERS
from rlpipe.models import family_of
from rlpipe.models.checkpoint import read_config, read_json, require_mtp
from rlpipe.rollout.sglang.environment import SGLANG_VERSION
from rlpipe.rollout.sglang.routes import check_routes
from rlpipe.spec import gamma
from rlpipe.weights.shared_memory import LOADER, SERVED

_PLUGIN = "sglang_env/plugin"
_WORKERS = "--tokenizer-worker-num"
_ENOUGH_RUNNING = 4  # requests; with fewer, a turn that waits costs more than the prefill it shares
_LARGEST_KEPT = 64 << 20  # bytes that a CPU server's allocator keeps for the next tensor
_SAMPLED = (SpecMode.REJECTION, SpecMode.BLOCK)


def check_supported(rollout: RolloutConfig, spec: SpecConfig, model_path: str | Path, on_gpu: bool) -> None:
    """Refuse at launch what the server could only refuse later, or would do silently otherwise.

    What SGLang never does is refused by `config.checks.check_sglang`.
    Raises ValueError with what, the value and the remedy.
    """
    if spec.mode is SpecMode.BLOCK and not on_gpu:
        raise ValueError(
            "spec.mode=block: SGLang's block verification is a CUDA kernel and this machine has no GPU. Use "
            "spec.mode=rejection, or rollout.engine=embedded."
        )
    if any(word.partition("=")[0] == _WORKERS for word in rollout.sglang.extra_arguments):
        raise ValueError(
            f"rollout.sglang.extra_arguments has {_WORKERS}: the version of new weights and what "
            "rlpipe's plugin does would reach one of these processes alone. Leave it out: requests that come "
            "at once travel as one, and more servers are rollout.workers."
        )
    check_routes(rollout, spec, on_gpu)
    target = read_config(model_path)
    if (name := target["model_type"]).endswith("_text"):
        raise ValueError(
            f"{str(model_path)!r} is of type {name!r}, for which SGLang has no class. Use the checkpoint "
            f"that it was cut from, of type {name.removesuffix('_text')!r}: its text alone is trained."
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
            "latent attention SGLang computes on a CPU with rlpipe's plugin alone. Set "
            "rollout.sglang.plugin=true, or use rollout=embedded."
        )
    if spec.mode is SpecMode.NONE:
        return
    if spec.needs_draft:
        if rollout.sglang.draft_path:
            raise ValueError(
                f"rollout.sglang.draft_path={rollout.sglang.draft_path!r} names an MTP layer, and "
                f"spec.drafter={spec.drafter} drafts from spec.draft_path: leave the first empty."
            )
        if rollout.sglang.weight_transfer is WeightTransfer.DISK:  # one checkpoint is read into both models
            raise ValueError(
                f"rollout.sglang.weight_transfer=disk with spec.drafter={spec.drafter}: SGLang reads one "
                "checkpoint into target and draft. Set weight_transfer=auto, shared or collective."
            )
        DRAFTERS[spec.drafter].check_sglang(spec, target, rollout.sglang)
        return
    drafting = draft_path(rollout, spec, model_path)
    draft = read_config(drafting)
    require_mtp(draft, drafting, spec.mode)
    if (layers := int(draft["num_nextn_predict_layers"])) > 1:
        raise ValueError(
            f"spec.mode={spec.mode}: SGLang's draft of a {draft['model_type']!r} holds one MTP layer and "
            f"would load the {layers} of {str(drafting)!r} one over the other. Set rollout=embedded, or "
            "spec.mode=none."
        )
    if without_plugin and not family_of(draft).draft_on_cpu:
        raise ValueError(
            f"spec.mode={spec.mode}: SGLang's MTP draft of a {draft['model_type']!r} starts on a CPU with "
            "rlpipe's plugin alone. Set rollout.sglang.plugin=true, rollout=embedded, or spec.mode=none."
        )
    if draft.get("vocab_size") != target.get("vocab_size"):
        raise ValueError(
            f"the draft {str(drafting)!r} has vocab_size={draft.get('vocab_size')} and the target "
            f"{str(model_path)!r} has {target.get('vocab_size')}: drafted ids would mean other tokens. Set "
            "rollout.sglang.draft_path to a draft made for this model, or leave it empty."
        )


def draft_path(rollout: RolloutConfig, spec: SpecConfig, model_path: str | Path) -> Path:
    """Where the draft's weights are; an MTP layer's in the model itself, unless a setting names it."""
    return resolve(spec.draft_path or rollout.sglang.draft_path or str(model_path))


def command(
    rollout: RolloutConfig, spec: SpecConfig, model_path: str | Path, *, port: int, on_gpu: bool, version: int
) -> list[str]:
    """Arguments of `python`, that is, without the interpreter; `version` is served from the start."""
    sglang = rollout.sglang
    words: list[Any] = ["-m", "sglang.launch_server", "--model-path", model_path]
    words += ["--host", sglang.host, "--port", port, "--device", "cuda" if on_gpu else "cpu"]
    words += ["--skip-tokenizer-init", "--skip-server-warmup", "--log-level", "info"]
    words += ["--custom-weight-loader", LOADER]
    words += ["--dtype", rollout.dtype, "--weight-version", version, "--tensor-parallel-size", sglang.tp]
    # speculation would lower it to 48 without a word
    words += ["--max-running-requests", rollout.max_running]
    words += ["--context-length", context_length(rollout, spec)]
    words += ["--chunked-prefill-size", rollout.prefill_tokens, "--enable-priority-scheduling"]
    if sglang.decode_steps_between_prefills:
        words += ["--prefill-decode-interval", sglang.decode_steps_between_prefills]
        words += ["--prefill-decode-interval-min-bs", _ENOUGH_RUNNING]
    backend = sglang.attention_backend
    if not on_gpu:
        backend = backend or "torch_native"
        words += ["--sleep-on-idle"]  # else a scheduler without work takes a whole core from the trainer
        words += ["--max-total-tokens", rollout.max_running * context_length(rollout, spec)]
        # The line above bounds the cache. This is only checked, against what all processes leave of the host:
        # a small share fails to start when another process grows meanwhile.
        words += ["--mem-fraction-static", sglang.memory_fraction or 0.5]
    else:
        words += ["--base-gpu-id", rollout.device.partition(":")[2] or 0]
        if sglang.memory_fraction:
            words += ["--mem-fraction-static", sglang.memory_fraction]
    if backend:
        words += ["--attention-backend", backend]
    model = read_json(Path(model_path) / "config.json", "model.path")
    model |= model.get("text_config") or {}
    shared = ("n_shared_experts", "shared_expert_intermediate_size")
    if any(map(model.get, shared)):  # else they have the names of other experts
        words += ["--disable-shared-experts-fusion"]
    if rollout.replay_routes:
        words += ["--enable-return-routed-experts"]
    if sglang.deterministic:
        words += ["--enable-deterministic-inference"]
    if spec.mode is not SpecMode.NONE:
        words += ["--speculative-algorithm", spec.drafter.kind.sglang]
        words += ["--speculative-draft-model-path", draft_path(rollout, spec, model_path)]
        words += ["--speculative-num-steps", spec.gamma, "--speculative-eagle-topk", 1]
        words += ["--speculative-num-draft-tokens", spec.gamma + 1]
        if spec.mode in _SAMPLED:
            words += ["--speculative-use-rejection-sampling"]
        if spec.mode is SpecMode.BLOCK:
            words += ["--speculative-use-block-verification"]
    return [str(word) for word in words] + list(sglang.extra_arguments)


def context_length(rollout: RolloutConfig, spec: SpecConfig) -> int:
    """Positions a request may take: SGLang counts the drafts of the last step in."""
    return rollout.max_context + (spec.gamma + 1 if spec.mode is not SpecMode.NONE else 0) + 1


def server_environment(rollout: RolloutConfig, on_gpu: bool, adaptive: bool = False) -> dict[str, str]:
    """Environment variables of the server: ours without what belongs to our own interpreter."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", "TRITON_INTERPRET")
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    path = [str(SERVED), str(shipped(_PLUGIN))] if rollout.sglang.plugin else [str(SERVED)]
    variables |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": ":".join(path)}
    variables |= {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # max_context plus the drafts
    if adaptive:
        variables |= {"RLPIPE_GAMMA": str(Path(gamma.__file__))}
    if not on_gpu:
        variables |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_OPT_USE_GUMBEL_SAMPLE": "0",  # torch.multinomial: its Gumbel kernel is for GPUs
            "TORCHDYNAMO_DISABLE": "1",  # compiling for the first request takes 15 s
            "OMP_NUM_THREADS": str(rollout.threads),
            # else the memory of each large tensor is the system's, page by page, and is given back at once
            "MALLOC_MMAP_THRESHOLD_": str(_LARGEST_KEPT),
            "MALLOC_TRIM_THRESHOLD_": str(_LARGEST_KEPT),
        }
    return variables


def check_server_info(info: Mapping[str, Any], rollout: RolloutConfig, spec: SpecConfig) -> None:
    """Assert that the server runs with the flags it was given; SGLang changes some without a word.

    Raises RuntimeError naming each difference, or what keeps rlpipe's plugin from working.
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
            # what NEXTN resolves to
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
            f"the SGLang server does not run as it was told: {'; '.join(wrong)}. Look for conflicting "
            "rollout.sglang.extra_arguments."
        )
    if rollout.sglang.plugin:
        _require_plugin(info.get("internal_states") or [{}])


def _require_plugin(states: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a server in which a process lacks rlpipe's plugin. states: one per scheduler."""
    for told in (state.get("rlpipe_plugin") or {} for state in states):
        for role in ("scheduler", "http"):
            if (said := told.get(role)) != "ok":
                raise RuntimeError(
                    f"rlpipe's plugin does not work in the SGLang server's {role} process: "
                    f"{said or 'it did not load, see the log of the server (is SGLANG_PLUGINS set?)'}. Set "
                    "rollout.sglang.plugin=false to do without it: entropies are estimates then."
                )
