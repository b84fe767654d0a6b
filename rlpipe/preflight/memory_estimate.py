"""Estimates the peak memory of each process of a run from shapes and settings, before anything is started.

Owns the sums; `memory_check` compares them with the memory of the machine. Reads `config.json` and loads no
torch. EAGLE-3 drafts and environments are not counted; on a GPU, `RESERVED` bytes are left for libraries and
the CUDA context. `scripts/bench/memory_estimate.py` compares the sums with measured processes.

A trainer rank needs these bytes, with P trainable parameters, e bytes per element, N tokens in a micro-batch,
hidden size H, intermediate size F, width q of the queries, width k of the keys, and width d of a head; q, k
and F are divided by tp:

    gradients    4 P
    optimizer    8 P, and in bf16 4 P more for master weights; divided by dp if sharded
    a layer      N e (4 H + 3 q + 3 k + 4 d + 3 F)    stored for its gradient
    backward     N e (3 H + 4 F)                      in addition, while the gradient is computed
    experts      F is the sum over the experts that read one token; their inputs and two more products of
                 width F are stored too
    head         2 copies of a chunk of logits (3 for several chunks); its float32 gradient if trained

Without recomputation, the activations of every layer are stored. With recompute=full, N e H bytes of each
layer are stored, and all activations of only one layer at a time. With recompute=selective, everything is
stored except the outputs of MLPs and experts, which are stored for one layer at a time. With `pp` pipeline
stages, stage s (counted from 0) stores pp - s micro-batches. With trainer.sp, H / tp replaces H.

A process on a CPU needs more (`_on_host`): libraries, and freed blocks that its allocator retains. A trainer
also needs the copy from which a checkpoint is written: the optimizer state once and the weights twice (to
resume, and in Hugging Face's format). With run.save_async training continues while the copy exists.
"""

from __future__ import annotations

import math
import subprocess
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path

from rlpipe.config.cuda_graphs import captured_batches
from rlpipe.config.lora import LoraConfig
from rlpipe.config.machine import has_gpus
from rlpipe.config.paths import resolve_model
from rlpipe.config.rollout import PACKED_FROM, PARKED, Dtype, EngineKind
from rlpipe.config.run import ClusterMode, Config, Task
from rlpipe.config.spec import SpecMode
from rlpipe.config.trainer import Precision, Recompute, TrainerConfig
from rlpipe.models import read_architecture
from rlpipe.models.base import Architecture
from rlpipe.models.checkpoint import is_mtp_weight, read_config
from rlpipe.models.delta_net import DeltaNet

GIB, MIB = 1 << 30, 1 << 20
RESERVED = GIB  # GPU bytes of each process for CUDA context, libraries and NCCL (an assumption)
HEAD_BYTES = {True: GIB, False: GIB // 4}  # on a GPU? -> bytes of a chunk of logits (trainer/logprobs)
HEAD_BLOCK = 1 << 14
DELTA_CHUNK = 64  # tokens that a delta net reads at once
ROW_STREAMS = 7  # arrays of an engine on the host that have 8 bytes for each slot
LIBRARIES = 600 * MIB  # torch, Megatron-core and tokenizers in a process on a CPU (measured)
RETAINED = 0.5  # share of a step's freed memory that glibc's allocator retains on a CPU (measured)
KERNELS = 64 * MIB  # bytes that oneDNN retains for the sizes of earlier matrix products (measured)
SERVER_FRACTION = 0.85  # approximate share of a GPU's memory that SGLang takes by default


@dataclass(slots=True, kw_only=True, frozen=True)
class Memory:
    """Peak bytes of one process. parts: bytes by purpose. count: number of such processes.

    on_gpu: whether the bytes are GPU memory.
    """

    process: str
    parts: dict[str, int]
    count: int = 1
    on_gpu: bool = False

    @property
    def total(self) -> int:
        """Total bytes."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        """Return the total, and then each part that is larger than a twentieth of a GiB."""
        shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items() if size > GIB // 20)
        return f"{self.count} x {self.process}: {self.total / GIB:.1f} GiB" + (f" ({shown})" if shown else "")


@cache
def parameters(arch: Architecture, tp: int = 1, ep: int = 1, layers: range | None = None) -> tuple[int, int]:
    """Count the parameters of the model and of its draft on one of `tp` * `ep` ranks that split matrices.

    layers: layers of a pipeline stage (None: all). The first stage has the embedding. The last stage has
    norm, head and draft, and a copy of the embedding if there is a draft or the head is tied.
    """
    layers = layers or range(arch.layers)
    last = layers.stop == arch.layers
    ends = {"model.embed_tokens.weight": layers.start == 0 or (last and (arch.tied or arch.mtp_layers > 0))}
    sizes = {True: 0, False: 0}  # belongs to the draft? -> parameters

    # Count one layer of each kind and multiply, instead of listing the weights of all layers.
    dense = arch.experts.dense if arch.experts else 0
    few, like = replace(arch, layers=dense + 1), Counter(min(layer, dense) for layer in layers)
    if arch.delta:
        # Layer 0 represents all layers with a delta net, layer 1 all layers without one.
        few = replace(arch, layers=2, delta=replace(arch.delta, linear=(True, False)))
        like = Counter(int(not arch.delta.linear[layer]) for layer in layers)

    for name, shape in few.weight_shapes(mtp=bool(arch.mtp_layers)).items():
        size = prod(shape) // (tp if len(shape) > 1 else 1) // (ep if ".experts." in name else 1)
        times = int(ends.get(name, last))
        if name.startswith("model.layers."):
            times = like[int(name.split(".")[2])]
        if not (arch.tied and name == "lm_head.weight"):
            sizes[is_mtp_weight(name)] += size * times
    return sizes[False], sizes[True]


def _kinds(arch: Architecture) -> tuple[int, int]:
    """Count the layers with a delta net, and those with attention."""
    linear = sum(arch.delta.linear) if arch.delta else 0
    return linear, arch.layers - linear


def adapter_parameters(arch: Architecture, lora: LoraConfig, tp: int = 1) -> int:
    """Count the parameters of LoRA adapters on one of `tp` ranks that split one side of each matrix."""
    query, keys = arch.heads * arch.head_dim // tp, arch.kv_heads * arch.head_dim // tp
    inner = arch.inner // tp
    sides = lora.attention * (4 * arch.hidden + 2 * query + 2 * keys)
    sides += lora.mlp * (3 * arch.hidden + 3 * inner)
    return lora.rank * arch.layers * sides


def trainer_memory(arch: Architecture, config: Config, *, on_gpu: bool = False) -> Memory:
    """Estimate one trainer rank of the pipeline stage that needs the most memory."""
    stages, first = [], 0
    for stage, count in enumerate(config.trainer.stage_layers(arch.layers)):
        layers = range(first, first + count)
        stages.append(_stage_memory(arch, config, layers, config.trainer.pp - stage, on_gpu))
        first += count
    return max(stages, key=lambda memory: memory.total)


def _stage_memory(arch: Architecture, config: Config, layers: range, in_flight: int, on_gpu: bool) -> Memory:
    """Estimate a trainer rank that has some of the layers.

    in_flight: number of micro-batches with activations in memory at once.
    """
    trainer = config.trainer
    half = trainer.precision is Precision.BF16
    size = _bytes_trained(config)
    ep = trainer.expert_ranks(arch.experts.count if arch.experts else 0)
    model, draft = parameters(arch, trainer.tp, ep, layers)

    # RL trains the policy or its adapters. The draft is trained in adaptation and online training.
    adapts = config.task is Task.MTP_ADAPT
    online = adapts or (config.draft.online and not config.cotrains_draft)
    adapters = adapter_parameters(replace(arch, layers=len(layers)), trainer.lora, trainer.tp)
    policy = adapters if trainer.lora.active else model
    trained = (0 if adapts else policy) + (draft if online else 0)

    # Count the parameters with optimizer state on this rank. A distributed optimizer shards the state of the
    # full model, all experts included, over all data parallel ranks.
    stepped = trained
    if trainer.distributed_optimizer:
        whole = parameters(arch, trainer.tp, layers=layers)[0]
        more = 0 if adapts or trainer.lora.active else whole - model
        stepped = (trained + more) // (trainer.dp * trainer.cp)

    # A KL penalty needs a copy of the initial weights, except with adapters, because they can be disabled.
    own = config.algo.kl_coef and not adapts and not trainer.lora.active
    reference = model + draft if own else 0
    kept, head = _activations(arch, trainer, layers, in_flight, on_gpu)

    # In the optimizer step, AdamW computes the square roots of all second moments at once.
    update = 4 * stepped if on_gpu else 0

    # Sending weights to engines needs two buckets of a broadcast, or a copy of all weights.
    sent = sent_bytes(arch, config, on_gpu=on_gpu) or size * (model + draft)

    return Memory(
        process="trainer rank",
        count=trainer.world_size,
        on_gpu=on_gpu,
        parts={
            "weights": size * (model + draft + adapters),
            "reference": size * reference,
            "gradients": 4 * trained,
            "optimizer": (12 if half else 8) * stepped,
            "activations": kept,
            "logits": head,
            "update": max(0, max(update, sent) - kept - head),
        },
    )


def sent_bytes(arch: Architecture, config: Config, *, on_gpu: bool) -> int:
    """Return the bytes of weight buckets that a trainer rank holds at once; 0 if it copies all weights.

    A rank holds two buckets. With experts, a bucket has at least one expert of each expert parallel rank.
    """
    if not (config.broadcasts_weights or on_gpu):
        return 0
    buckets = 2 * config.rollout.sglang.bucket_mb * MIB
    if arch.experts:
        ep = config.trainer.expert_ranks(arch.experts.count)
        buckets = max(buckets, 2 * _bytes_trained(config) * 3 * arch.hidden * arch.inner * ep)
    return buckets


def checkpoint_memory(arch: Architecture, config: Config, *, all_ranks: bool = False) -> Memory:
    """Estimate what saving a checkpoint adds on the host of rank 0, which has the most to copy.

    Each rank copies its share of the optimizer state. The first rank of each data parallel group also copies
    its part of the weights. Rank 0 is in the first pipeline stage and also gathers all weights for the
    Hugging Face format. A distributed optimizer stores float32 master weights too. No GPU memory is added.

    all_ranks: estimate the sum over all hosts instead.
    """
    trainer = config.trainer
    if all_ranks:
        alone = replace(trainer, tp=1, pp=1, cp=1, dp=1, ep=1, sp=False)
        config = replace(config, trainer=alone)
    layers = range(config.trainer.stage_layers(arch.layers)[0])
    parts = _stage_memory(arch, config, layers, config.trainer.pp, on_gpu=False).parts

    state = parts["optimizer"]
    if trainer.distributed_optimizer and trainer.precision is Precision.FP32:
        state = state // 8 * 12

    # Adapters are saved without the backbone.
    resumed = 0 if trainer.lora.active else parts["weights"]
    every = _bytes_trained(config) * sum(parameters(arch))
    return Memory(
        process="a checkpoint, all hosts" if all_ranks else "a checkpoint, host of rank 0",
        parts={"optimizer": state, "weights": resumed, "all weights": every},
    )


def checkpoint_of_run(config: Config, gpu_memory: int) -> Memory | None:
    """Estimate what a checkpoint adds on all hosts of a GPU run; None on CPUs, where `estimate` counts it."""
    if not gpu_memory or not config.run.half.trains:
        return None
    arch = read_architecture(read_config(resolve_model(config.model.path)))
    return checkpoint_memory(arch, config, all_ranks=True)


def _bytes_trained(config: Config) -> int:
    """Return the bytes per element of the trainer's weights."""
    return 2 if config.trainer.precision is Precision.BF16 else 4


def _activations(
    arch: Architecture, trainer: TrainerConfig, layers: range, in_flight: int, on_gpu: bool
) -> tuple[int, int]:
    """Return the peak bytes of a stage's stored activations, and the bytes that the head or backward adds."""
    size = 2 if trainer.precision is Precision.BF16 else 4
    hidden, tp, everywhere = arch.hidden, trainer.tp, trainer.micro_batch_tokens
    tokens = -(-everywhere // trainer.cp)
    query, keys = arch.heads * arch.head_dim // tp, arch.kv_heads * arch.head_dim // tp
    # With experts, each token is copied once for each of its experts.
    copies = arch.experts.per_token if arch.experts else 0
    shared = arch.experts.shared if arch.experts else 0
    inner, vocab = (max(1, copies) * arch.inner + shared) // tp, -(-arch.vocab // tp)

    # With sequence parallelism, tp ranks share the tokens of norms and residuals. A CPU also stores half of
    # the gathered tokens.
    sharing_ranks = tp if trainer.sp else 1
    inputs = 2 * hidden // sharing_ranks + 2 * hidden // (sharing_ranks if on_gpu else 1)

    # Add the norms, residuals and attention of one layer.
    layer = tokens * size * (inputs + 3 * query + 3 * keys + 4 * arch.head_dim)
    layer += 4 * tokens * (2 + arch.heads // tp)
    if arch.latent:
        # Add keys and values as they are before being joined and padded.
        layer += 2 * tokens * size * keys
    if arch.delta:
        # Every layer counts as the larger of a delta net and attention with its gate.
        layer = max(layer + 3 * tokens * size * query, _delta_bytes(arch.delta, tokens, size, hidden, tp))
    if trainer.cp > 1:
        # Add keys and values of the other ranks.
        layer += 2 * everywhere * size * keys

    # Add the MLP or experts of the layer, and what their backward pass needs in addition.
    mlp, backward = 3 * tokens * size * inner, tokens * size * (3 * hidden + 4 * inner)
    if arch.experts:
        mlp += tokens * size * (copies * hidden + 2 * inner) + 8 * tokens * arch.experts.count
        backward += tokens * size * 2 * copies * hidden

    # Add the head; its logits are computed in chunks of rows.
    row = vocab * size
    rows = max(1, HEAD_BYTES[on_gpu] // row)
    chunks = (2 if tokens <= rows else 3) * min(tokens, rows) * row
    head = chunks + 4 * everywhere * size * hidden
    if not trainer.lora.active:
        head += 4 * vocab * hidden + HEAD_BLOCK * hidden * size
    if on_gpu:
        # Add a block of rows in float32, three times.
        head += 12 << 24
    if arch.tied and not trainer.lora.active:
        # The gradient of a tied head is stored until the gradient of the embedding is added.
        backward += vocab * hidden * size
    if layers.stop < arch.layers:
        # Only the last stage has the head; the others store the activations that they pass on.
        head = in_flight * tokens * hidden * size // sharing_ranks
    kept = len(layers) * in_flight
    if trainer.recompute is Recompute.FULL:
        return tokens * hidden * size * kept // sharing_ranks, max(head, layer + mlp + backward)
    if trainer.recompute is Recompute.SELECTIVE:
        return layer * kept, max(head, mlp + backward)
    return (layer + mlp) * kept, max(head, backward)


def _delta_bytes(delta: DeltaNet, tokens: int, size: int, hidden: int, tp: int) -> int:
    """Return the bytes that one gated delta net stores for its gradient; its update rule runs in float32.

    For each token and value head: queries, keys and values in several forms, six rows of a chunk, and the
    token's share of the state that is stored for each chunk.
    """
    wide, heads = 2 * delta.keys + delta.values, delta.value_heads
    rule = heads * (8 * delta.key_dim + 5 * delta.value_dim + 6 * DELTA_CHUNK)
    rule += delta.values * delta.key_dim // DELTA_CHUNK
    return tokens * (4 * size * hidden + (size * (3 * wide + 4 * delta.values) + 4 * rule) // tp)


def engine_memory(arch: Architecture, config: Config, *, on_gpu: bool = False) -> Memory:
    """Estimate one embedded engine."""
    rollout, spec, size = config.rollout, config.spec, _element(config)
    sent = sum(parameters(arch)) * (2 if config.trainer.precision is Precision.BF16 else 4)

    # On a CPU matrices are stored packed for oneDNN. A tied head is then a copy of the embedding, and small
    # float32 matrices are stored both packed and unpacked. (With `cpu_kernels`, bfloat16 is not packed and
    # needs less.)
    arch = replace(arch, mtp_layers=arch.mtp_layers if spec.needs_mtp else 0)
    end = arch.vocab * arch.hidden * size
    weights = sum(parameters(arch)) * size + (0 if on_gpu or not arch.tied else end)
    packed = 0 if on_gpu or size < 4 else _small_matrices(arch) * size

    rows, slots = rollout.max_running, rollout.max_context + spec.drafts + 2
    query, keys = arch.heads * arch.cached_dim, arch.cached_heads * arch.cached_dim
    cache = rows * conversation_bytes(arch, config)
    # Add up the memory of prefill and of the logits of a verify step.
    tokens = min(max(rollout.prefill_tokens, rollout.max_context), rows * rollout.max_context)
    working = tokens * size * (3 * arch.hidden + 3 * query + 2 * keys) + _mlp_bytes(arch, tokens, size)
    working += rows * arch.vocab * ((spec.depth + 1) * (size + 12) + spec.depth * 8)
    host = 0 if on_gpu else 8 * ROW_STREAMS * rows * slots

    # A weight update needs the received weights, and a new embedding or head in addition to the old one.
    replaced = 2 * end + (0 if on_gpu else sent)
    return Memory(
        process="embedded engine",
        count=rollout.workers,
        on_gpu=on_gpu,
        parts={
            "weights": weights,
            "packed": packed,
            "kernels": 0 if on_gpu else KERNELS,
            "kv": cache + host,
            "activations": working,
            "update": max(0, replaced - working),
        },
    )


def _small_matrices(arch: Architecture) -> int:
    """Count the elements of all fused matrices that have fewer than PACKED_FROM elements."""
    query, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    gates = 2 * arch.hidden * arch.inner
    mlps = arch.experts.count if arch.experts else 1
    fused = [arch.hidden * (query + 2 * keys), query * arch.hidden, *(gates, gates // 2) * mlps]
    layer = sum(size for size in fused if size < PACKED_FROM)
    return layer * (arch.layers + arch.mtp_layers)


def server_memory(arch: Architecture, config: Config, gpu_memory: int = 0) -> Memory:
    """Estimate one GPU of an SGLang server.

    gpu_memory: bytes of the GPU; the server takes a fraction of them for weights and KV. With 0, the KV cache
    has the size that `max_running` conversations of `max_context` tokens need.
    """
    rollout, tp, size = config.rollout, config.rollout.sglang.tp, _element(config)
    weights = sum(parameters(arch if config.spec.needs_mtp else replace(arch, mtp_layers=0), tp)) * size

    # The KV cache fills the server's share of the GPU that weights leave free.
    kv = conversation_bytes(arch, config, tp) * rollout.max_running
    if gpu_memory:
        kv = max(0, int((rollout.sglang.memory_fraction or SERVER_FRACTION) * gpu_memory) - weights)
    tokens = max(rollout.prefill_tokens, rollout.max_running)
    query, keys = arch.heads * arch.head_dim // tp, arch.kv_heads * arch.head_dim // tp
    working = tokens * size * (3 * arch.hidden + 2 * query + 2 * keys) + _mlp_bytes(arch, tokens, size) // tp
    # Every rank has the logits and distributions of all tokens of a verify step.
    working += rollout.max_running * (config.spec.depth + 1) * arch.vocab * 16

    return Memory(
        process="SGLang server, each GPU" if gpu_memory else "SGLang server",
        count=rollout.workers * tp,
        on_gpu=bool(gpu_memory),
        parts={
            "weights": weights,
            "kv": kv,
            "activations": working,
            "graphs": _graph_bytes(arch, config) if gpu_memory else 0,
            "bucket": rollout.sglang.bucket_mb * MIB,
        },
    )


def _graph_bytes(arch: Architecture, config: Config) -> int:
    """Return the bytes of draft distributions, [B, gamma, V] float32, that a server's CUDA graphs retain.

    With rlpipe's plugin the graphs of all batch sizes share one buffer; otherwise each graph has a buffer.
    """
    spec, rollout = config.spec, config.rollout
    if spec.mode not in (SpecMode.REJECTION, SpecMode.BLOCK) or not spec.needs_model:
        return 0
    sizes = captured_batches(rollout.max_running, drafts=True)
    return 4 * spec.gamma * arch.vocab * (max(sizes) if rollout.sglang.plugin else sum(sizes))


def _mlp_bytes(arch: Architecture, tokens: int, size: int) -> int:
    """Return the bytes that an engine needs to run the MLP or experts of one layer on `tokens` tokens."""
    if not arch.experts:
        return 3 * tokens * size * arch.intermediate
    own = tokens * arch.experts.per_token * (size * (3 * arch.inner + arch.hidden) + 4 * arch.hidden)
    return own + 3 * tokens * size * arch.experts.shared


def parked_bytes(arch: Architecture, config: Config) -> int:
    """Return the bytes of the conversations that one embedded engine stores in addition to its rows."""
    rollout, pipeline = config.rollout, config.pipeline
    admitted = pipeline.groups_ahead * (1 + pipeline.max_staleness)
    groups = rollout.concurrent_groups or math.ceil(admitted / rollout.workers)
    beyond = max(0, groups * pipeline.group_size - rollout.max_running)
    return min(PARKED * rollout.max_running, beyond) * conversation_bytes(arch, config)


def conversation_bytes(arch: Architecture, config: Config, tp: int = 1) -> int:
    """Return the bytes of keys, values and routes of one conversation on one of `tp` devices.

    The conversation has `max_context` tokens. With latent attention each device stores one latent vector for
    each token; keys and values are computed from it. A delta net stores its state in float32, and one more
    state for each draft token.
    """
    heads = max(1, arch.cached_heads // tp)
    linear, attention = _kinds(arch)
    layers = attention + (arch.mtp_layers if config.spec.needs_mtp else config.spec.needs_model)
    slots = config.rollout.max_context + config.spec.drafts + 2
    keys = (1 if arch.latent else 2) * layers * heads * arch.cached_dim * _element(config)
    routes = route_bytes(arch) if config.rollout.replay_routes else 0
    states = 4 * linear * (arch.delta.state if arch.delta else 0) // tp * (1 + config.spec.drafts)
    return (keys + routes) * slots + states


def route_bytes(arch: Architecture) -> int:
    """Return the bytes per token that record which experts read the token; 0 without experts."""
    if (experts := arch.experts) is None:
        return 0

    # Up to 255 experts, an index takes one byte.
    return (arch.layers - experts.dense) * experts.per_token * (1 if experts.count < 256 else 2)


def _element(config: Config) -> int:
    """Return the bytes per element of the engine's weights and KV cache."""
    return 4 if config.rollout.dtype is Dtype.FLOAT32 else 2


def estimate(config: Config, gpu_memory: int = 0) -> list[Memory]:
    """Estimate each kind of process of a run. gpu_memory: bytes of one GPU, 0 on a CPU."""
    run_mode, processes = config.run.half, []

    # A decoupled actor, if there is one, generates instead of the policy, and both are trained.
    policy = read_architecture(read_config(resolve_model(config.model.path)))
    served = read_architecture(read_config(resolve_model(config.rollout_model)))

    if run_mode.trains:
        trainer = trainer_memory(policy, config, on_gpu=gpu_memory > 0)
        saved = checkpoint_memory(policy, config).total
        processes.append(
            trainer if gpu_memory else _on_host(trainer, config, libraries=LIBRARIES, saved=saved)
        )
        if config.decoupled.active:
            actor = trainer_memory(served, config, on_gpu=gpu_memory > 0)
            saved = checkpoint_memory(served, config).total
            actor = actor if gpu_memory else _on_host(actor, config, libraries=0, saved=saved)
            processes.append(replace(actor, process="trainer rank, the actor's part"))

    if run_mode.generates and config.rollout.engine is EngineKind.SGLANG:
        processes.append(server_memory(served, config, gpu_memory if config.rollout.device != "cpu" else 0))
    elif run_mode.generates:
        engine = engine_memory(served, config, on_gpu=gpu_memory > 0 and config.rollout.device != "cpu")

        # If engine and trainer are one process, it loads libraries only once.
        shared = run_mode.trains and config.cluster.mode is ClusterMode.INLINE
        if not gpu_memory:
            engine = _on_host(engine, config, libraries=0 if shared else LIBRARIES)
            engine = replace(engine, parts=engine.parts | {"parked": parked_bytes(served, config)})
        processes.append(engine)
    return processes


def _on_host(memory: Memory, config: Config, *, libraries: int, saved: int = 0) -> Memory:
    """Add what a process on a CPU needs beyond its tensors: libraries, retained blocks, a checkpoint's copy.

    libraries: their bytes; 0 if they are already counted for another part of the process. saved: bytes of the
    copy from which a checkpoint is written.
    """
    parts = memory.parts
    passing = sum(parts.get(name, 0) for name in ("activations", "logits", "update"))
    retained = int(RETAINED * passing)

    # The copy replaces activations, unless the next step begins while the checkpoint is written.
    run = config.run
    if not (run.save_async and 0 < run.save_every < run.steps):
        saved = max(0, saved - passing - retained)
    more = {"libraries": libraries, "allocator": retained, "checkpoint": saved}
    return replace(memory, parts=parts | more)


def gpu_bytes(config: Config) -> int:
    """Return the bytes of one GPU: `cluster.gpu_gb` if set, else of this machine's first GPU, else 0."""
    if config.cluster.gpu_gb or not has_gpus():
        return int(config.cluster.gpu_gb * GIB)
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout.split()[0]) * MIB if done.returncode == 0 and done.stdout.strip() else 0


def host_bytes() -> int:
    """Return the bytes of memory of this machine, or of the container in which this process runs."""
    total = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024

    # The limit of a container is the limit of its cgroup (version 2).
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return total if text == "max" else min(total, int(text))
