"""Settings of the recipe that makes the tiny model."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpipe.config.choice import Choice


class WeightType(Choice):
    """Data type of stored weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def _require(ok: bool, what: str, value: object, remedy: str) -> None:
    if not ok:
        raise ValueError(f"{what}={value!r} {remedy}")


@dataclass(slots=True, kw_only=True)
class TinyShape:
    """Size of the backbone; the MTP layer is one more layer of the same size."""

    hidden_size: int = 128
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 512
    max_positions: int = 1024

    def __post_init__(self) -> None:
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "shape.num_kv_heads",
            self.num_kv_heads,
            f"must divide num_heads={self.num_heads}.",
        )


@dataclass(slots=True, kw_only=True)
class StageConfig:
    """One training stage.

    steps: optimizer steps. batch_tokens: tokens of a batch, padding included. lr: peak learning rate, after
    a linear warm-up of `warmup` steps; constant until half of the steps, then falling linearly to a tenth.
    mix: weight of each `demonstrators.Demonstrator`.
    context_weight: loss weight of tokens that the model does not write. mask_wrong: no loss on wrong edits
    and on submissions that follow them. drill: in this share of the steps, from the start, every second step
    is a copy drill.
    """

    steps: int = 1000
    batch_tokens: int = 1536
    lr: float = 2e-3
    warmup: int = 50
    mix: dict[str, float] = field(default_factory=dict)
    context_weight: float = 0.3
    mask_wrong: bool = False
    drill: float = 0.0

    def __post_init__(self) -> None:
        _require(self.steps >= 1, "stage steps", self.steps, "must be at least 1.")
        _require(self.lr > 0, "stage lr", self.lr, "must be positive.")
        _require(0 <= self.drill <= 1, "stage drill", self.drill, "must lie in 0..1.")


def _skill() -> StageConfig:
    return StageConfig(steps=4000, mix={"careful": 0.85, "retry": 0.15}, mask_wrong=True, drill=0.1875)


def _imitation() -> StageConfig:
    mix = {"careful": 0.44, "retry": 0.05, "at_once": 0.1, "located": 0.1, "viewed": 0.13, "untested": 0.18}
    return StageConfig(steps=300, lr=6e-4, warmup=20, mix=mix)


def _mtp() -> StageConfig:
    return StageConfig(steps=2000, batch_tokens=2048, lr=2e-3)


@dataclass(slots=True, kw_only=True)
class Settings:
    """All settings of `make.run_tiny_model`.

    seed: of weights, data order and demonstrators. data_seed, held_out: seed and size of the shipped held-out
    sets, whose instances are excluded from training. instances: number of training instances to generate.
    gamma: number of depths that the MTP layer is trained for.
    save_every: steps between checkpoints. threads: of torch. workers: processes that generate data.
    dtype: of the finished checkpoint's weights; training is always in float32.
    """

    seed: int = 0
    data_seed: int = 0
    held_out: int = 256
    instances: int = 40_000
    vocab_size: int = 1024
    threads: int = 1
    workers: int = 2
    save_every: int = 250
    gamma: int = 3
    dtype: WeightType = WeightType.FLOAT32
    shape: TinyShape = field(default_factory=TinyShape)
    skill: StageConfig = field(default_factory=_skill)
    imitation: StageConfig = field(default_factory=_imitation)
    mtp: StageConfig = field(default_factory=_mtp)

    def __post_init__(self) -> None:
        _require(self.gamma >= 1, "gamma", self.gamma, "must be at least 1.")
        _require(self.instances >= 1, "instances", self.instances, "must be at least 1.")
        _require(self.save_every >= 1, "save_every", self.save_every, "must be at least 1.")


@dataclass(slots=True, kw_only=True)
class MoeShape:
    """Size of the MoE in each layer except the first: experts, experts per token, channels per expert.

    A shared expert of the same size reads every token. The remaining sizes are the dense model's.
    """

    experts: int = 8
    per_token: int = 2
    intermediate: int = 128

    def __post_init__(self) -> None:
        fits = 1 < self.per_token <= self.experts
        _require(fits, "shape.per_token", self.per_token, f"must lie in 2..{self.experts}, the experts.")
        _require(self.intermediate >= 1, "shape.intermediate", self.intermediate, "must be at least 1.")


@dataclass(slots=True, kw_only=True)
class MoeSettings:
    """All settings of `make_moe.make`.

    base: the dense checkpoint that is cut, with an MTP layer in MiMo's layout. instances: how many of the
    shipped training set are used; `demonstrations` demonstrators work on each. balance: step of the experts'
    biases. seed, gamma, save_every, threads, dtype: as in `Settings`.
    """

    seed: int = 0
    base: str = "shipped:models/tiny"
    instances: int = 3000
    demonstrations: int = 2
    balance: float = 0.001
    threads: int = 1
    save_every: int = 250
    gamma: int = 3
    dtype: WeightType = WeightType.BFLOAT16
    shape: MoeShape = field(default_factory=MoeShape)
    distill: StageConfig = field(
        default_factory=lambda: StageConfig(steps=200, lr=1.5e-3, warmup=20, mix=_imitation().mix)
    )
    draft: StageConfig = field(
        default_factory=lambda: StageConfig(steps=200, batch_tokens=2048, lr=1.5e-3, warmup=20)
    )

    def __post_init__(self) -> None:
        _require(self.instances >= 1, "instances", self.instances, "must be at least 1.")
        _require(self.demonstrations >= 1, "demonstrations", self.demonstrations, "must be at least 1.")
        _require(self.gamma >= 1, "gamma", self.gamma, "must be at least 1.")
        _require(self.save_every >= 1, "save_every", self.save_every, "must be at least 1.")
