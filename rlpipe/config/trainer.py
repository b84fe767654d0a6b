"""Settings of the Megatron trainer: parallel sizes, precision, optimizer, schedule. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlpipe.config.choice import Choice
from rlpipe.config.limits import at_least, learning_rates
from rlpipe.config.lora import LoraConfig


class Precision(Choice):
    """Dtype of parameters and activations; the optimizer state is always float32."""

    FP32 = "fp32"
    BF16 = "bf16"


class LrSchedule(Choice):
    """Shape of the learning rate after warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"
    LINEAR = "linear"


class Recompute(Choice):
    """The activations that the backward pass recomputes to save memory."""

    NONE = "none"
    SELECTIVE = "selective"  # activations of each layer's MLP or experts, which are the largest
    FULL = "full"  # all activations of every layer


class LayerSpec(Choice):
    """The implementation of the layers that Megatron builds."""

    AUTO = "auto"  # TransformerEngine if it is installed and runs on a GPU, otherwise local
    LOCAL = "local"
    TE = "te"


@dataclass(slots=True, kw_only=True)
class TrainerConfig:
    """One trainer of tp * cp * pp * dp ranks."""

    tp: int = 1
    """Tensor parallel size."""

    dp: int = 1
    """Data parallel size."""

    pp: int = 1
    """Number of pipeline stages. Each has some of the layers; the last one also has the head and MTP
    layer."""

    sp: bool = False
    """Sequence parallelism: tensor parallel ranks also share the tokens of norms and residuals; otherwise
    every rank computes all of them. Not available with layers=te."""

    cp: int = 1
    """Number of context parallel ranks, which share the tokens of each micro-batch. Not available with
    layers=te."""

    ep: int = 1
    """Number of data and context parallel ranks over which the experts of an MoE are split. Must divide
    dp * cp. 0: the largest such number that also divides the number of experts, or 1 for a model without
    experts."""

    precision: Precision = Precision.FP32
    """See `Precision`."""

    layers: LayerSpec = LayerSpec.AUTO
    """See `LayerSpec`."""

    recompute: Recompute = Recompute.NONE
    """See `Recompute`."""

    distributed_optimizer: bool = False
    """Shard the optimizer's state over dp."""

    micro_batch_tokens: int = 2048
    """Maximum number of tokens in one forward pass; each of the cp ranks has a share. A prefix that siblings
    share counts once. TransformerEngine's layers do not share prefixes, and count rows * padded length."""

    lr: float = 1e-5
    """Learning rate after warm-up."""

    min_lr: float = 0.0
    """Learning rate at the end of a decaying schedule."""

    warmup_steps: int = 0
    """Number of optimizer steps in which the learning rate rises."""

    lr_schedule: LrSchedule = LrSchedule.CONSTANT
    """Schedule over optimizer steps. See `LrSchedule`."""

    weight_decay: float = 0.0
    """Weight decay of AdamW."""

    beta1: float = 0.9
    """Decay rate of AdamW's first moment."""

    beta2: float = 0.99
    """Decay rate of AdamW's second moment."""

    eps: float = 1e-8
    """Epsilon of AdamW."""

    clip_grad: float = 1.0
    """Bound on the gradient norm; 0: no bound."""

    threads: int = 1
    """Number of CPU threads per rank; 0: torch's default."""

    seed: int = 0
    """Seed of all random numbers in the trainer."""

    lora: LoraConfig = field(default_factory=LoraConfig)
    """LoRA adapters, which are trained instead of all weights."""

    def __post_init__(self) -> None:
        at_least(1, self, "trainer", "tp", "dp", "pp", "cp", "micro_batch_tokens")
        at_least(0, self, "trainer", "ep", "warmup_steps", "weight_decay", "clip_grad", "threads")
        learning_rates(self, "trainer")

        replicas = self.dp * self.cp
        if self.ep and replicas % self.ep:
            fitting = [n for n in range(1, replicas + 1) if replicas % n == 0]
            raise ValueError(
                f"trainer.ep={self.ep} does not divide trainer.dp * trainer.cp = {replicas}, the ranks that "
                f"share the experts. Set trainer.ep to one of {fitting}, or raise trainer.dp."
            )

        # Refuse settings that local layers support but TransformerEngine's layers do not.
        if self.cp > 1 and self.layers is LayerSpec.TE:
            raise ValueError(
                f"trainer.cp={self.cp} needs our attention, and trainer.layers=te has TransformerEngine's: "
                "set trainer.layers=local."
            )
        if self.sp and self.tp == 1:
            raise ValueError(
                "trainer.sp=true shares tokens between tensor parallel ranks, and trainer.tp=1: set "
                "trainer.sp=false, or raise trainer.tp."
            )
        if self.sp and self.layers is LayerSpec.TE:
            raise ValueError(
                "trainer.sp=true needs micro-batches filled up to a multiple of trainer.tp, and "
                "trainer.layers=te reads padded rows: set trainer.layers=local, or trainer.sp=false."
            )

        if self.lora.active and self.layers is LayerSpec.TE:
            raise ValueError(
                f"trainer.layers=te with trainer.lora.rank={self.lora.rank}: TransformerEngine fuses norms "
                "into the layers that have LoRA adapters. Set trainer.layers=local, or "
                "trainer.lora.rank=0."
            )

        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"trainer.{name} must be in [0, 1), got {getattr(self, name)}.")

    @property
    def world_size(self) -> int:
        """Number of ranks of the trainer."""
        return self.tp * self.cp * self.pp * self.dp

    def expert_ranks(self, experts: int) -> int:
        """Return the number of ranks over which `experts` experts are split: `ep`, unless it is 0."""
        return self.ep or (math.gcd(experts, self.dp * self.cp) if experts else 1)

    def stage_layers(self, layers: int) -> list[int]:
        """Return the number of layers of each pipeline stage; the last stage has the head and fewest layers.

        >>> TrainerConfig(pp=4).stage_layers(47)
        [12, 12, 12, 11]
        >>> TrainerConfig(pp=4).stage_layers(45)
        [11, 12, 11, 11]
        """
        each, more = divmod(layers, self.pp)

        # Middle stages get the remaining layers first: the first stage has the embedding, the last the head.
        middle_first = sorted(range(self.pp), key=lambda stage: (stage == self.pp - 1, stage == 0))
        return [each + (stage in middle_first[:more]) for stage in range(self.pp)]


def check_parallel(
    config: TrainerConfig, hf_config: Mapping[str, Any], world_size: int | None = None
) -> None:
    """Refuse parallel sizes that cannot work for a model, before anything is started.

    hf_config: the checkpoint's `config.json`. world_size: number of existing ranks, if known.
    Raises ValueError with the problem, the value and a hint.
    """
    # Tensor parallelism must divide these sizes of the model.
    heads = int(hf_config["num_attention_heads"])
    inner = "moe_intermediate_size" if hf_config.get("moe_intermediate_size") else "intermediate_size"
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": int(hf_config.get("num_key_value_heads") or heads),
        inner: int(hf_config[inner]),
        "hidden_size": int(hf_config["hidden_size"]),
    }
    linear = ("linear_num_key_heads", "linear_num_value_heads", "shared_expert_intermediate_size")
    sizes |= {name: int(hf_config[name]) for name in linear if hf_config.get(name)}
    if hf_config.get("first_k_dense_replace"):
        sizes["intermediate_size"] = int(hf_config["intermediate_size"])

    if latent := int(hf_config.get("kv_lora_rank") or 0):
        if config.layers is LayerSpec.TE:
            raise ValueError(
                "trainer.layers=te: the model has latent attention (kv_lora_rank), which needs our own "
                "layers. Set trainer.layers=auto or local."
            )
        sizes["kv_lora_rank + qk_rope_head_dim"] = latent + int(hf_config["qk_rope_head_dim"])
        sizes["q_lora_rank"] = int(hf_config.get("q_lora_rank") or 0)

    for name, size in sizes.items():
        if size % config.tp:
            fitting = [n for n in range(1, config.tp) if all(s % n == 0 for s in sizes.values())]
            raise ValueError(
                f"trainer.tp={config.tp} does not divide the model's {name}={size}. "
                f"Set trainer.tp to one of {fitting} and raise trainer.dp instead."
            )

    if (delta := int(hf_config.get("linear_num_key_heads") or 0)) and delta % (config.tp * config.cp):
        fitting = [n for n in range(1, config.cp) if delta % (config.tp * n) == 0]
        raise ValueError(
            f"trainer.cp={config.cp} with trainer.tp={config.tp}: their ranks share the heads of a gated "
            f"delta net, and {config.tp * config.cp} does not divide linear_num_key_heads={delta}. "
            f"Set trainer.cp to one of {fitting} and raise trainer.dp instead."
        )

    if config.pp > 1 and config.pp > (layers := int(hf_config["num_hidden_layers"])):
        raise ValueError(
            f"trainer.pp={config.pp} is more stages than the model has layers, num_hidden_layers={layers}. "
            f"Set trainer.pp to at most {layers} and raise trainer.dp instead."
        )

    experts = count_experts(hf_config)
    if config.ep > 1 and (not experts or experts % config.ep):
        raise ValueError(
            f"trainer.ep={config.ep} shares experts between ranks, and the model has {experts or 'none'}. "
            "Set trainer.ep to a divisor of their number, and to 1 for a model without."
        )

    if world_size is not None and world_size != config.world_size:
        raise ValueError(
            f"trainer.tp * trainer.cp * trainer.pp * trainer.dp = {config.tp} * {config.cp} * {config.pp} * "
            f"{config.dp} = {config.world_size}, but there are {world_size} ranks. Make them equal."
        )


def count_experts(hf_config: Mapping[str, Any]) -> int:
    """Return the number of experts in a layer (families use different names for it); 0 without experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return max(int(hf_config.get(name) or 0) for name in names)


def for_model(config: TrainerConfig, hf_config: Mapping[str, Any]) -> TrainerConfig:
    """Return the settings with the `ep` and `layers` that fit a model.

    TransformerEngine's layers do not support latent attention. hf_config: the checkpoint's `config.json`,
    already checked by `check_parallel`.
    """
    config = replace(config, ep=config.expert_ranks(count_experts(hf_config)))
    return replace(config, layers=LayerSpec.LOCAL) if hf_config.get("kv_lora_rank") else config
