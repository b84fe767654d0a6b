"""The choice between CPU + gloo and GPU + NCCL, which is made only in this module.

Owns device, backend, process group, Megatron's parallel state, seeds and the configuration flags that
differ. Independent of the model. Flow: `start(...)` once per trainer process, `stop()` at its end.

Megatron-core 0.16 assumes CUDA in a few functions that run no kernel (`device="cuda"` for a scalar,
`Tensor.type()` compared with a string). `_assume_cpu()` makes them use the CPU. It is called only where CUDA
is absent, and only in a process that trains.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import inspect
import logging
import random
import sys
import warnings
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from rlpipe.config.openmp import watch_for_contention
from rlpipe.config.trainer import LayerSpec, Precision, TrainerConfig

T = TypeVar("T")
_CPU = torch.device("cpu")
_FACTORIES = ("zeros", "ones", "empty", "tensor", "full", "arange")
_PATIENCE = datetime.timedelta(minutes=30)
_listening: dict[str, TCPStore] = {}  # stores that this process opened and that no trainer uses yet


@dataclass(slots=True, kw_only=True)
class Runtime:
    """Device and process group of this rank.

    dtype: dtype of parameters and activations. te: whether layers are TransformerEngine's. world_size: number
    of ranks.
    """

    device: torch.device
    dtype: torch.dtype
    te: bool
    rank: int
    world_size: int

    @property
    def model_flags(self) -> dict[str, Any]:
        """Arguments of Megatron's TransformerConfig that depend on the hardware."""
        gpu = self.device.type == "cuda"
        return {
            "params_dtype": self.dtype,
            "pipeline_dtype": self.dtype,
            "bf16": self.dtype is torch.bfloat16,
            "use_cpu_initialization": not gpu,
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
            "bias_activation_fusion": self.te,
            "bias_dropout_fusion": False,
            "apply_rope_fusion": self.te,
            "cross_entropy_loss_fusion": False,
        }

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Copy a host array to this rank's device, with its shape and dtype."""
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def open_address(host: str = "127.0.0.1", *, world_size: int) -> str:
    """Listen for the other ranks in this process, rank 0; return `host:port`.

    The system chooses the port. It stays open until `start`, so that no other process can take it.
    """
    store = _store(host, 0, world_size, listens=True)
    address = f"{host}:{store.port}"
    _listening[address] = store
    return address


def start(config: TrainerConfig, *, rank: int, world_size: int, master: str | None) -> Runtime:
    """Join the process group, build Megatron's groups, seed everything.

    master: the address that `open_address` returned on rank 0, the same on every rank; a single rank needs
        none.
    Raises ValueError when this process already runs a trainer, or TransformerEngine is requested where it
    cannot run.
    """
    if master is None and world_size > 1:
        raise ValueError(
            f"{world_size} ranks need the address of rank 0 to meet at: pass master='host:port'."
        )
    if dist.is_initialized():
        raise ValueError("this process already runs a trainer: close() it before starting another.")

    # Choose the device before Megatron's parallel state is built on it.
    gpu = torch.cuda.is_available()
    _quiet_megatron(gpu=gpu)
    import_megatron(compiles=gpu)
    if gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        _assume_cpu()
        if config.threads:
            torch.set_num_threads(config.threads)
        watch_for_contention()

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        store=HashStore() if master is None else _meet(master, rank, world_size),
        rank=rank,
        world_size=world_size,
        timeout=_PATIENCE,
    )
    parallel_state.initialize_model_parallel(
        config.tp,
        config.pp,
        context_parallel_size=config.cp,
        expert_model_parallel_size=config.ep,
        create_gloo_process_groups=False,
    )

    random.seed(config.seed)
    np.random.seed(config.seed)
    torch.manual_seed(config.seed)
    model_parallel_cuda_manual_seed(config.seed, inference_rng_tracker=not gpu)

    return Runtime(
        device=torch.device("cuda", torch.cuda.current_device()) if gpu else _CPU,
        dtype=torch.bfloat16 if config.precision is Precision.BF16 else torch.float32,
        te=_use_transformer_engine(config, gpu=gpu),
        rank=rank,
        world_size=world_size,
    )


@functools.cache
def import_megatron(*, compiles: bool) -> None:
    """Import Megatron without its optional imports; has no effect if it is imported already.

    Megatron imports wandb, if it is installed, for its inference. It also decorates small functions with
    torch.compile, which imports the compiler at once. Both imports take seconds. On a CPU rlpipe's models
    call none of these functions.

    compiles: whether to let torch.compile compile these functions.
    """
    compile_, logged = torch.compile, "wandb" in sys.modules
    if not compiles:
        torch.compile = lambda function: function  # pyright: ignore[reportAttributeAccessIssue]
    if not logged:
        sys.modules["wandb"] = None  # pyright: ignore[reportArgumentType]  (its import then fails)

    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compile_
        if not logged:
            del sys.modules["wandb"]


def _meet(master: str, rank: int, world_size: int) -> Store:
    """Return the store at `master`: the one this process opened or, on other ranks, a connection to it."""
    if (store := _listening.pop(master, None)) is not None:
        return store

    host, _, port = master.rpartition(":")
    return _store(host, int(port), world_size, listens=rank == 0)


def _store(host: str, port: int, world_size: int, *, listens: bool) -> TCPStore:
    """Open a store, or connect to it; returns without waiting for the other ranks."""
    return TCPStore(host, port, world_size, listens, _PATIENCE, wait_for_workers=False)


def stop() -> None:
    """Leave the process group; then `start` may be called again."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def _quiet_megatron(*, gpu: bool) -> None:
    """Silence advice that does not apply: missing Apex, deprecations, unknown MLP classes, CUDA on a CPU."""
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.checkpoint\..*")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    if not gpu:  # torch warns of a CUDA compiler without a GPU when Megatron imports what could use it
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _use_transformer_engine(config: TrainerConfig, *, gpu: bool) -> bool:
    """Return whether layers are TransformerEngine's; raise ValueError for a choice that cannot run."""
    # Local layers are needed on a CPU, and for features that are not implemented for TransformerEngine's
    # layers.
    layers, needs_local = config.layers, not gpu or config.cp > 1 or config.sp or config.lora.active
    if layers is LayerSpec.LOCAL or (layers is LayerSpec.AUTO and needs_local):
        return False

    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError as error:
        if layers is LayerSpec.TE:
            raise ValueError(
                f"trainer.layers=te, but TransformerEngine does not import ({error}). "
                "Install transformer-engine[pytorch], or set trainer.layers=local."
            ) from error
        return False

    if not gpu:
        raise ValueError("trainer.layers=te needs a GPU and there is none: set trainer.layers=local.")
    return True


class _TorchOnCpu:
    """Replaces `torch` in Megatron's modules: factories called with device="cuda" make CPU tensors."""

    def __getattr__(self, name: str) -> Any:
        """Return torch's attribute for every name that is not replaced."""
        return getattr(torch, name)


@functools.cache
def _assume_cpu() -> None:
    """Replace Megatron's "cuda" by the CPU, in this process, permanently (idempotent).

    torch is unchanged for all other callers: its factories are replaced in Megatron's modules only, and a
    tensor's type() and cuda() differ only when Megatron calls them.
    """
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random as tp_random

    torch.cuda.current_device = lambda: _CPU
    torch.cuda.synchronize = lambda device=None: None

    # Replace factories in the modules that pass device="cuda".
    stand_in = _TorchOnCpu()
    for name in _FACTORIES:
        setattr(stand_in, name, _on_cpu(getattr(torch, name)))
    for module in (clip_grads, distrib_optimizer, optimizer, schedules, utils):
        module.torch = stand_in  # pyright: ignore[reportAttributeAccessIssue]

    # Replace tensor methods: Megatron compares types with strings like "torch.cuda.FloatTensor".
    plain_type, plain_cuda = torch.Tensor.type, torch.Tensor.cuda

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = plain_type(self, *args, **kwargs)
        is_megatron = not args and not kwargs and _called_by_megatron()
        return answer.replace("torch.", "torch.cuda.", 1) if is_megatron else answer

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if _called_by_megatron() else plain_cuda(self, *args, **kwargs)

    torch.Tensor.type, torch.Tensor.cuda = type_, cuda

    # Without CUDA there is no CUDA generator state to store.
    tp_random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)
    tp_random._set_cuda_rng_state = lambda *args, **kwargs: None


def _called_by_megatron() -> bool:
    """Return whether Megatron called the function that calls this one."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None and frame.f_back.f_back is not None
    return frame.f_back.f_back.f_globals.get("__name__", "").startswith("megatron.core")


def _on_cpu(factory: Any) -> Any:
    """Return the factory with device="cuda" replaced by the CPU."""

    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return build


def release_freed_memory() -> None:
    """Return freed blocks of the C allocator to the system, if the allocator can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def pipeline_group() -> dist.ProcessGroup:
    """Return the group of this rank's pipeline stages, which Megatron types as optional."""
    from megatron.core.parallel_state import get_pipeline_model_parallel_group

    group = get_pipeline_model_parallel_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def gather(part: T, group: dist.ProcessGroup) -> list[T]:
    """Gather one object from each rank of a group on all ranks of the group."""
    if group.size() == 1:
        return [part]

    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, part, group=group)
    return parts


def gather_last(part: T, group: dist.ProcessGroup) -> list[T]:
    """Gather one object from each rank of the last pipeline stage on the ranks of all stages."""
    parts, stages = gather(part, group), pipeline_group()
    return parts if stages.size() == 1 else gather(parts, stages)[-1]
