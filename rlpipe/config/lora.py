"""Settings of LoRA adapters: their rank, and the projections that have an adapter. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlpipe.config.choice import Choice
from rlpipe.config.limits import at_least, positive


class LoraTargets(Choice):
    """The projections of every decoder layer that have a LoRA adapter."""

    ALL = "all"  # the projections of attention and MLP
    ATTENTION = "attention"  # q_proj, k_proj, v_proj, o_proj
    MLP = "mlp"  # gate_proj, up_proj, down_proj


@dataclass(slots=True, kw_only=True)
class LoraConfig:
    """LoRA adapters: W + (alpha / rank) B A, where A and B are trained and W is fixed."""

    rank: int = 0
    """Number of rows of A. 0: no adapters, so all weights are trained."""

    alpha: float = 16.0
    """Numerator of the scale alpha / rank."""

    targets: LoraTargets = LoraTargets.ALL
    """See `LoraTargets`."""

    def __post_init__(self) -> None:
        self.targets = LoraTargets(self.targets)
        at_least(0, self, "trainer.lora", "rank", remedy="0 trains all weights, 8 to 64 are usual ranks")
        positive(self, "trainer.lora", "alpha", remedy="it scales the adapters, twice the rank is usual")

    @property
    def active(self) -> bool:
        """Whether LoRA adapters are trained instead of the backbone."""
        return self.rank > 0

    @property
    def attention(self) -> bool:
        """Whether the projections of attention have adapters."""
        return self.active and self.targets is not LoraTargets.MLP

    @property
    def mlp(self) -> bool:
        """Whether the projections of the MLP have adapters."""
        return self.active and self.targets is not LoraTargets.ATTENTION


def check_lora(config: LoraConfig, hf_config: Mapping[str, Any]) -> None:
    """Refuse LoRA adapters for models that do not support them.

    hf_config: the checkpoint's `config.json`. Raises ValueError with the problem, the value and a hint.
    """
    # The trainer has no LoRA adapters for these layers.
    experts = hf_config.get("moe_intermediate_size")
    if hf_config.get("linear_num_key_heads") and config.active and (config.attention or experts):
        raise ValueError(
            f"trainer.lora.rank={config.rank} with trainer.lora.targets={config.targets}: gated delta nets "
            "and attention with an output gate have no adapters. Set trainer.lora.rank=0."
        )

    if config.mlp and experts:
        raise ValueError(
            f"trainer.lora.rank={config.rank} with trainer.lora.targets={config.targets}: experts have no "
            "adapters. Set trainer.lora.targets=attention, or trainer.lora.rank=0 to train all weights."
        )

    if config.attention and hf_config.get("kv_lora_rank"):
        raise ValueError(
            f"trainer.lora.rank={config.rank} with trainer.lora.targets={config.targets}: latent attention "
            "(kv_lora_rank) has no adapters. Set trainer.lora.rank=0 to train all weights."
        )

    hidden = int(hf_config["hidden_size"])
    if config.rank >= hidden:
        raise ValueError(
            f"trainer.lora.rank={config.rank} is not below the model's hidden_size={hidden}: set a smaller "
            "trainer.lora.rank, or 0 to train all weights."
        )
