"""Drives SGLang's own scheduler classes as on a GPU: overlapped steps, several ranks. Prints JSON.

    python overlapping_scheduler.py CASE    in the server's environment, with rlpipe's plugin on the path

Real are the scheduler's loop, its pause, its processing of results, the weight updater, the versions of
tokens, the drafting of a chain, the capture of graphs, the registry of hooks, and gloo groups between ranks.
Not real are a step, which makes the next tokens of each request at once, and the choice of batches.
"""

import contextlib
import json
import multiprocessing
import sys
import tempfile
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import MagicMock

import sglang.srt.managers.scheduler as scheduling
import sglang.srt.managers.scheduler_components.weight_updater as updating
import sglang.srt.model_executor.runner_backend.full_cuda_graph_backend as capturing
import sglang.srt.speculative.eagle_draft_cuda_graph_runner as capturing_drafts
import sglang.srt.speculative.eagle_worker_v2 as eagle
import torch
import torch.distributed as dist
from rlpipe_sglang import drafts, plugin, ranks, verify
from sglang.srt import runtime_context
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_utils import capture_mode
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.utils.weight_versions import compute_weight_version_spans

TOKENS = 3  # that a step makes for each request
SERVING = SimpleNamespace(weight_version="1")


class Request:
    """What versions and batches need of a request."""

    def __init__(self):
        self.output_ids, self.weight_version_events = [], []

    def spans(self):
        found = compute_weight_version_spans(
            self.weight_version_events, SERVING.weight_version, len(self.output_ids)
        )
        return [[span.version, span.start, span.end] for span in found]


class Batch:
    """One decode step of requests, whose result is the version of the weights that made its tokens."""

    forward_mode = ForwardMode.DECODE
    has_grammar, is_extend_in_batch = False, False

    def __init__(self, reqs, number=0):
        self.reqs, self.number = reqs, number

    def copy(self):
        return Batch(self.reqs, self.number)


def scheduler_of(requests):
    """A scheduler whose loop, pause and results are SGLang's, at a step of `requests`."""
    made = object.__new__(scheduling.Scheduler)
    parts = (
        "publish_load_snapshot load_publisher load_inquirer tree_cache metrics_reporter load_snapshot_writer"
    )
    for name in parts.split():
        setattr(made, name, MagicMock())
    for name in ("_record_step_counters", "_maybe_clear_mm_inputs", "maybe_send_health_check_signal"):
        setattr(made, name, MagicMock())
    made.scheduler_stage_metrics = made.hisparse_coordinator = made.chunked_req = made._pause_started_at = (
        None
    )
    made.enable_fpm = made.enable_continuous_input_polling = made._engine_paused = made.gracefully_exit = (
        False
    )
    made.disaggregation_mode = scheduling.DisaggregationMode.NULL
    made.require_mlp_sync = made.enable_unified_memory = made.is_generation = False
    made.enable_skip_finishing_decode, made.waiting_queue, made._pause_intervals = True, [], []
    made.running_batch = made.last_batch = Batch(requests)
    made.result_queue = scheduling.deque()
    made.processed = []

    def process(batch, result):
        made.processed.append(batch.number)
        for request in batch.reqs:
            request.output_ids += [result] * TOKENS

    made.batch_result_processor = SimpleNamespace(process_batch_result_decode=process)
    return made


def updater_of(scheduler):
    """The weight updater of a server without models."""
    runner = SimpleNamespace(weight_updater=MagicMock())
    worker = SimpleNamespace(weight_update_runners=lambda: [("target", runner)])
    return updating.SchedulerWeightUpdaterManager(
        tp_worker=worker,
        draft_worker=None,
        memory_saver_adapter=None,
        flush_cache=lambda **_: True,
        is_fully_idle=lambda: True,
        scheduler=scheduler,
    )


def update(scheduler, updater, version):
    """What arrives at a scheduler in one update, in place."""
    scheduler.pause_generation(SimpleNamespace(mode="in_place"))
    assert updater.begin_weight_update(SimpleNamespace(selector="all")).success
    scheduler.record_weight_version_change(version)
    updater._session = None
    scheduler.continue_generation(SimpleNamespace(torch_empty_cache=False))


def versions():
    """Tokens of the step in flight, by the versions that SGLang reports."""
    request = Request()
    scheduler = scheduler_of([request])
    updater = updater_of(scheduler)
    batch = Batch([request])
    scheduler.process_batch_result(batch, "1")
    scheduler.result_queue.append((batch.copy(), "1"))
    update(scheduler, updater, "2")
    scheduler.process_batch_result(*scheduler.result_queue.popleft())
    scheduler.process_batch_result(batch, "2")
    return {"spans": request.spans(), "made_by": request.output_ids}


def loop():
    """SGLang's overlapping loop over six steps, with an update while the third is in flight."""
    request = Request()
    scheduler = scheduler_of([request])
    updater = updater_of(scheduler)
    scheduler.last_batch = None
    launched, waiting, finishing = [], [], []

    def ingest():
        if len(launched) == 3 and SERVING.weight_version == "1":
            update(scheduler, updater, "2")
        scheduler.gracefully_exit = len(launched) == 5  # after one more

    def next_batch(running_batch, last_batch):
        waiting.append(len(scheduler.result_queue))
        request.next_output_finishes_by_length = lambda: True
        request.beam_group = None
        finishing.append(len(scheduler._reqs_finishing_inflight(Batch([request]))))
        return SimpleNamespace(running_batch=running_batch, batch_to_run=Batch([request], len(launched)))

    def run(batch):
        launched.append(batch.number)
        return SERVING.weight_version

    scheduler.ingest_requests, scheduler.get_next_batch_to_run, scheduler.run_batch = ingest, next_batch, run
    scheduler.is_disable_overlap_for_batch = lambda *_, **__: False
    scheduler._apply_war_barrier = lambda: None
    scheduler.event_loop_overlap()
    return {
        "launched": launched,
        "processed": scheduler.processed,
        "waiting": waiting,
        "finishing": finishing,
        "spans": request.spans(),
        "made_by": request.output_ids,
    }


SIZES = [1, 2, 3, 5, 8]  # captured batches
GAMMA, VOCAB, HIDDEN = 3, 11, 2


def worker_of(logits):
    """A draft worker whose model gives `logits` [gamma - 1, B, V], one row of the first axis a pass."""
    made = object.__new__(eagle.EagleDraftWorker)
    made.speculative_num_steps, made.speculative_num_draft_tokens, made.topk = GAMMA, GAMMA + 1, 1
    made.hot_token_id, made.index_share_for_mtp_iteration = None, False
    made.seed_dsa_topk_from_draft_extend = False
    prealloc = torch.zeros(max(SIZES), GAMMA, dtype=torch.int64)
    made._topk1_parents_prealloc = made._topk1_score_indices_prealloc = prealloc
    made.draft_attn_backend = SimpleNamespace(attn_backends=[None] * GAMMA)
    passes = iter(logits)

    def forward(_):
        output = SimpleNamespace(next_token_logits=next(passes), hidden_states=None)
        return SimpleNamespace(logits_output=output)

    architectures = SimpleNamespace(architectures=["Qwen2ForCausalLM"])
    model = SimpleNamespace(hf_config=architectures, model_is_mrope=False)
    made.draft_runner = SimpleNamespace(forward=forward, canary_manager=None, model_config=model)
    return made


def drafting(batch):
    """The draft pass of a captured step of `batch` requests, and the z that it must leave.

    The last of several requests only pads the batch: what SGLang's buffers hold of it may be anything.
    """
    generator = torch.Generator().manual_seed(batch)
    logits = torch.randn(GAMMA - 1, batch, VOCAB, generator=generator)
    first = torch.randn(batch, VOCAB, generator=generator)
    temperatures = torch.full((batch, 1), 0.5)
    if batch > 1:
        logits[:, -1], first[-1], temperatures[-1] = float("nan"), float("inf"), 0.0
    sampling = SimpleNamespace(
        is_all_greedy=False, temperatures=temperatures, top_ks=None, sampling_seed=None
    )
    expected = torch.stack([first, *(logits / temperatures)], 1)

    def run():
        spec_info = SimpleNamespace(
            topk_p=torch.ones(batch, 1),
            topk_index=torch.zeros(batch, 1, dtype=torch.int64),
            hidden_states=torch.zeros(batch, HIDDEN),
            draft_probs=first,
        )
        forward_batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            spec_info=spec_info,
            sampling_info=sampling,
            batch_size=batch,
            positions=torch.zeros(batch, dtype=torch.int64),
            out_cache_loc=torch.zeros(batch * GAMMA, dtype=torch.int64),
        )
        return worker_of(logits).draft_forward(forward_batch)

    return run, expected


def graphs():
    """Bytes that SGLang's graphs keep of drafts, captured as on a GPU, and whether each has the right ones.

    Not real are the CUDA graph itself, which would record the pass, and the model.
    """
    spec = SimpleNamespace(speculative_use_rejection_sampling=True, enable_multi_layer_eagle=False)
    eagle.forward_context = lambda *_, **__: contextlib.nullcontext()
    eagle.get_spec = runtime_context.get_spec = lambda: spec
    runtime_context.get_disagg = lambda: SimpleNamespace(disaggregation_mode="null")
    capturing.get_parallel = lambda: SimpleNamespace(tp_group=MagicMock())
    capturing.graph_pool_capture_scope = contextlib.nullcontext
    torch.cuda.CUDAGraph = MagicMock
    module = SimpleNamespace(synchronize=lambda: None, graph=lambda **_: contextlib.nullcontext())
    backend = capturing.FullCudaGraphBackend(SimpleNamespace(device_module=module))
    backend._precarve = SimpleNamespace(measure=contextlib.nullcontext, mint=lambda: None)

    right = []
    for batch in reversed(SIZES):
        run, expected = drafting(batch)
        with capture_mode.model_capture_mode():
            backend.capture_one(batch, run)

        # As for a step of one request less, except of the smallest size.
        real = max(1, batch - 1)
        runner = capturing_drafts.EAGLEDraftCudaGraphRunner
        *_, tokens, z = runner._postprocess_output_to_raw_bs(None, backend._outputs[batch], real)
        inside = bool(((tokens >= 0) & (tokens < VOCAB)).all()) and tokens.shape == (real, GAMMA)
        right.append(inside and torch.equal(z, expected[:real]))

    laws = [backend._outputs[batch][3].untyped_storage() for batch in SIZES]
    kept = {law.data_ptr(): law.nbytes() for law in laws}

    # Outside of a capture a step's drafts are its own: nothing copies them before the next step.
    eager = [drafting(batch)[0]()[3].untyped_storage().data_ptr() for batch in (8, 8)]
    return {"kept": sum(kept.values()), "right": right, "eager_in_graphs": len(kept.keys() & set(eager))}


def one_rank(rank, store, fault, answers):
    """A rank of two starts its loop; `fault` befalls the second one only."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    group = SimpleNamespace(world_size=2, cpu_group=dist.group.WORLD)
    runtime_context.get_parallel = lambda: SimpleNamespace(tp_group=group)
    served = []
    scheduling.dispatch_event_loop = served.append
    verify.warm_up = lambda _: None
    if rank and fault == "hook":
        HookRegistry._patched.remove("sglang.srt.speculative.spec_utils.fast_sample")
    if rank and fault == "kernels":
        drafts.failed.append("a compiler's error")

    scheduler = object.__new__(scheduling.Scheduler)
    scheduler.device, scheduler.schedule_stream = "cpu", SimpleNamespace()
    scheduler.metrics_reporter = MagicMock()
    scheduler.device_module = MagicMock()
    try:
        scheduler.run_event_loop()
        answers.put((rank, [plugin.report["scheduler"], ranks.Compared.ranks, len(served)]))
    except RuntimeError as error:
        answers.put((rank, [str(error), ranks.Compared.ranks, len(served)]))
    dist.destroy_process_group()


def compared():
    """What two ranks do at their start, by what befell one of them."""
    found = {}
    context = multiprocessing.get_context("fork")
    for fault in ("none", "hook", "kernels"):
        answers = context.Queue()
        with tempfile.TemporaryDirectory() as folder:
            given = f"{folder}/store", fault, answers
            both = [context.Process(target=one_rank, args=(rank, *given)) for rank in range(2)]
            for process in both:
                process.start()
            found[fault] = [answer for _, answer in sorted(answers.get(timeout=60) for _ in both)]
            for process in both:
                process.join()
    return found


def cases():
    """A scheduler's process: its plugin's hooks in place, then all cases."""
    plugin.load()
    HookRegistry.apply_hooks()
    found = {"compared": compared()}

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel = SimpleNamespace(pp_size=1, tp_group=SimpleNamespace(cpu_group=dist.group.WORLD))
        context = SimpleNamespace(override=lambda _, **changed: SERVING.__dict__.update(changed))
        scheduling.get_parallel = updating.get_parallel = lambda: parallel
        scheduling.get_serving, scheduling.get_context = lambda: SERVING, lambda: context
        scheduling.flush_trace_batch = lambda _: None
        for case in (versions, loop, graphs):
            SERVING.weight_version = "1"
            found[case.__name__] = case()
        dist.destroy_process_group()
    return found


def run(answers):
    """Hand out what the cases found, or why they broke off."""
    try:
        answers.put(cases())
    except BaseException as error:
        answers.put({"error": repr(error)})
        raise


if __name__ == "__main__":
    # The plugin knows a scheduler by its imports, and by its parent.
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=run, args=(answers,))
    process.start()
    print(json.dumps(answers.get(timeout=100)))
    process.join()
    sys.exit(process.exitcode)
