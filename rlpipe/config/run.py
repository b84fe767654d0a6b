"""The full configuration, with one dataclass for each component.

Defaults are set here and in the component dataclasses; YAML files contain only differences. Checks that
involve several components are in `rlpipe.preflight.settings`. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rlpipe.config.adapt import AdaptConfig
from rlpipe.config.algo import AlgoConfig
from rlpipe.config.choice import Choice
from rlpipe.config.data import DataConfig, FunctionTask
from rlpipe.config.decoupled import DecoupledConfig
from rlpipe.config.draft import DraftConfig
from rlpipe.config.eagle3 import Eagle3Config
from rlpipe.config.env import EnvConfig
from rlpipe.config.injection import InjectionConfig
from rlpipe.config.limits import at_least, positive, share
from rlpipe.config.metrics import MetricsConfig
from rlpipe.config.pipeline import PipelineConfig, Stale
from rlpipe.config.ppow import PpowConfig
from rlpipe.config.rollout import EngineKind, RolloutConfig
from rlpipe.config.run_mode import RunMode
from rlpipe.config.sglang import WeightTransfer
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.config.trainer import TrainerConfig


class Task(Choice):
    """The kind of training that a recipe runs."""

    RL = "rl"  # asynchronous RL of the policy
    MTP_ADAPT = "mtp_adapt"  # training of a draft model for a frozen target


class ClusterMode(Choice):
    """Where the components run."""

    RAY = "ray"  # one Ray actor for each rollout worker and each trainer rank
    INLINE = "inline"  # all components are threads of this process


class Resume(Choice):
    """What a run does with existing checkpoints in `run.dir`."""

    AUTO = "auto"  # continue from the newest one, if any; the experiment's settings must be the same
    ANYWAY = "anyway"  # as auto, but the experiment's settings may differ
    NEVER = "never"  # refuse a directory that contains a run


@dataclass(slots=True, kw_only=True)
class RunSettings:
    """Settings that every run uses."""

    dir: str = "runs/default"
    """Run directory."""

    steps: int = 40
    """Number of training steps."""

    seed: int = 0
    """Seed of data order and sampling."""

    resume: Resume = Resume.AUTO
    """See `Resume`."""

    save_every: int = 20
    """Steps between checkpoints; 0: only one at the end."""

    keep_last: int = 2
    """Number of newest checkpoints to keep on disk."""

    keep_best: int = 0
    """Number of further checkpoints to keep: those with the highest val/reward among validated steps."""

    save_async: bool = True
    """Write checkpoints while training continues, from a copy of the trainer's state in host memory."""

    max_masked_share: float = 0.5
    """The run stops, with a checkpoint and exit status 1, if at least this share of the last `masked_window`
    attempts were masked because something other than the model failed."""

    masked_window: int = 64
    """Number of last attempts on which `max_masked_share` is measured."""

    half: RunMode = RunMode.BOTH
    """See `RunMode`."""

    dump: str = ""
    """Folder of dumped batches: half=train reads them, other modes write them. Empty: RUN/dump with
    half=rollout, no dump with half=both."""

    def __post_init__(self) -> None:
        if self.half is RunMode.ROLLOUT and not self.dump:
            self.dump = f"{self.dir}/dump"
        if self.half is RunMode.TRAIN and not self.dump:
            raise ValueError("run.half=train trains on a dump, and run.dump is empty: set run.dump=FOLDER.")
        at_least(1, self, "run", "steps", "keep_last", "masked_window")
        at_least(0, self, "run", "save_every", "keep_best")
        share(self, "run", "max_masked_share")
        positive(self, "run", "max_masked_share", remedy="1 stops when all are masked")


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    """The model that is trained."""

    path: str = "shipped:models/tiny"
    """A Hugging Face checkpoint directory, `shipped:models/tiny`, the name of a model that `rlpipe fetch` has
    stored (`smollm2`), or the id of a model of the Hugging Face hub (`org/name`, `org/name@revision`)."""

    chat_template: str = ""
    """A Jinja file that replaces the chat template of the model; the run's checkpoints contain it too."""


@dataclass(slots=True, kw_only=True)
class ValConfig:
    """Validation on held-out instances."""

    every: int = 20
    """Steps between validations; 0: never. If not 0, the policy is also validated before the first and after
    the last step."""

    instances: int = 200
    """Number of instances of each held-out split, always the first ones; 0: all."""

    samples: int = 1
    """Number of attempts at each instance."""

    temperature: float = 1.0
    """Sampling temperature of validation; 0 is greedy."""

    def __post_init__(self) -> None:
        at_least(0, self, "val", "every", "instances", "temperature")
        at_least(1, self, "val", "samples")


@dataclass(slots=True, kw_only=True)
class ClusterConfig:
    """Processes of a run, the machines and GPUs they use, and their restarts."""

    mode: ClusterMode = ClusterMode.RAY
    """See `ClusterMode`."""

    address: str = ""
    """Address of a running Ray cluster; empty: start a local cluster."""

    gpu_gb: float = 0.0
    """Memory of one GPU in GiB, for the memory estimate; 0: the memory of this machine's first GPU."""

    share_gpus: bool = False
    """Put rollout worker n and trainer rank n on one GPU, which they share equally, not on separate GPUs."""

    max_workers: int = 0
    """Maximum number of rollout workers. The run adds workers while its trainer waits for rollouts and each
    new worker makes it faster; it later removes workers that are not needed. 0: always rollout.workers."""

    max_restarts: int = 3
    """Maximum number of times a dead rollout worker is replaced before the run gives up."""

    max_trainer_restarts: int = 2
    """Maximum number of times a dead trainer is restarted; it continues from the newest checkpoint."""

    hang_s: float = 0.0
    """Maximum seconds of a call to a rollout worker (group, evaluation, weight update) or trainer rank (step,
    checkpoint); after that, it is killed and replaced. Must exceed the slowest group and step. 0: no
    limit."""

    def __post_init__(self) -> None:
        at_least(
            0, self, "cluster", "gpu_gb", "max_workers", "max_restarts", "max_trainer_restarts", "hang_s"
        )


@dataclass(slots=True, kw_only=True)
class Config:
    """All settings of a run; each component has a separate dataclass."""

    recipe: str = ""
    """Name of the recipe; groups runs in W&B."""

    task: Task = Task.RL
    """See `Task`."""

    run: RunSettings = field(default_factory=RunSettings)
    model: ModelConfig = field(default_factory=ModelConfig)
    decoupled: DecoupledConfig = field(default_factory=DecoupledConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    spec: SpecConfig = field(default_factory=SpecConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    ppow: PpowConfig = field(default_factory=PpowConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: Any = None
    """Rewards of the environment `function`: a function such as my_reward.py:score, the name of a built-in
    reward, a list of these, or a mapping to weights, such as {my_reward.py:score: 0.7, exact_match: 0.3}."""

    injection: InjectionConfig = field(default_factory=InjectionConfig)
    val: ValConfig = field(default_factory=ValConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    eagle3: Eagle3Config = field(default_factory=Eagle3Config)

    def __post_init__(self) -> None:
        # Environments are created only from `env`, also in workers and in `env.mix`.
        self.env.function = FunctionTask(data=self.data, reward=self.reward, model=self.rollout_model)

    @property
    def rollout_model(self) -> str:
        """Path of the model that generates: the decoupled actor, or else the policy."""
        return self.decoupled.path or self.model.path

    @property
    def cotrains_draft(self) -> bool:
        """Whether a draft model with a separate trainer is co-trained with the policy."""
        return self.task is Task.RL and self.draft.online and self.spec.needs_draft

    @property
    def probes_draft(self) -> bool:
        """Whether the trainer can compare target and draft on fixed contexts (`metrics.probe`).

        It cannot at temperature 0, because acceptance is not a probability then. It also cannot if a
        decoupled actor has a draft with a separate directory, because the draft's target would be the actor.
        """
        drafts = self.spec.mode is not SpecMode.NONE and self.rollout.temperature > 0
        return drafts and not (self.spec.needs_draft and self.decoupled.active)

    @property
    def broadcasts_weights(self) -> bool:
        """Whether the trainer sends weights to all SGLang servers itself.

        False in a single process, and if rollout workers serve weights that differ from the trainer's.
        """
        rollout = self.rollout
        return (
            rollout.engine is EngineKind.SGLANG
            and rollout.sglang.weight_transfer.is_broadcast
            and self.cluster.mode is ClusterMode.RAY
            and self.run.half is RunMode.BOTH
            and not (self.injection.active() or self.decoupled.active)
        )

    @property
    def sends_from_every_rank(self) -> bool:
        """Whether each trainer rank sends weights to its GPU's server; else the first rank sends to all."""
        return self.broadcasts_weights and self.cluster.share_gpus

    def validates(self, step: int) -> bool:
        """Return whether the policy is validated at a step: the first, the last, every val.every steps."""
        every = self.val.every
        return bool(every) and (step % every == 0 or step == self.run.steps)


def for_run_mode(config: Config) -> Config:
    """Return the settings for a run mode, without features that need a component that does not run.

    Validation is off, because it needs engines and weights that change. Without a trainer the probe is off
    too. The groups of a dump were already selected when it was written, so all are trained on, in the same
    order.
    """
    run_mode = config.run.half
    if run_mode is RunMode.BOTH:
        return config

    settings: dict[str, Any] = {"val": replace(config.val, every=0)}
    if run_mode is RunMode.ROLLOUT:
        probe = replace(config.metrics.probe, every=0)
        settings["metrics"] = replace(config.metrics, probe=probe)
    else:
        order = {"stale": Stale.WAIT, "oversample": 1.0, "filter_equal_rewards": False}
        settings["pipeline"] = replace(config.pipeline, **order)
        settings["injection"] = InjectionConfig()
    return replace(config, **settings)


def with_weight_transfer(config: Config, *, hosts: int, gpus: bool) -> tuple[Config, str]:
    """Replace `rollout.sglang.weight_transfer=auto` by a transfer, and return the settings and the reason.

    If the servers have separate GPUs or are on several hosts, the trainer broadcasts (collective) if it can.
    A server on the GPU of a trainer rank maps that rank's memory (ipc), unless only the first rank has the
    draft. Otherwise a server maps memory that its worker writes (shared). Values other than `auto` are not
    changed.
    hosts: number of hosts in the cluster. gpus: whether the cluster has GPUs.
    Raises ValueError for ipc if servers cannot map the trainer's memory.
    """
    rollout = config.rollout
    sglang = rollout.sglang
    on_gpu = gpus if rollout.device == "auto" else rollout.device.startswith("cuda")
    shares = config.cluster.share_gpus
    separate_gpus = on_gpu and not shares
    remote = (hosts > 1 and not shares) or separate_gpus

    # A server can map only memory of the same host and GPU.
    if sglang.weight_transfer is WeightTransfer.IPC and config.broadcasts_weights and remote:
        where = f"{hosts} hosts" if hosts > 1 else "servers with GPUs of their own"
        raise ValueError(
            f"rollout.sglang.weight_transfer=ipc with {where}: a server maps memory of the trainer's own "
            "host and GPU. Set weight_transfer=auto, or cluster.share_gpus=true."
        )

    if rollout.engine is not EngineKind.SGLANG or sglang.weight_transfer is not WeightTransfer.AUTO:
        return config, ""

    def by(transfer: WeightTransfer) -> Config:
        """Return the settings with this transfer."""
        return replace(config, rollout=replace(rollout, sglang=replace(sglang, weight_transfer=transfer)))

    # `broadcasts_weights` reads the transfer, so it must be evaluated with the new transfer.
    broadcast = by(WeightTransfer.COLLECTIVE)
    if broadcast.broadcasts_weights and remote:
        where = f"{hosts} hosts" if hosts > 1 else "servers with GPUs of their own"
        return broadcast, f"weights reach the servers by broadcast (collective): {where}"
    on_all_ranks = config.trainer.world_size == 1 or not config.cotrains_draft
    if broadcast.broadcasts_weights and on_gpu and on_all_ranks:
        return by(WeightTransfer.IPC), "weights reach each server through memory of its GPU (ipc)"
    return by(WeightTransfer.SHARED), "weights reach the servers through memory that they share with workers"
