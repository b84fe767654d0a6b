"""The rollout engine's settings. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlpipe.config.choice import Choice
from rlpipe.config.limits import at_least
from rlpipe.config.sglang import SglangConfig


class EngineKind(Choice):
    """Which engine decodes."""

    EMBEDDED = "embedded"  # in-process, CPU or GPU
    SGLANG = "sglang"  # a server process of its own, in an environment of its own


class KvOnUpdate(Choice):
    """What becomes of cached keys and values when weights are replaced."""

    KEEP = "keep"  # unfinished requests go on with the KV of the old weights
    RECOMPUTE = "recompute"  # their KV is rebuilt with the new weights; idle conversations are dropped


class Dtype(Choice):
    """Weights and KV cache; probabilities are float32 in any case."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(slots=True, kw_only=True)
class RolloutConfig:
    """Settings of the rollout side.

    engine: implementation. workers: engines, one process each.
    concurrent_groups: groups one worker plays at a time (0: as many as are admitted).
    max_running: KV rows of an engine; running requests and idle conversations share them.
    max_context: tokens of a conversation, prompt included (at most the model's
        max_position_embeddings). max_new_tokens: per turn.
    temperature: of training rollouts; 0 is greedy.
    ignore_eos: every turn runs to max_new_tokens (for benchmarks).
    device: "auto" (cuda if there is one), "cpu", "cuda", "cuda:1", ...
    threads: CPU threads of an engine. prefill_tokens: prompt tokens processed between two decode
        steps (one request is always admitted).
    cuda_graphs: on a GPU the embedded engine captures its passes over decoding rows, once for each of a few
        shapes, and replays them; not with experts.
    kv_on_update: see `KvOnUpdate`.
    replay_routes: of a mixture of experts, send each token in the trainer to the experts that read it here
        (R3): rounding makes the two choose differently otherwise. A byte or two for each token, layer with
        experts and expert per token travel with a trajectory.
    sglang: of the server, engine sglang only.
    """

    engine: EngineKind = EngineKind.EMBEDDED
    workers: int = 1
    concurrent_groups: int = 0
    max_running: int = 64
    max_context: int = 512
    max_new_tokens: int = 48
    temperature: float = 1.0
    ignore_eos: bool = False
    device: str = "auto"
    dtype: Dtype = Dtype.FLOAT32
    threads: int = 1
    prefill_tokens: int = 4096
    cuda_graphs: bool = True
    kv_on_update: KvOnUpdate = KvOnUpdate.KEEP
    replay_routes: bool = False
    sglang: SglangConfig = field(default_factory=SglangConfig)

    def __post_init__(self) -> None:
        self.engine = EngineKind(self.engine)
        self.dtype = Dtype(self.dtype)
        self.kv_on_update = KvOnUpdate(self.kv_on_update)
        at_least(1, self, "rollout", "workers", "max_running", "max_new_tokens", "threads", "prefill_tokens")
        at_least(2, self, "rollout", "max_context", remedy="it holds a prompt token and a sampled one")
        at_least(0, self, "rollout", "concurrent_groups", remedy="0 plays all that are admitted")
        at_least(0, self, "rollout", "temperature", remedy="0 is greedy, 1.0 samples the policy")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(
                f"rollout.device={self.device!r} is no device: set auto, cpu, cuda, or one GPU as in cuda:1."
            )

    @property
    def cards(self) -> int:
        """GPUs of one engine, where it has any."""
        return self.sglang.tp if self.engine is EngineKind.SGLANG else 1


def check_embedded(path: str, hf_config: Mapping[str, Any]) -> None:
    """Refuse a model that the embedded engine cannot decode. Raises ValueError with what serves it instead.

    hf_config: the `config.json` of the checkpoint in `path`.
    """
    if hf_config.get("linear_num_key_heads"):
        raise ValueError(
            f"{path!r} is of type {hf_config['model_type']!r}, whose gated delta nets the embedded engine "
            "does not decode: set rollout=sglang on a machine with a GPU."
        )
