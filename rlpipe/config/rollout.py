"""Settings of the rollout engine. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlpipe.config.choice import Choice
from rlpipe.config.limits import at_least
from rlpipe.config.sglang import SglangConfig

PARKED = 2  # tokens of conversations without a row, in the tokens that all rows of an embedded engine hold


class EngineKind(Choice):
    """The engine that decodes."""

    EMBEDDED = "embedded"  # in-process, CPU or GPU
    SGLANG = "sglang"  # a separate server process, in a separate virtual environment


class KvOnUpdate(Choice):
    """The handling of cached keys and values when weights are replaced."""

    KEEP = "keep"  # unfinished requests continue with the KV of the old weights
    RECOMPUTE = "recompute"  # their KV is rebuilt with the new weights; idle conversations are dropped


class Dtype(Choice):
    """Number type of weights and KV cache; probabilities are always float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(slots=True, kw_only=True)
class RolloutConfig:
    """Settings of rollout workers and their engines."""

    engine: EngineKind = EngineKind.EMBEDDED
    """Implementation of the rollout engine."""

    workers: int = 1
    """Number of engines; each runs in its own process."""

    concurrent_groups: int = 0
    """Number of groups that one worker generates at a time; 0: as many as are admitted."""

    max_running: int = 64
    """Number of KV rows of an engine, which running requests and idle conversations share. The embedded
    engine keeps further idle conversations in host memory, up to twice as many tokens as its rows hold.
    Attempts that would not fit wait; what does not fit nevertheless is computed again."""

    max_context: int = 512
    """Maximum number of tokens of a conversation, prompt included; at most the model's
    max_position_embeddings."""

    max_new_tokens: int = 48
    """Maximum number of tokens of one turn."""

    temperature: float = 1.0
    """Sampling temperature of training rollouts; 0 is greedy."""

    ignore_eos: bool = False
    """Run every turn to max_new_tokens (for benchmarks)."""

    device: str = "auto"
    """"auto" (cuda if there is one), "cpu", "cuda", "cuda:1", ..."""

    dtype: Dtype = Dtype.FLOAT32
    """Number type of the engine; see `Dtype`."""

    threads: int = 1
    """CPU threads of an engine."""

    prefill_tokens: int = 4096
    """Maximum number of prompt tokens processed between two decode steps; one request is always admitted."""

    cuda_graphs: bool = True
    """On a GPU the embedded engine captures its passes over decoding rows, once for each of a few shapes, and
    replays them. Not used with experts."""

    kv_on_update: KvOnUpdate = KvOnUpdate.KEEP
    """See `KvOnUpdate`."""

    replay_routes: bool = False
    """MoE only: in the trainer, send each token to the experts that processed it in the rollout (R3).
    Otherwise rounding makes trainer and engine choose different experts. A trajectory then has one or two
    additional bytes for each token, MoE layer and chosen expert."""

    sglang: SglangConfig = field(default_factory=SglangConfig)
    """Settings of the server; read with engine=sglang only."""

    def __post_init__(self) -> None:
        self.engine = EngineKind(self.engine)
        self.dtype = Dtype(self.dtype)
        self.kv_on_update = KvOnUpdate(self.kv_on_update)

        at_least(1, self, "rollout", "workers", "max_running", "max_new_tokens", "threads", "prefill_tokens")
        at_least(2, self, "rollout", "max_context", remedy="it holds a prompt token and a sampled one")
        at_least(0, self, "rollout", "concurrent_groups", remedy="0 runs all that are admitted")
        at_least(0, self, "rollout", "temperature", remedy="0 is greedy, 1.0 samples the policy")

        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(
                f"rollout.device={self.device!r} is not a valid device: set auto, cpu, cuda or cuda:N."
            )

    @property
    def gpus_per_worker(self) -> int:
        """Number of GPUs of one engine, if it runs on GPUs."""
        return self.sglang.tp if self.engine is EngineKind.SGLANG else 1


def check_embedded(path: str, hf_config: Mapping[str, Any]) -> None:
    """Refuse a model that the embedded engine cannot decode. Raises ValueError with an engine that can.

    hf_config: the `config.json` of the checkpoint in `path`.
    """
    if hf_config.get("linear_num_key_heads"):
        raise ValueError(
            f"{path!r} is of type {hf_config['model_type']!r}, whose gated delta nets the embedded engine "
            "does not decode: set rollout=sglang on a machine with a GPU."
        )
