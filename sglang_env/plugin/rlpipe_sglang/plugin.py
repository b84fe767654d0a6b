"""The entry point: the table of hooked functions, the check of their sources, and the report.

SGLang calls `load` in every process and continues if it fails. So the plugin reports its state in
`/server_info`, and rlpipe refuses a server that does not report that all hooks are installed. The first
process has the role `http` and writes answers. Its child processes sample tokens; a `scheduler` is recognised
by its imports.
"""

from __future__ import annotations

import hashlib
import inspect
import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from rlpipe_sglang import (
    attention,
    cpu,
    drafts,
    in_flight,
    layout,
    measure,
    model_files,
    pack,
    ranks,
    routes,
    verify,
    vocabulary,
    width,
)

REPORT = "rlpipe_plugin"
_ON_CPU = "SGLANG_USE_CPU_ENGINE"


class Hook(NamedTuple):
    """A hooked function of SGLang. role: the kind of process that it runs in.

    place: module:function under sglang.srt. source: first digits of the SHA-256 of its source. function: the
    hook, which runs "around" or "after" it (kind); None if the plugin only relies on SGLang's function.
    """

    role: str
    place: str
    source: str
    function: Callable | None = None
    kind: str = "around"

    @property
    def module(self) -> str:
        """Full name of the module."""
        return f"sglang.srt.{self.place.partition(':')[0]}"

    @property
    def name(self) -> str:
        """Name of the function in its module, including the class."""
        return self.place.partition(":")[2]


def told_by_scheduler(result: Any, *_: Any) -> None:
    """After a scheduler's `get_internal_state`: add the report on hooks, and which code verified drafts."""
    known = [len(head.ids) for head in vocabulary.cut_heads]
    result.internal_state[REPORT] = report | {"judged": dict(verify.judged), "draft_vocab": known}


async def told_by_http(original: Callable, manager: Any) -> list[dict[str, Any]]:
    """Around the HTTP process's `get_internal_state`: merge the schedulers' reports with its own."""
    return [state | {REPORT: state.get(REPORT, {}) | report} for state in await original(manager)]


def started(original: Callable, scheduler: Any) -> None:
    """Around `Scheduler.run_event_loop`: after graphs are captured, compare ranks before serving.

    Raises RuntimeError if they differ, which ends the server.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.runtime_context import get_parallel

    # If SGLang cannot install a hook, it logs this and starts without the hook.
    missing = [place for place in asked_hooks if place not in HookRegistry._patched]
    status = f"SGLang could not hook: {', '.join(missing)}" if missing else "ok"
    verify.warm_up(scheduler)
    ranks.compare(f"{status}, drafting by {'torch' if drafts.failed else 'kernels'}", get_parallel().tp_group)
    report["scheduler"] = status
    original(scheduler)


_LOGPROBS, _MANAGER = "layers.logprob_processor", "managers.tokenizer_manager:TokenizerManager"
_STATE = "managers.scheduler_components.internal_state:SchedulerInternalStateController"
_SCHEDULER = "managers.scheduler:Scheduler"
_UPDATER = "managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_RESULT = "managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor"
_CONTROL = "managers.tokenizer_control_mixin:TokenizerControlMixin"
_SAMPLED, _WRITTEN = "OutputLogprobProcessor.compute_logprobs", "LogprobResult.write_output_to"
_NATIVE = "layers.attention.torch_native_backend:TorchNativeAttnBackend"
_CHECKER = "utils.weight_checker:WeightChecker"
_SPEC, _DRAFT = "speculative.spec_utils", "speculative.eagle_worker_v2:EagleDraftWorker"
_COMMON = "speculative.eagle_worker_common"
_GRAPHS = "model_executor.runner_backend.full_cuda_graph_backend"
_HOST = "mem_cache.pool_host.common"
HOOKS = (
    Hook("scheduler", f"{_SPEC}:sample_draft_proposal", "2ddefb2cc9a94828", drafts.proposed),
    Hook("scheduler", f"{_SPEC}:renorm_draft_probs", "0962a891a575fe7d", drafts.prefilled),
    Hook("scheduler", f"{_SPEC}:fast_sample", "755612cf80974fe7", drafts.drawn),
    Hook("scheduler", "speculative.eagle_utils:eagle_sample", "b497c62acadc5e71", verify.sampled),
    Hook("scheduler", f"{_DRAFT}.alloc_memory_pool", "c0abe3d9d12ecf79", drafts.allocated),
    Hook("scheduler", f"{_DRAFT}.draft_forward", "e1dc83274e26941e", drafts.captured),
    Hook("scheduler", f"{_DRAFT}.draft", "bc895b907be4e337"),
    Hook("scheduler", f"{_GRAPHS}:FullCudaGraphBackend.capture_one", "b11da397ea881b30"),
    Hook("scheduler", f"{_DRAFT}._draft_extend_for_prefill", "3189eb126ef534d3"),
    Hook("scheduler", f"{_DRAFT}._draft_extend_for_decode", "43fac9eb9ad0ac5e", drafts.extended),
    Hook("scheduler", f"{_COMMON}:prepare_for_draft_extend", "10d99587687d599e", drafts.selected, "after"),
    Hook("scheduler", f"{_LOGPROBS}:compute_spec_logprobs", "342e0ba0fc45731d", measure.verified),
    Hook("scheduler", f"{_LOGPROBS}:{_SAMPLED}", "4ec49f40acc4858b", measure.sampled, "after"),
    Hook("scheduler", f"{_LOGPROBS}:{_WRITTEN}", "285dcca6c4bc612c", measure.written, "after"),
    Hook("scheduler", f"{_STATE}.get_internal_state", "f01b820545684122", told_by_scheduler, "after"),
    Hook("scheduler", f"{_SCHEDULER}.run_event_loop", "faae8efd03360b0c", started),
    Hook("scheduler", f"{_SCHEDULER}.process_batch_result", "726305f46a979a47", in_flight.take),
    Hook("scheduler", f"{_SCHEDULER}.event_loop_overlap", "c093eb14e50c1ac6"),
    Hook("scheduler", f"{_SCHEDULER}._reqs_finishing_inflight", "0a23fa4468031e1d"),
    Hook("scheduler", f"{_SCHEDULER}.pause_generation", "b5afa4cbaf6fbea9"),
    Hook("scheduler", f"{_UPDATER}.begin_weight_update", "fd496cbc2ddb0f75", in_flight.begun),
    Hook("scheduler", f"{_UPDATER}.update_weights_from_disk", "7dea681e1eed3a25", in_flight.begun),
    Hook("scheduler", f"{_RESULT}._build_auxiliary_commits", "65761aebfc186f66"),
    Hook("scheduler", f"{_RESULT}.process_batch_result_prefill", "a43539bf03ee4abf"),
    Hook("scheduler", f"{_RESULT}.process_batch_result_decode", "c4c08ab3f8690085"),
    Hook("scheduler", f"{_NATIVE}._run_sdpa_forward_extend", "cd0f84f549310107", attention.extended),
    Hook("scheduler", f"{_NATIVE}._run_sdpa_forward_decode", "062856df45d2fe12", attention.decoded),
    Hook("scheduler", f"{_CHECKER}._compute_checksum", "adda915b43887032", layout.told, "after"),
    Hook("scheduler", f"{_HOST}:_cuda_host_register", "f13fb8ab7ebf962a", routes.registered),
    Hook("http", f"{_MANAGER}.add_logprob_to_meta_info", "bea1978a5c5018e8", pack.packed),
    Hook("http", f"{_MANAGER}.update_request_meta_info", "acccc58e0ca8eb2f", pack.noted),
    Hook("http", f"{_CONTROL}.get_internal_state", "2c8c8a78ff656d01", told_by_http),
)
_WORKER, _REQUEST = "speculative.eagle_worker_v2:EAGLEWorkerV2", "managers.schedule_batch:Req"
ADAPTIVE = (  # with spec.adaptive=true
    Hook("scheduler", f"{_WORKER}.init_cuda_graphs", "4899c2890def19e0", width.installed),
    Hook("scheduler", f"{_WORKER}._forward_prefill_batch", "d98e2fbfef949bee", width.prefilled),
    Hook("scheduler", f"{_WORKER}._build_trivial_verify_input", "85faa54279bb0e90", width.undrafted, "after"),
    Hook("scheduler", f"{_REQUEST}.update_spec_correct_drafts_histogram", "6cf6d992e9f9ccc0", width.counted),
    Hook("scheduler", f"{_WORKER}.forward_batch_generation", "e41ad8d8053cf2c0"),
    Hook("scheduler", f"{_WORKER}.on_verify_complete_cpu", "94142dddb8d16e90"),
    Hook("scheduler", f"{_RESULT}._resolve_spec_v2_tokens", "d79752842869a4d7"),
    Hook(
        "scheduler",
        "speculative.adaptive_runtime_state:AdaptiveController.activate_step_by_batch",
        "6819eab7a655bd9a",
    ),
    Hook("http", f"{_MANAGER}._calculate_spec_decoding_metrics", "8f1657dbeea4ba06"),
)
_PROCESSOR = "layers.logits_processor:LogitsProcessor"
_RECORDED = "record_weight_version_after_update"
CUT = (  # if spec.draft_vocab names a table
    Hook("scheduler", f"{_UPDATER}.{_RECORDED}", "449301bf5d5a1860", vocabulary.updated, "after"),
    Hook("scheduler", f"{_UPDATER}.update_weights_from_tensor", "7ffddf6f5fef887d"),
    Hook("scheduler", f"{_UPDATER}.update_weights_from_distributed", "aea7a898d7666ec9"),
    Hook("scheduler", f"{_DRAFT}.init_lm_head", "a2232462de7a2a21"),
    Hook("scheduler", f"{_PROCESSOR}._get_logits", "565c058034e5f7e2"),
    Hook("scheduler", f"{_PROCESSOR}._compute_lm_head", "c5062fc225cae30d"),
)
_HANDLERS = "models.deepseek_common.attention_backend_handler"
_SHARED = "ForCausalLM.set_embed_and_head"
CPU = (  # if a server has no GPU
    Hook("http", "entrypoints.engine:_set_envs_and_config", "b3ddd8a51c625a11", cpu.forked),
    Hook("scheduler", f"{_HANDLERS}:AttentionBackendRegistry.get_handler", "b2cf2a026397b847", cpu.handler),
    Hook("scheduler", "layers.rotary_embedding.factory:get_rope_cpu", "e4dff05bd224a89b", cpu.rotary),
    Hook("scheduler", f"models.deepseek_v2:DeepseekV2{_SHARED}", "3438d8ef569c0d5f", cpu.shared),
    Hook("scheduler", f"models.glm4_moe:Glm4Moe{_SHARED}", "3438d8ef569c0d5f", cpu.shared),
)
FILES = (  # to import only the files of the served models
    Hook("scheduler", "models.registry:_ModelRegistry._load_default_models", "415e218c2bab0905"),
    Hook("scheduler", "models.registry:import_model_classes", "806f81fe11d51adc"),
    Hook("scheduler", "model_loader.utils:get_model_architecture", "eb945a285e9b05cb", model_files.one_file),
)
report: dict[str, str] = {}  # of this process: role -> "ok", or the problem
asked_hooks: list[str] = []  # full names of the functions that this process asked SGLang to hook


def digest(hook: Hook) -> str:
    """Return the value of `Hook.source` for the installed SGLang."""
    found = inspect.unwrap(pkgutil.resolve_name(f"{hook.module}:{hook.name}"))
    return hashlib.sha256(inspect.getsource(found).encode()).hexdigest()[:16]


def load() -> None:
    """Hook the functions of this process's role; if one has changed, only those that report the change."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if multiprocessing.parent_process() is None:
        role = "http"
    elif "sglang.srt.managers.scheduler" in sys.modules:
        role = "scheduler"
    else:
        return
    asked = {width.ASKED: ADAPTIVE, vocabulary.ASKED: CUT, _ON_CPU: CPU, model_files.ASKED: FILES}
    hooks = [*HOOKS, *(hook for name, more in asked.items() if name in os.environ for hook in more)]
    hooks = [hook for hook in hooks if hook.role == role]
    report.clear()  # a forked process has a copy of its parent's report
    changed = [hook.place for hook in hooks if digest(hook) != hook.source]
    intact = "ok" if role == "http" else ranks.WAITING
    report[role] = f"SGLang has changed: {', '.join(changed)}" if changed else intact
    asked_hooks.clear()
    for hook in hooks:
        if hook.function and (not changed or hook.function in (told_by_scheduler, told_by_http)):
            asked_hooks.append(f"{hook.module}.{hook.name}")
            HookRegistry.register(f"{hook.module}.{hook.name}", hook.function, HookType(hook.kind))
