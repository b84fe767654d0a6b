"""Settings of the rollout engine. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlpipe.config.choice import Choice
from rlpipe.config.limits import at_least
from rlpipe.config.sglang import SglangConfig

PARKED = 2  # capacity for conversations without a row, as a multiple of the capacity of all rows

# Number of multiply-adds from which the embedded engine multiplies float32 by a prepacked matrix on a CPU, so
# that a larger matrix is held only packed. Measured: with AVX-512, prepacked is faster from 8 rows of
# 1024x128 or 32 of 256x128; with AVX2 from one row of 512x512 or 960x576, by 1.1 to 1.9 times.
PACKED_FROM = 250_000


class EngineKind(Choice):
    """The engine that decodes tokens."""

    EMBEDDED = "embedded"  # in-process, CPU or GPU
    SGLANG = "sglang"  # a separate server process, in a separate virtual environment


class KvOnUpdate(Choice):
    """What happens to cached keys and values when weights are replaced."""

    KEEP = "keep"  # unfinished requests continue with the KV of the old weights
    RECOMPUTE = "recompute"  # KV of unfinished requests is computed with the new weights, other KV is dropped


class Dtype(Choice):
    """Dtype of weights and KV cache; probabilities are always float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(slots=True, kw_only=True)
class RolloutConfig:
    """Settings of rollout workers and their engines."""

    engine: EngineKind = EngineKind.EMBEDDED
    """Implementation of the rollout engine."""

    workers: int = 1
    """Number of engines; each runs in a separate process."""

    concurrent_groups: int = 0
    """Number of groups that one worker generates at a time; 0: all admitted groups."""

    max_running: int = 64
    """Number of KV rows of an engine, which running requests and idle conversations share. The embedded
    engine stores further idle conversations in host memory, up to twice as many tokens as its rows can hold.
    Attempts wait if there is no capacity for them; conversations that still do not fit are computed again."""

    max_context: int = 512
    """Maximum number of tokens of a conversation, including the prompt; at most the model's
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
    """Dtype of the engine. See `Dtype`."""

    threads: int = 1
    """Number of CPU threads of an engine."""

    prefill_tokens: int = 4096
    """Maximum number of prompt tokens processed between two decode steps; one request is always processed."""

    cuda_graphs: bool = True
    """On a GPU, capture the embedded engine's decode passes as CUDA graphs, one for each of a few shapes, and
    replay them. Not used with experts."""

    kv_on_update: KvOnUpdate = KvOnUpdate.KEEP
    """See `KvOnUpdate`."""

    replay_routes: bool = False
    """MoE only: in the trainer, send each token to the experts that processed it in the rollout (R3). If
    false, trainer and engine choose different experts for some tokens, because of rounding. If true, a
    trajectory has one or two additional bytes for each token, MoE layer and chosen expert."""

    sglang: SglangConfig = field(default_factory=SglangConfig)
    """Settings of the SGLang server; only used with engine=sglang."""

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
        """Number of GPUs per engine, if engines run on GPUs."""
        return self.sglang.tp if self.engine is EngineKind.SGLANG else 1


def check_embedded(path: str, hf_config: Mapping[str, Any]) -> None:
    """Refuse a model that the embedded engine cannot decode. Raises ValueError that names another engine.

    hf_config: the `config.json` of the checkpoint in `path`.
    """
    if hf_config.get("linear_num_key_heads"):
        raise ValueError(
            f"{path!r} is of type {hf_config['model_type']!r}, whose gated delta nets the embedded engine "
            "does not decode: set rollout=sglang on a machine with a GPU."
        )
