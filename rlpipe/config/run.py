"""The whole configuration: one dataclass per component, and the checks that cross components.

Defaults live here and in the component dataclasses; YAML states only differences. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpipe.config.adapt import AdaptConfig
from rlpipe.config.algo import AlgoConfig, Correction, Proximal
from rlpipe.config.choice import Choice
from rlpipe.config.decoupled import DecoupledConfig, check_actor
from rlpipe.config.eagle3 import Eagle3Config, Eagle3Shape, read_shape
from rlpipe.config.env import EnvConfig
from rlpipe.config.half import Half
from rlpipe.config.injection import InjectionConfig
from rlpipe.config.metrics import MetricsConfig
from rlpipe.config.mtp import MtpConfig, check_draft
from rlpipe.config.paths import resolve
from rlpipe.config.pipeline import PipelineConfig, Stale
from rlpipe.config.ppow import PpowConfig
from rlpipe.config.rollout import EngineKind, RolloutConfig
from rlpipe.config.sglang import WeightTransfer
from rlpipe.config.spec import Drafter, SpecConfig, SpecMode
from rlpipe.config.trainer import TrainerConfig, check_parallel
from rlpipe.config.warmstart import WarmstartConfig
from rlpipe.hf_layout import read_config, require_mtp


class Task(Choice):
    """What a recipe runs."""

    RL = "rl"  # the async loop
    TINY_MODEL = "tiny_model"  # the supervised warm start that makes the shipped checkpoint
    MTP_ADAPT = "mtp_adapt"  # the MTP layer of a frozen model learns to draft for it


class ClusterMode(Choice):
    """How components are placed."""

    RAY = "ray"  # one actor per rollout worker and per trainer rank
    INLINE = "inline"  # all in this process, in threads


class Resume(Choice):
    """What to do with checkpoints that `run.dir` already holds."""

    AUTO = "auto"  # continue from the newest one, if any
    NEVER = "never"  # refuse a directory that holds a run


@dataclass(slots=True, kw_only=True)
class RunSettings:
    """Settings everyone uses.

    dir: run directory. steps: optimizer steps of the trainer loop. seed: of data order and sampling.
    save_every: steps between checkpoints (0: only the last). keep_last: how many of the newest stay on disk.
    keep_best: how many of those with the highest val/reward stay besides (of steps that were validated).
    save_async: checkpoints are written while training goes on, from a copy of the trainer's state in host
        memory.
    max_masked_share, masked_window: the run stops, with a checkpoint and exit status 1, when at least this
        share of the last attempts, so many, were masked because something other than the model failed.
    half: see Half. dump: folder of the batches, read with half=train and written otherwise (empty: RUN/dump
        with half=rollout, none with half=both).
    """

    dir: str = "runs/default"
    steps: int = 40
    seed: int = 0
    resume: Resume = Resume.AUTO
    save_every: int = 20
    keep_last: int = 2
    keep_best: int = 0
    save_async: bool = True
    max_masked_share: float = 0.5
    masked_window: int = 64
    half: Half = Half.BOTH
    dump: str = ""

    def __post_init__(self) -> None:
        if self.half is Half.ROLLOUT and not self.dump:
            self.dump = f"{self.dir}/dump"
        if self.half is Half.TRAIN and not self.dump:
            raise ValueError("run.half=train trains on a dump, and run.dump is empty: set run.dump=FOLDER.")
        if self.steps < 1:
            raise ValueError(f"run.steps must be at least 1, got {self.steps}.")
        if not 0 < self.max_masked_share <= 1 or self.masked_window < 1:
            raise ValueError(
                f"run.max_masked_share={self.max_masked_share} must be above 0 and at most 1 (stop when all "
                f"are masked), and run.masked_window={self.masked_window} at least 1."
            )
        if self.save_every < 0 or self.keep_last < 1 or self.keep_best < 0:
            raise ValueError(
                f"run.save_every={self.save_every} and run.keep_best={self.keep_best} must be >= 0, and "
                f"run.keep_last={self.keep_last} must be >= 1."
            )


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """path: a Hugging Face checkpoint directory, or `shipped:models/tiny`."""

    path: str = "shipped:models/tiny"


@dataclass(slots=True, kw_only=True)
class ValConfig:
    """Validation on held-out instances.

    every: steps between validations (0: never); always also before the first and after the last step.
    instances: of each held-out split (fixed, the first ones; 0: all). samples: attempts per instance.
    """

    every: int = 20
    instances: int = 200
    samples: int = 1
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.every < 0 or self.instances < 0 or self.samples < 1 or self.temperature < 0:
            raise ValueError(
                f"val: every={self.every}, instances={self.instances} and temperature={self.temperature} "
                f"must be >= 0, samples={self.samples} must be >= 1."
            )


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    """mode: ray or inline. address: of a running Ray cluster; empty starts a local one.

    share_gpus: rollout worker n and trainer rank n on one GPU, half of it each, instead of a GPU each.
    max_restarts: how often a dead rollout worker is replaced before the run gives up.
    max_trainer_restarts: how often a dead trainer is built again and continues from the newest checkpoint.
    hang_s: seconds after which a rollout worker that does not answer (a group, an evaluation, a weight
        update), or a trainer rank (a step, a checkpoint), is killed and replaced; it must exceed the slowest
        group and step. 0: never.
    """

    mode: ClusterMode = ClusterMode.RAY
    address: str = ""
    share_gpus: bool = False
    max_restarts: int = 3
    max_trainer_restarts: int = 2
    hang_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.max_restarts, self.max_trainer_restarts, self.hang_s) < 0:
            raise ValueError(
                f"cluster.max_restarts={self.max_restarts}, cluster.max_trainer_restarts="
                f"{self.max_trainer_restarts} and cluster.hang_s={self.hang_s} must be >= 0."
            )


@dataclass(slots=True, kw_only=True)
class Config:
    """A run. `recipe` is the name of the YAML that set it up; see the component dataclasses."""

    recipe: str = ""
    task: Task = Task.RL
    run: RunSettings = field(default_factory=RunSettings)
    model: ModelConfig = field(default_factory=ModelConfig)
    decoupled: DecoupledConfig = field(default_factory=DecoupledConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    spec: SpecConfig = field(default_factory=SpecConfig)
    mtp: MtpConfig = field(default_factory=MtpConfig)
    ppow: PpowConfig = field(default_factory=PpowConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    injection: InjectionConfig = field(default_factory=InjectionConfig)
    val: ValConfig = field(default_factory=ValConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    warmstart: WarmstartConfig = field(default_factory=WarmstartConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    eagle3: Eagle3Config = field(default_factory=Eagle3Config)

    @property
    def rollout_model(self) -> str:
        """Path of the model that generates: the decoupled actor, or the policy itself."""
        return self.decoupled.path or self.model.path

    @property
    def broadcasts_weights(self) -> bool:
        """Whether the trainer broadcasts weights to all SGLang servers itself.

        Not in one process, and not where a rollout worker serves other weights than the trainer's own.
        """
        rollout = self.rollout
        return (
            rollout.engine is EngineKind.SGLANG
            and rollout.sglang.weight_transfer is WeightTransfer.COLLECTIVE
            and self.cluster.mode is ClusterMode.RAY
            and self.run.half is Half.BOTH
            and not (self.injection.active() or self.decoupled.active)
        )

    def validates(self, step: int) -> bool:
        """Whether the policy is validated at a step: before the first, every so many, and after the last."""
        every = self.val.every
        return bool(every) and (step % every == 0 or step == self.run.steps)


def check_shared_gpus(config: Config) -> None:
    """Refuse what cannot run with cluster.share_gpus. Raises ValueError with the remedy."""
    rollout, ranks = config.rollout, config.trainer.world_size
    if config.cluster.mode is not ClusterMode.RAY or config.run.half is not Half.BOTH:
        raise ValueError(
            f"cluster.share_gpus=true places workers beside trainer ranks, and cluster.mode="
            f"{config.cluster.mode} with run.half={config.run.half} has not both as processes: set it to "
            "false."
        )
    if rollout.workers != ranks:
        raise ValueError(
            f"cluster.share_gpus=true puts one worker and one trainer rank on each GPU, but rollout.workers="
            f"{rollout.workers} and trainer.tp * trainer.dp = {ranks}: make them equal."
        )
    if rollout.engine is not EngineKind.SGLANG:
        return
    if rollout.sglang.tp > 1 or not rollout.sglang.memory_fraction:
        raise ValueError(
            f"cluster.share_gpus=true with rollout.sglang.tp={rollout.sglang.tp} and memory_fraction="
            f"{rollout.sglang.memory_fraction}: a server has half of one GPU, so set tp=1 and say how much "
            "of its memory, weights and KV, the server takes (e.g. memory_fraction=0.4)."
        )
    if rollout.sglang.weight_transfer is WeightTransfer.COLLECTIVE:
        raise ValueError(
            "cluster.share_gpus=true with rollout.sglang.weight_transfer=collective: NCCL allows one rank "
            "per GPU. Set weight_transfer=tensor or disk."
        )


def check(config: Config) -> None:
    """Everything that can be known to be wrong before anything is started.

    Raises ValueError with what, the value and the remedy.
    """
    if config.cluster.share_gpus:
        check_shared_gpus(config)
    check_run_dir(config.run)
    check_half(config)
    if config.task is not Task.RL and config.injection.active():
        raise ValueError(
            f"injection={config.injection.active()} disturbs the rollouts of task=rl, not of "
            f"task={config.task}: remove it."
        )
    if config.task is Task.TINY_MODEL:
        return
    served = hf_config = read_config(resolve(config.model.path))
    if config.decoupled.active:
        served = check_decoupled(config, hf_config)
    if config.spec.needs_mtp:
        require_mtp(served, config.rollout_model, config.spec.mode)
    if config.spec.needs_eagle3:
        read_shape(resolve(config.spec.draft_path), served)
    if config.algo.correction is Correction.OBRS and config.rollout.temperature == 0:
        raise ValueError(
            "algo.correction=obrs compares the distributions of rollout and trainer, and "
            "rollout.temperature=0 has none: set rollout.temperature=1.0, or another algo.correction."
        )
    probed = config.metrics.probe.every and config.spec.needs_mtp
    beside = config.task is Task.MTP_ADAPT and config.adapt.drafter is Drafter.EAGLE3  # needs no MTP layer
    learns = config.mtp.online and not beside
    if learns or (probed and config.task is Task.RL):
        check_draft(config.mtp, served, config.rollout_model)
    trained = config.mtp.online or config.task is Task.MTP_ADAPT
    if trained and config.mtp.ppow and config.rollout.temperature == 0:
        raise ValueError(
            "mtp.objective=ppow verifies drafts by rejection, and rollout.temperature=0 leaves no "
            "distribution: set rollout.temperature=1.0, or mtp.objective=e2e_tv."
        )
    if config.task is Task.RL:
        check_staleness(config)
    temperatures = (config.rollout.temperature, config.val.temperature)
    if config.spec.mode is SpecMode.GREEDY and any(temperatures):
        raise ValueError(
            f"spec.mode=greedy decodes the argmax, but rollout.temperature={temperatures[0]} and "
            f"val.temperature={temperatures[1]}: set both to 0, or spec.mode=rejection to sample."
        )
    longest = min(int(model.get("max_position_embeddings", 0)) for model in (hf_config, served))
    if longest and config.rollout.max_context > longest:
        raise ValueError(
            f"rollout.max_context={config.rollout.max_context} exceeds the model's "
            f"max_position_embeddings={longest}: lower rollout.max_context."
        )
    if config.rollout.max_context > config.trainer.micro_batch_tokens:
        raise ValueError(
            f"trainer.micro_batch_tokens={config.trainer.micro_batch_tokens} cannot hold one trajectory of "
            f"rollout.max_context={config.rollout.max_context} tokens: raise it, or lower the context."
        )
    check_parallel(config.trainer, hf_config)
    if config.rollout.engine is EngineKind.SGLANG:
        check_sglang(config)
    if config.task is Task.MTP_ADAPT:
        if config.adapt.drafter is Drafter.EAGLE3:
            check_eagle3(config, hf_config)
        else:
            require_mtp(hf_config, config.model.path, "mtp_adapt")
        check_adapt(config)
        return
    ranks = config.trainer.world_size
    if config.cluster.mode is ClusterMode.INLINE and (ranks > 1 or config.rollout.workers > 1):
        raise ValueError(
            f"cluster=inline runs one process, but trainer.tp*trainer.dp={ranks} and "
            f"rollout.workers={config.rollout.workers}: set them to 1, or use cluster=ray."
        )


def check_decoupled(config: Config, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """What an actor needs; hf_config: the policy's. Returns the actor's. Raises ValueError."""
    if config.task is not Task.RL:
        raise ValueError(
            f"decoupled.path={config.decoupled.path!r} generates for a policy of task=rl, not of "
            f"task={config.task}: remove it."
        )
    if config.rollout.temperature == 0:
        raise ValueError(
            "decoupled.path compares the distributions of actor and policy, and rollout.temperature=0 has "
            "none: set rollout.temperature=1.0."
        )
    sglang = config.rollout.sglang
    if config.rollout.engine is EngineKind.SGLANG and config.val.every and sglang.port:
        raise ValueError(
            f"decoupled.path with val.every={config.val.every} starts a second server, for the policy, and "
            f"rollout.sglang.port={sglang.port} is one port: set it to 0, or val.every=0."
        )
    path = resolve(config.decoupled.path)
    actor = read_config(path, "decoupled.path")
    check_actor(path, actor, resolve(config.model.path), hf_config, config)
    return actor


def check_half(config: Config) -> None:
    """Halves are of RL, and fixed weights never become stale. Raises ValueError."""
    half = config.run.half
    if config.task is not Task.RL and (half is not Half.BOTH or config.run.dump):
        raise ValueError(
            f"run.half={half} and run.dump={config.run.dump!r} are of task=rl, not of task={config.task}: "
            "remove them."
        )
    if half is Half.ROLLOUT and config.pipeline.stale is Stale.DROP:
        raise ValueError(
            "run.half=rollout decodes with the weights of version 0 throughout, and pipeline.stale=drop "
            "would give them up as too old: set pipeline.stale=wait."
        )


def check_staleness(config: Config) -> None:
    """Data of any age need a correction (or PPO's own ratio to the rollout policy). Raises ValueError."""
    corrected = config.algo.correction is not Correction.NONE or config.algo.proximal is Proximal.ROLLOUT
    if config.pipeline.stale is Stale.KEEP and not corrected:
        raise ValueError(
            "pipeline.stale=keep trains on tokens of any age, and algo.correction=none takes them for the "
            "policy's own: set algo.correction (tis_token is usual), or pipeline.stale=wait."
        )
    pipeline, injected = config.pipeline, config.injection.stale_steps
    if pipeline.stale is Stale.DROP and injected > pipeline.max_staleness:
        raise ValueError(
            f"injection.stale_steps={injected} makes every token older than pipeline.max_staleness="
            f"{pipeline.max_staleness}, and pipeline.stale=drop gives those up: nothing would ever be "
            "trained. Set pipeline.stale=wait."
        )


def check_sglang(config: Config) -> None:
    """What the SGLang engine cannot do, whatever the machine. Raises ValueError."""
    if config.task is Task.MTP_ADAPT:
        raise ValueError(
            "mtp_adapt records the drafts' probabilities, which SGLang does not return: use rollout=embedded."
        )
    if config.spec.mode is SpecMode.TREE or config.spec.adaptive:
        raise ValueError(
            f"spec.mode={config.spec.mode}, spec.adaptive={config.spec.adaptive}: SGLang decodes a chain of "
            "a fixed number of drafts. Use spec.mode=rejection and spec.adaptive=false, or rollout=embedded."
        )
    if config.spec.drafter is not Drafter.MTP:
        raise ValueError(
            f"spec.drafter={config.spec.drafter}: SGLang drafts with the MTP layer here. Use "
            "spec.drafter=mtp, or rollout=embedded."
        )


def check_adapt(config: Config) -> None:
    """What adaptation needs beyond what every run does. Raises ValueError."""
    config.adapt.environments(config.env)
    if config.rollout.temperature == 0:
        raise ValueError(
            "rollout.temperature=0: a greedy target has no distribution to learn. Adapt the draft at the "
            "temperature of the rollouts it will serve."
        )
    if config.trainer.world_size > 1:
        raise ValueError(
            f"mtp_adapt trains in one process, but trainer.tp*trainer.dp={config.trainer.world_size}: set "
            "both to 1."
        )


def check_eagle3(config: Config, hf_config: Mapping[str, Any]) -> None:
    """What training an EAGLE-3 draft needs; hf_config: the target's. Raises ValueError."""
    if config.eagle3.start:
        read_shape(resolve(config.eagle3.start), hf_config, "eagle3.start")
    else:
        Eagle3Shape.for_target(hf_config, config.eagle3.layers, config.eagle3.draft_vocab)


def check_run_dir(run: RunSettings) -> None:
    """Make the run directory and its checkpoint folder, and refuse what cannot be written or reused."""
    directory = resolve(run.dir)
    checkpoints = directory / "checkpoints"
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        probe = checkpoints / ".writable"
        try:
            probe.write_bytes(bytes(1 << 20))  # what the records of the first steps take
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"checkpoint directory {checkpoints} is not writable ({error.strerror or error}): "
            "set run.dir to a directory you can write to."
        ) from error
    if run.resume is Resume.NEVER and _holds_run(directory):
        raise ValueError(
            f"run.dir={run.dir!r} already holds a run and run.resume=never: "
            "choose another run.dir, or set run.resume=auto to continue it."
        )


def _holds_run(directory: Path) -> bool:
    return (directory / "metrics.jsonl").exists() or any((directory / "checkpoints").glob("step_*"))
