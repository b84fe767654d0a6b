"""How much memory each process of a run takes at its peak, from shapes and settings, before anything starts.

Owns the sums; `refusal` compares them with what is there. Reads `config.json` and loads no torch. Libraries,
the CUDA context (`RESERVED` of each card is left to those), EAGLE-3 drafts and environments are not counted.
`scripts/bench/memory_estimate.py` holds the sums against measured processes.

A trainer rank with P trainable parameters, e bytes an element, N tokens of a micro-batch, H and F the
hidden and intermediate sizes, q and k the widths of queries and of keys (q, k and F divided by tp), d of a
head, holds

    gradients    4 P            optimizer  8 P, in bf16 4 P more of master weights; divided by dp if sharded
    a layer      N e (4 H + 3 q + 3 k + 4 d + 3 F)    kept for its gradient
    backward     N e (3 H + 4 F)                      beside it while that is computed
    experts      F of those that read a token together; their inputs and two more products of F are kept too
    head         2 chunks of logits, 3 where there are several; its gradient, in float32, if it learns

Without recomputation every layer is kept; with trainer.recompute=full N e H of each, and one layer at a time;
with selective all but what MLPs and experts make of their inputs, and that of one layer at a time. Of `pp`
pipeline stages the s-th, counted from 0, keeps that of pp - s micro-batches. With trainer.sp H is H / tp.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path

from rlpipe.config.lora import LoraConfig
from rlpipe.config.paths import resolve
from rlpipe.config.rollout import Dtype, EngineKind
from rlpipe.config.run import Config, Task
from rlpipe.config.trainer import Precision, Recompute, TrainerConfig
from rlpipe.models import read_architecture
from rlpipe.models.base import Architecture
from rlpipe.models.checkpoint import is_mtp_weight, read_config
from rlpipe.models.delta_net import DeltaNet

GIB, MIB = 1 << 30, 1 << 20
RESERVED = GIB  # of a card, for each process on it: CUDA context, libraries, NCCL (an assumption)
HEAD_BYTES = {True: GIB, False: GIB // 4}  # on a GPU or not; of trainer/logprobs
HEAD_BLOCK = 1 << 14
DELTA_CHUNK = 64  # tokens that a delta net reads at once
ROW_STREAMS = 7  # arrays of 8 bytes a slot that an engine keeps on the host
SERVER_FRACTION = 0.85  # about what SGLang takes of a card by itself


@dataclass(slots=True, kw_only=True, frozen=True)
class Memory:
    """Bytes of one process by part, at its peak. count: processes like it. on_gpu: of a card."""

    process: str
    parts: dict[str, int]
    count: int = 1
    on_gpu: bool = False

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in self.parts.items() if size > GIB // 20)
        return f"{self.count} x {self.process}: {self.total / GIB:.1f} GiB" + (f" ({shown})" if shown else "")


@cache
def parameters(arch: Architecture, tp: int = 1, ep: int = 1, layers: range | None = None) -> tuple[int, int]:
    """Parameters of the model proper, and of its draft, on a rank of `tp` and `ep`; matrices are cut.

    layers: of a pipeline stage (None: all). The first has the embedding, the last norm, head and draft, and a
    copy of the embedding for the draft or as a tied head.
    """
    layers = layers or range(arch.layers)
    last = layers.stop == arch.layers
    ends = {"model.embed_tokens.weight": layers.start == 0 or (last and (arch.tied or arch.mtp_layers > 0))}
    sizes = {True: 0, False: 0}
    dense = arch.experts.dense if arch.experts else 0
    few, like = replace(arch, layers=dense + 1), Counter(min(layer, dense) for layer in layers)
    if arch.delta:  # a layer with a delta net and one without stand for all
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
    """Layers with a delta net, and those with attention."""
    linear = sum(arch.delta.linear) if arch.delta else 0
    return linear, arch.layers - linear


def adapter_parameters(arch: Architecture, lora: LoraConfig, tp: int = 1) -> int:
    """Parameters of the adapters on a rank of `tp`: what lies beside a cut side of a matrix is cut."""
    query, keys = arch.heads * arch.head_dim // tp, arch.kv_heads * arch.head_dim // tp
    inner = arch.inner // tp
    sides = lora.attention * (4 * arch.hidden + 2 * query + 2 * keys)
    sides += lora.mlp * (3 * arch.hidden + 3 * inner)
    return lora.rank * arch.layers * sides


def trainer_memory(arch: Architecture, config: Config, *, on_gpu: bool = False) -> Memory:
    """One trainer rank; of several pipeline stages the one that takes most."""
    stages, first = [], 0
    for stage, count in enumerate(config.trainer.stage_layers(arch.layers)):
        layers = range(first, first + count)
        stages.append(_stage_memory(arch, config, layers, config.trainer.pp - stage, on_gpu))
        first += count
    return max(stages, key=lambda memory: memory.total)


def _stage_memory(arch: Architecture, config: Config, layers: range, in_flight: int, on_gpu: bool) -> Memory:
    """A trainer rank with some of the layers. in_flight: micro-batches whose activations it keeps at once."""
    trainer = config.trainer
    half = trainer.precision is Precision.BF16
    size = 2 if half else 4
    model, draft = parameters(arch, trainer.tp, trainer.ep, layers)
    adapts = config.task is Task.MTP_ADAPT
    online = adapts or (config.draft.online and not config.cotrains_draft)
    adapters = adapter_parameters(replace(arch, layers=len(layers)), trainer.lora, trainer.tp)
    policy = adapters if trainer.lora.active else model
    trained = (0 if adapts else policy) + (draft if online else 0)
    stepped = trained  # parameters whose optimizer state this rank keeps
    if trainer.distributed_optimizer:  # over all data parallel ranks, whichever of them hold an expert
        whole = parameters(arch, trainer.tp, layers=layers)[0]
        more = 0 if adapts or trainer.lora.active else whole - model
        stepped = (trained + more) // (trainer.dp * trainer.cp)
    own = config.algo.kl_coef and not adapts and not trainer.lora.active  # adapters can be left out
    reference = model + draft if own else 0
    kept, head = _activations(arch, trainer, layers, in_flight, on_gpu)
    update = 4 * stepped if on_gpu else 0  # AdamW's roots of all second moments at once
    sent = (
        2 * config.rollout.sglang.bucket_mb * MIB
        if config.broadcasts_weights or on_gpu
        else size * (model + draft)
    )
    if arch.experts:  # those of a layer travel together
        sent = max(sent, 2 * size * 3 * arch.hidden * arch.inner * arch.experts.count)
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


def _activations(
    arch: Architecture, trainer: TrainerConfig, layers: range, in_flight: int, on_gpu: bool
) -> tuple[int, int]:
    """Bytes kept of a stage's layers at the peak, and bytes beyond them."""
    size = 2 if trainer.precision is Precision.BF16 else 4
    hidden, tp, everywhere = arch.hidden, trainer.tp, trainer.micro_batch_tokens
    tokens = -(-everywhere // trainer.cp)
    query, keys = arch.heads * arch.head_dim // tp, arch.kv_heads * arch.head_dim // tp
    copies = arch.experts.per_token if arch.experts else 0  # of each token, one for each of its experts
    shared = arch.experts.shared if arch.experts else 0
    inner, vocab = (max(1, copies) * arch.inner + shared) // tp, -(-arch.vocab // tp)
    apart = tp if trainer.sp else 1  # ranks that share the tokens of norms and residuals
    inputs = 2 * hidden // apart + 2 * hidden // (apart if on_gpu else 1)  # a CPU keeps them gathered
    layer = tokens * size * (inputs + 3 * query + 3 * keys + 4 * arch.head_dim)
    layer += 4 * tokens * (2 + arch.heads // tp)
    if arch.latent:  # keys and values before they are joined and padded
        layer += 2 * tokens * size * keys
    if arch.delta:  # the larger of a delta net and attention with its gate, for every layer
        layer = max(layer + 3 * tokens * size * query, _delta_bytes(arch.delta, tokens, size, hidden, tp))
    if trainer.cp > 1:  # keys and values of the other ranks
        layer += 2 * everywhere * size * keys
    mlp, backward = 3 * tokens * size * inner, tokens * size * (3 * hidden + 4 * inner)
    if arch.experts:
        mlp += tokens * size * (copies * hidden + 2 * inner) + 8 * tokens * arch.experts.count
        backward += tokens * size * 2 * copies * hidden
    row = vocab * size
    rows = max(1, HEAD_BYTES[on_gpu] // row)
    chunks = (2 if tokens <= rows else 3) * min(tokens, rows) * row
    head = chunks + 4 * everywhere * size * hidden
    if not trainer.lora.active:
        head += 4 * vocab * hidden + HEAD_BLOCK * hidden * size
    if on_gpu:
        head += 12 << 24  # a block of rows in float32, three times
    if arch.tied and not trainer.lora.active:  # the head's gradient waits for the embedding's
        backward += vocab * hidden * size
    if layers.stop < arch.layers:  # the last stage has the head; this one keeps what it passes on
        head = in_flight * tokens * hidden * size // apart
    kept = len(layers) * in_flight
    if trainer.recompute is Recompute.FULL:
        return tokens * hidden * size * kept // apart, max(head, layer + mlp + backward)
    if trainer.recompute is Recompute.SELECTIVE:
        return layer * kept, max(head, mlp + backward)
    return (layer + mlp) * kept, max(head, backward)


def _delta_bytes(delta: DeltaNet, tokens: int, size: int, hidden: int, tp: int) -> int:
    """What is kept of one gated delta net for its gradient; of its rule in float32.

    Of a token and value head: queries, keys and values in several forms, six rows of a chunk, and the share
    of a state that each chunk keeps.
    """
    wide, heads = 2 * delta.keys + delta.values, delta.value_heads
    rule = heads * (8 * delta.key_dim + 5 * delta.value_dim + 6 * DELTA_CHUNK)
    rule += delta.values * delta.key_dim // DELTA_CHUNK
    return tokens * (4 * size * hidden + (size * (3 * wide + 4 * delta.values) + 4 * rule) // tp)


def engine_memory(arch: Architecture, config: Config, *, on_gpu: bool = False) -> Memory:
    """One embedded engine."""
    rollout, spec, size = config.rollout, config.spec, _element(config)
    given = sum(parameters(arch)) * (2 if config.trainer.precision is Precision.BF16 else 4)
    arch = replace(arch, mtp_layers=arch.mtp_layers if spec.needs_mtp else 0, tied=False)
    ends = arch.vocab * arch.hidden * size  # embedding and head, a copy each
    layers = sum(parameters(arch)) * size - 2 * ends
    packed = 0 if on_gpu else layers + ends  # oneDNN's copy of all products
    rows, slots = rollout.max_running, rollout.max_context + spec.drafts + 2
    query, keys = arch.heads * arch.cached_dim, arch.cached_heads * arch.cached_dim
    cache = rows * conversation_bytes(arch, config)
    tokens = min(max(rollout.prefill_tokens, rollout.max_context), rows * rollout.max_context)
    working = tokens * size * (3 * arch.hidden + 3 * query + 2 * keys) + _mlp_bytes(arch, tokens, size)
    working += rows * arch.vocab * ((spec.depth + 1) * (size + 12) + spec.depth * 8)
    host = 0 if on_gpu else 8 * ROW_STREAMS * rows * slots
    replaced = layers + (0 if on_gpu else packed - ends + given)
    return Memory(
        process="embedded engine",
        count=rollout.workers,
        on_gpu=on_gpu,
        parts={
            "weights": layers + 2 * ends,
            "packed": packed,
            "kv": cache + host,
            "activations": working,
            "update": max(0, replaced - working),
        },
    )


def server_memory(arch: Architecture, config: Config, card: int = 0) -> Memory:
    """One GPU of an SGLang server; card: its bytes, of which the server takes a fraction for weights and KV.

    Without a card it is sized by what `max_running` conversations of `max_context` tokens need.
    """
    rollout, tp, size = config.rollout, config.rollout.sglang.tp, _element(config)
    weights = sum(parameters(arch if config.spec.needs_mtp else replace(arch, mtp_layers=0), tp)) * size
    kv = conversation_bytes(arch, config, tp) * rollout.max_running
    if card:
        kv = max(0, int((rollout.sglang.memory_fraction or SERVER_FRACTION) * card) - weights)
    tokens = max(rollout.prefill_tokens, rollout.max_running)
    query, keys = arch.heads * arch.head_dim // tp, arch.kv_heads * arch.head_dim // tp
    working = tokens * size * (3 * arch.hidden + 2 * query + 2 * keys) + _mlp_bytes(arch, tokens, size) // tp
    working += rollout.max_running * (config.spec.depth + 1) * arch.vocab * 16 // tp
    return Memory(
        process="SGLang server, each GPU" if card else "SGLang server",
        count=rollout.workers * tp,
        on_gpu=bool(card),
        parts={
            "weights": weights,
            "kv": kv,
            "activations": working,
            "bucket": rollout.sglang.bucket_mb * MIB,
        },
    )


def _mlp_bytes(arch: Architecture, tokens: int, size: int) -> int:
    """What an engine holds while one layer's MLP, or its experts, read so many tokens."""
    if not arch.experts:
        return 3 * tokens * size * arch.intermediate
    own = tokens * arch.experts.per_token * (size * (3 * arch.inner + arch.hidden) + 4 * arch.hidden)
    return own + 3 * tokens * size * arch.experts.shared


def conversation_bytes(arch: Architecture, config: Config, tp: int = 1) -> int:
    """Keys, values and routes of one conversation of `max_context` tokens on one of `tp` devices.

    With latent attention each device keeps the latent vectors, one a token, of which both are made. Of a
    delta net its state, in float32, and one more for each token that is drafted.
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
    """What the experts that read one token take, recorded; 0 without experts."""
    if (experts := arch.experts) is None:
        return 0
    return (arch.layers - experts.dense) * experts.per_token * (1 if experts.count < 256 else 2)


def _element(config: Config) -> int:
    """Bytes of a number in the engine."""
    return 4 if config.rollout.dtype is Dtype.FLOAT32 else 2


def estimate(config: Config, card: int = 0) -> list[Memory]:
    """Every kind of process of a run. card: bytes of one GPU, 0 where everything runs on the CPU."""
    run_mode, found = config.run.half, []
    policy = read_architecture(read_config(resolve(config.model.path)))
    served = read_architecture(read_config(resolve(config.rollout_model)))
    if run_mode.trains:
        found.append(trainer_memory(policy, config, on_gpu=card > 0))
        if config.decoupled.active:
            actor = trainer_memory(served, config, on_gpu=card > 0)
            found.append(replace(actor, process="trainer rank, the actor's part"))
    if run_mode.generates and config.rollout.engine is EngineKind.SGLANG:
        found.append(server_memory(served, config, card if config.rollout.device != "cpu" else 0))
    elif run_mode.generates:
        found.append(engine_memory(served, config, on_gpu=card > 0 and config.rollout.device != "cpu"))
    return found


def gpu_bytes(config: Config) -> int:
    """Memory of one GPU: what `cluster.gpu_gb` says, else this machine's first one, 0 without any."""
    if config.cluster.gpu_gb or shutil.which("nvidia-smi") is None:
        return int(config.cluster.gpu_gb * GIB)
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout.split()[0]) * MIB if done.returncode == 0 and done.stdout.strip() else 0


def host_bytes() -> int:
    """Memory of this machine, or of the container that this process is in."""
    total = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    said = limit.read_text().strip() if limit.is_file() else "max"
    return total if said == "max" else min(total, int(said))
