"""Settings of an SGLang server that rlpipe starts. Imports no torch and no sglang."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpipe.config.choice import Choice
from rlpipe.config.limits import at_least, positive


class WeightTransfer(Choice):
    """How new weights reach a server."""

    AUTO = "auto"  # shared, collective or ipc, see `run.with_weight_transfer`
    SHARED = "shared"  # through memory that the worker writes and its server maps
    COLLECTIVE = "collective"  # by broadcast from the trainer to all ranks of all servers (NCCL or gloo)
    IPC = "ipc"  # servers map memory of the trainer on the same GPU (CUDA IPC) or host
    DISK = "disk"  # as a checkpoint that the server reads, in a folder that trainer and server can access

    @property
    def is_broadcast(self) -> bool:
        """Whether the trainer sends weights to all servers at once."""
        return self in (WeightTransfer.COLLECTIVE, WeightTransfer.IPC)


class CanaryReaction(Choice):
    """The reaction if a server's weights differ from the weights that were sent."""

    RETRY = "retry"  # send them once more, and end the run if they still differ
    NO_SPECULATION = "no_speculation"  # as retry, but if only the draft is stale, stop drafting instead
    STOP = "stop"  # end the run at once


@dataclass(slots=True, kw_only=True)
class SglangConfig:
    """Settings of `rollout.engine=sglang`; unused otherwise."""

    python: str = ""
    """Python interpreter of SGLang's virtual environment. Empty: $RLPIPE_SGLANG_VENV/bin/python, or else
    .venv-sglang next to the installed rlpipe (which scripts/install_sglang creates)."""

    host: str = "127.0.0.1"
    """Address on which the server listens."""

    port: int = 0
    """Port on which the server listens; 0: a free port."""

    tp: int = 1
    """Number of GPUs of one server (tensor parallel)."""

    start_timeout: float = 300.0
    """Maximum seconds until a new server answers."""

    request_timeout: float = 600.0
    """Maximum seconds of a turn without new tokens; a turn that still produces tokens is never ended."""

    update_timeout: float = 300.0
    """Maximum seconds of one request of a weight update, and also of a full broadcast."""

    health_timeout: float = 30.0
    """Maximum seconds until the server answers a health request. A server that does not answer two successive
    requests is considered hung, and is killed and replaced. The interval between requests is a third of this
    time, but at most 10 seconds."""

    max_restarts: int = 3
    """Maximum number of dead or hung servers that are replaced between two weight updates; one more failure
    ends the run."""

    weight_transfer: WeightTransfer = WeightTransfer.AUTO
    """See `WeightTransfer`."""

    bucket_mb: int = 256
    """Maximum megabytes of weights in one request. With collective transfer it also limits the weights that
    the trainer's ranks gather at once."""

    abort_on_update: bool = False
    """End running requests when weights change, and continue them as new requests after the tokens that they
    already have. False: they continue inside the server, according to rollout.kv_on_update."""

    on_canary_failure: CanaryReaction = CanaryReaction.RETRY
    """See `CanaryReaction`."""

    attention_backend: str = ""
    """Attention backend of SGLang; empty: SGLang chooses (on a CPU: torch_native)."""

    memory_fraction: float = 0.0
    """Share of a GPU's memory for weights and KV; 0: SGLang chooses."""

    deterministic: bool = False
    """Pass --enable-deterministic-inference, so that SGLang uses the seed of each request. Needs a GPU
    attention backend."""

    plugin: bool = True
    """Load rlpipe's plugin into the server (sglang_env/plugin). It returns exact entropies, and packed
    numbers instead of JSON for each token. False: SGLang is not changed, and entropies are estimates."""

    extra_arguments: list[str] = field(default_factory=list)
    """Arguments that are appended unchanged to the server's command line."""

    def __post_init__(self) -> None:
        self.weight_transfer = WeightTransfer(self.weight_transfer)
        self.on_canary_failure = CanaryReaction(self.on_canary_failure)
        section, times = "rollout.sglang", ("start_timeout", "request_timeout", "update_timeout")
        at_least(1, self, section, "tp", "bucket_mb")
        at_least(0, self, section, "max_restarts")
        positive(self, section, *times, "health_timeout", remedy="name seconds")

        if not 0 <= self.port < 65536:
            raise ValueError(
                f"rollout.sglang.port={self.port} is not a valid port: use 1..65535, or 0 (any)."
            )
        if not 0 <= self.memory_fraction < 1:
            raise ValueError(
                f"rollout.sglang.memory_fraction={self.memory_fraction} must be in [0, 1); 0: SGLang's own."
            )
