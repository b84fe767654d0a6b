"""Checks that compare several sections of the settings with each other, or with the files that they name.

The limits of a single section are checked by its dataclass. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlpipe.config.algo import Correction, Credit, Proximal
from rlpipe.config.decoupled import check_actor
from rlpipe.config.draft import check_draft
from rlpipe.config.draft_objectives import DraftObjective
from rlpipe.config.drafters import KINDS
from rlpipe.config.env import EnvName
from rlpipe.config.lora import check_lora
from rlpipe.config.paths import resolve, resolve_model
from rlpipe.config.pipeline import Stale
from rlpipe.config.rollout import EngineKind, check_embedded
from rlpipe.config.run import ClusterMode, Config, Resume, RunSettings, Task
from rlpipe.config.run_mode import RunMode
from rlpipe.config.sglang import WeightTransfer
from rlpipe.config.spec import SpecMode
from rlpipe.config.trainer import LayerSpec, LrSchedule, check_parallel
from rlpipe.drafts.kinds import DRAFTERS
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config
from rlpipe.models.rope import read_rope


def check_shared_gpus(config: Config) -> None:
    """Refuse settings that cannot run with cluster.share_gpus. Raises ValueError with a hint."""
    rollout, ranks = config.rollout, config.trainer.world_size
    if config.cluster.mode is not ClusterMode.RAY or config.run.half is not RunMode.BOTH:
        raise ValueError(
            f"cluster.share_gpus=true places workers together with trainer ranks, and cluster.mode="
            f"{config.cluster.mode} with run.half={config.run.half} does not run both as processes: set it "
            "to false."
        )

    if rollout.workers != ranks:
        raise ValueError(
            f"cluster.share_gpus=true puts one worker and one trainer rank on each GPU, but rollout.workers="
            f"{rollout.workers} and trainer.tp * trainer.cp * trainer.pp * trainer.dp = {ranks}: make them "
            "equal."
        )

    if rollout.engine is not EngineKind.SGLANG:
        return

    if rollout.sglang.tp > 1 or not rollout.sglang.memory_fraction:
        raise ValueError(
            f"cluster.share_gpus=true with rollout.sglang.tp={rollout.sglang.tp} and memory_fraction="
            f"{rollout.sglang.memory_fraction}: a server has half of one GPU, so set tp=1 and state how much "
            "of its memory, weights and KV, the server takes (e.g. memory_fraction=0.4)."
        )

    # On a shared GPU, `collective` never works, and `ipc` does not work if only the first rank has the draft.
    if rollout.sglang.weight_transfer is WeightTransfer.COLLECTIVE:
        raise ValueError(
            "cluster.share_gpus=true with rollout.sglang.weight_transfer=collective: NCCL allows one rank "
            "per GPU. Set weight_transfer=auto, ipc, shared or disk."
        )
    if rollout.sglang.weight_transfer is WeightTransfer.IPC and ranks > 1 and config.cotrains_draft:
        raise ValueError(
            f"cluster.share_gpus=true with rollout.sglang.weight_transfer=ipc, {ranks} trainer ranks and "
            f"draft.train=online: each rank sends what it has to the server of its GPU, and only the first "
            f"has the draft of spec.drafter={config.spec.drafter}. Set weight_transfer=auto or shared."
        )


def _check_growth(config: Config) -> None:
    """Refuse a worker pool that cannot grow as the settings require. Raises ValueError with a hint."""
    most, workers, cluster = config.cluster.max_workers, config.rollout.workers, config.cluster
    if most and most < workers:
        raise ValueError(
            f"cluster.max_workers={most} is below rollout.workers={workers}, with which the run starts: "
            "raise it, or set 0 for a pool that keeps its size."
        )

    # A new worker needs a separate process, and a device that no trainer rank uses.
    separate = cluster.mode is ClusterMode.RAY and not cluster.share_gpus and config.run.half is RunMode.BOTH
    if most and not (separate and config.task is Task.RL):
        raise ValueError(
            f"cluster.max_workers={most} with task={config.task}, cluster.mode={cluster.mode}, share_gpus="
            f"{str(cluster.share_gpus).lower()} and run.half={config.run.half}: workers join a run of task="
            "rl in which each has a separate process and device. Set cluster.max_workers=0."
        )


def _check_function(config: Config) -> None:
    """Refuse a user's data set or reward that the environment would ignore. Raises ValueError with a hint."""
    unused = [name for name, value in (("data.train", config.data.train), ("reward", config.reward)) if value]
    if unused and config.env.name not in (EnvName.FUNCTION, EnvName.AGENT):
        raise ValueError(
            f"{' and '.join(unused)} belong to the environments function and agent, and env.name="
            f"{config.env.name} does not use them: add env=function, or leave them out."
        )
    run, name = config.env.agent.run, config.env.name
    if run and name not in (EnvName.AGENT, EnvName.SWE):
        raise ValueError(
            f"env.agent.run={run!r} belongs to the environments agent and swe, and env.name={name} does not "
            "use it: add env=agent, or leave it out."
        )
    if run and config.rollout.replay_routes:
        raise ValueError(
            f"rollout.replay_routes=true with env.agent.run={run!r}: experts are recorded of one "
            "conversation, and an agent may open several in an attempt. Set it to false."
        )


def check(config: Config) -> None:
    """Refuse every setting that is certain to fail, before anything is started.

    Raises ValueError with the problem, the value and a hint.
    """
    if config.cluster.share_gpus:
        check_shared_gpus(config)
    _check_growth(config)
    check_run_dir(config.run)
    check_run_mode(config)
    _check_credit(config)
    _check_function(config)

    if config.task is not Task.RL and config.injection.active():
        raise ValueError(
            f"injection={config.injection.active()} disturbs the rollouts of task=rl, not of "
            f"task={config.task}: remove it."
        )

    # The model that generates may be a separate actor with a different config.json.
    served = hf_config = read_config(resolve_model(config.model.path))
    if config.decoupled.active:
        served = check_decoupled(config, hf_config)

    if config.spec.mode is not SpecMode.NONE:
        DRAFTERS[config.spec.drafter].check_served(config, served)

    correction = config.algo.correction
    if correction.is_obrs:
        need = f"algo.correction={correction} compares the distributions of rollout and trainer"
        _require_sampling(config, need)

    # Training or probing the MTP layer needs a checkpoint that has one.
    probed = config.metrics.probe.every and config.spec.needs_mtp
    # A draft model in a separate directory needs no MTP layer.
    separate_draft = config.task is Task.MTP_ADAPT and config.adapt.drafter.kind.has_directory
    learns = config.draft.online and not (separate_draft or config.cotrains_draft)
    if learns or (probed and config.task is Task.RL):
        check_draft(config.draft, served, config.rollout_model)

    if (separate_draft or config.cotrains_draft) and config.draft.objective is DraftObjective.EAGLE1:
        raise ValueError(
            "draft.objective=eagle1 compares hidden states under one head, and an EAGLE-3 draft has another "
            "head than its target: train an MTP layer with it, or set draft.objective=kl."
        )

    # Objectives on windows verify sequences that the draft generates itself; some layouts cannot do this.
    trained = config.draft.online or config.task is Task.MTP_ADAPT
    if trained and config.draft.windows and config.trainer.cp > 1:
        raise ValueError(
            f"draft.objective={config.draft.objective} with trainer.cp={config.trainer.cp}: its windows read "
            "all keys of a pass, which context parallel ranks share. Set trainer.cp=1, or "
            "draft.objective=e2e_tv."
        )
    if learns and config.draft.windows and config.trainer.pp > 1:
        raise ValueError(
            f"draft.objective={config.draft.objective} with trainer.pp={config.trainer.pp}: its windows run "
            "the whole model, which pipeline stages share. Set trainer.pp=1, or draft.objective=e2e_tv."
        )
    if learns and config.draft.windows and config.trainer.sp:
        raise ValueError(
            f"draft.objective={config.draft.objective} with trainer.sp=true: its windows have numbers of "
            "tokens that ranks cannot share evenly. Set trainer.sp=false, or draft.objective=e2e_tv."
        )
    if trained and config.draft.windows and config.rollout.temperature == 0:
        raise ValueError(
            f"draft.objective={config.draft.objective} verifies drafts by rejection, and "
            "rollout.temperature=0 leaves no distribution: set rollout.temperature=1.0, or "
            "draft.objective=e2e_tv."
        )

    if config.cotrains_draft:
        DRAFTERS[config.spec.drafter].check_cotrained(config)
    if config.task is Task.RL:
        check_staleness(config)
        _check_learnable(config)

    temperatures = (config.rollout.temperature, config.val.temperature)
    if config.spec.mode is SpecMode.GREEDY and any(temperatures):
        raise ValueError(
            f"spec.mode=greedy decodes the argmax, but rollout.temperature={temperatures[0]} and "
            f"val.temperature={temperatures[1]}: set both to 0, or spec.mode=rejection to sample."
        )

    # The context lengths of the policy and of the model that generates must both hold a conversation.
    models = (hf_config, served)
    longest = min(read_rope(model).reach(int(model.get("max_position_embeddings", 0))) for model in models)
    if longest and config.rollout.max_context > longest:
        raise ValueError(
            f"rollout.max_context={config.rollout.max_context} exceeds the model's "
            f"longest context of {longest} tokens (max_position_embeddings, rope scaling): lower it."
        )

    if config.rollout.max_new_tokens >= config.rollout.max_context:
        raise ValueError(
            f"rollout.max_new_tokens={config.rollout.max_new_tokens} is not less than rollout.max_context="
            f"{config.rollout.max_context}, which holds prompt and answer: lower it, or raise the context."
        )

    if config.rollout.max_context > config.trainer.micro_batch_tokens:
        raise ValueError(
            f"trainer.micro_batch_tokens={config.trainer.micro_batch_tokens} cannot hold one trajectory of "
            f"rollout.max_context={config.rollout.max_context} tokens: raise it, or lower the context."
        )

    # Refuse unknown architectures first: the next checks read fields that they may lack.
    read_architecture(hf_config)
    check_parallel(config.trainer, hf_config)
    check_adapters(config, hf_config)
    check_biases(config.model.path, hf_config)
    check_replay(config, hf_config)

    if config.rollout.engine is EngineKind.EMBEDDED and config.run.half.generates:
        check_embedded(config.rollout_model, served)
    if config.rollout.engine is EngineKind.SGLANG:
        check_sglang(config)

    ranks = config.trainer.world_size
    if config.task is Task.MTP_ADAPT:
        DRAFTERS[config.adapt.drafter].check_trained(config, hf_config)
        check_adapt(config)
    if config.cluster.mode is ClusterMode.INLINE and (ranks > 1 or config.rollout.workers > 1):
        raise ValueError(
            f"cluster=inline runs one process, but trainer.tp*trainer.cp*trainer.pp*trainer.dp={ranks} and "
            f"rollout.workers={config.rollout.workers}: set them to 1, or use cluster=ray."
        )


def _check_learnable(config: Config) -> None:
    """Refuse runs that could not learn anything. Raises ValueError."""
    # spec.mode=greedy decodes only at temperature 0, so temperature 0 is not a mistake there.
    greedy = config.spec.mode is SpecMode.GREEDY
    if config.rollout.temperature == 0 and config.run.half is RunMode.BOTH and not greedy:
        raise ValueError(
            "rollout.temperature=0 makes all siblings of a group equal, so that every advantage is 0 and "
            "nothing is learnt: set rollout.temperature=1.0 (val.temperature=0 validates greedily)."
        )

    if config.draft.online and config.spec.mode is SpecMode.NONE:
        raise ValueError(
            "draft.train=online trains a draft, and spec.mode=none never drafts: set spec.mode=rejection, or "
            "draft.train=off."
        )


def check_adapters(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Refuse LoRA adapters in runs that do not train them. Raises ValueError."""
    lora = config.trainer.lora
    if not lora.active:
        return

    check_lora(lora, hf_config)
    if config.task is not Task.RL or config.decoupled.active:
        where = f"task={config.task}" if config.task is not Task.RL else "decoupled.path"
        raise ValueError(
            f"trainer.lora.rank={lora.rank} with {where}: adapters are of the policy of task=rl, which "
            "generates for itself. Set trainer.lora.rank=0."
        )


def check_replay(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Refuse to replay routes if none are recorded or no trainer reads them. Raises ValueError."""
    if not config.rollout.replay_routes:
        return

    dense = read_architecture(hf_config).experts is None
    refused = {
        f"model.path={config.model.path!r}, which has no experts": dense,
        f"task={config.task}, which trains no policy": config.task is not Task.RL,
        "decoupled.path, whose experts are not the policy's": config.decoupled.active,
    }

    for what, present in refused.items():
        if present:
            raise ValueError(
                f"rollout.replay_routes=true with {what}: it sends the tokens of an MoE to the "
                "experts that read them in the rollout. Set rollout.replay_routes=false."
            )

    if config.trainer.layers is LayerSpec.TE:
        raise ValueError(
            "rollout.replay_routes=true with trainer.layers=te: TransformerEngine gets no routes. Set "
            "trainer.layers=auto or local, or rollout.replay_routes=false."
        )


def check_biases(path: str, hf_config: Mapping[str, Any]) -> None:
    """Refuse a model with biases for which the trainer has no parameters. Raises ValueError."""
    arch = read_architecture(hf_config)
    for setting, where, present in (
        ("attention_bias", "o_proj", arch.output_bias),
        ("mlp_bias", "gate_proj, up_proj and down_proj", arch.mlp_bias),
    ):
        if present:
            raise ValueError(
                f"model.path={path!r}: its config.json has {setting}=true, which gives {where} a bias, and a "
                f"{arch.family} with one cannot be trained. Use a checkpoint with {setting}=false."
            )


def check_decoupled(config: Config, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Check the actor against the policy and return the actor's `config.json`. Raises ValueError.

    hf_config: the policy's `config.json`.
    """
    if config.task is not Task.RL:
        raise ValueError(
            f"decoupled.path={config.decoupled.path!r} generates for a policy of task=rl, not of "
            f"task={config.task}: remove it."
        )

    _require_sampling(config, "decoupled.path compares the distributions of actor and policy")
    sglang = config.rollout.sglang
    if config.rollout.engine is EngineKind.SGLANG and config.val.every and sglang.port:
        raise ValueError(
            f"decoupled.path with val.every={config.val.every} starts a second server, for the policy, and "
            f"rollout.sglang.port={sglang.port} is one port: set it to 0, or val.every=0."
        )

    path = resolve_model(config.decoupled.path, "decoupled.path")
    actor = read_config(path, "decoupled.path")
    check_actor(path, actor, resolve_model(config.model.path), hf_config, config)
    return actor


def _require_sampling(config: Config, need: str) -> None:
    """Refuse greedy rollouts if a distribution is needed. Raises ValueError.

    need: the first clause of the message.
    """
    if config.rollout.temperature == 0:
        raise ValueError(
            f"{need}, and rollout.temperature=0 leaves none: set rollout.temperature=1.0, or the temperature "
            "that the rollouts will have."
        )


def check_run_mode(config: Config) -> None:
    """Refuse run modes and dumps unless task=rl, and stale=drop with fixed weights. Raises ValueError."""
    run_mode = config.run.half
    if config.task is not Task.RL and (run_mode is not RunMode.BOTH or config.run.dump):
        raise ValueError(
            f"run.half={run_mode} and run.dump={config.run.dump!r} are of task=rl, not of "
            f"task={config.task}: remove them."
        )

    if run_mode is RunMode.ROLLOUT and config.pipeline.stale is Stale.DROP:
        raise ValueError(
            "run.half=rollout decodes with the weights of version 0 throughout, and pipeline.stale=drop "
            "would give them up as too old: set pipeline.stale=wait."
        )


def check_staleness(config: Config) -> None:
    """Refuse training on stale tokens without a correction, and runs that would drop all tokens.

    PPO's ratio to the rollout policy (proximal=rollout) is a correction too. Raises ValueError.
    """
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


def _check_credit(config: Config) -> None:
    """Refuse a filter that drops groups from which turn-level credit could learn. Raises ValueError."""
    if config.algo.credit is Credit.TURN and config.pipeline.filter_equal_rewards:
        raise ValueError(
            "pipeline.filter_equal_rewards=true drops groups whose trajectories have equal rewards, and with "
            "algo.credit=turn those may still teach: set pipeline.filter_equal_rewards=false or "
            "algo.credit=episode."
        )


def check_sglang(config: Config) -> None:
    """Refuse settings that the SGLang engine cannot follow on any machine. Raises ValueError."""
    if config.spec.mode is SpecMode.TREE:
        raise ValueError(
            f"spec.mode={config.spec.mode}: SGLang decodes a chain of drafts. Use spec.mode=rejection, or "
            "rollout=embedded."
        )

    sglang = config.rollout.sglang
    if config.spec.adaptive and (sglang.tp > 1 or not sglang.plugin):
        raise ValueError(
            f"spec.adaptive=true with rollout.sglang.tp={sglang.tp}, rollout.sglang.plugin={sglang.plugin}: "
            "rlpipe's plugin chooses the drafts, on one device. Set tp=1 and plugin=true, or "
            "spec.adaptive=false."
        )

    if not config.spec.drafter.kind.sglang:
        served = " or ".join(name for name, kind in KINDS.items() if kind.sglang)
        raise ValueError(
            f"spec.drafter={config.spec.drafter}: SGLang drafts with a model here. Use spec.drafter="
            f"{served}, or rollout=embedded."
        )


def check_adapt(config: Config) -> None:
    """Refuse settings that pre-RL adaptation cannot follow. Raises ValueError."""
    config.adapt.environments(config.env)
    _require_sampling(config, "task=mtp_adapt learns the distribution of the target")

    if config.trainer.world_size > 1 and config.adapt.drafter.kind.has_directory:
        raise ValueError(
            f"adapt.drafter={config.adapt.drafter} is trained by one process, but trainer.tp*trainer.cp*"
            f"trainer.pp*trainer.dp={config.trainer.world_size}: set each to 1."
        )

    # Some losses are exact only for tokens that the target sampled, and biased for other text.
    for setting, remedy in config.draft.own_tokens_only.items():
        if config.adapt.data:
            raise ValueError(
                f"{setting} is exact only for tokens that the model sampled, and adapt.data="
                f"{config.adapt.data!r} was written by others: set adapt.data='' (the model's own rollouts), "
                f"or {remedy}."
            )
        if config.adapt.context_weight:
            raise ValueError(
                f"{setting} is exact only for tokens that the model sampled, and adapt.context_weight="
                f"{config.adapt.context_weight} also trains on prompts and tool output: set "
                f"adapt.context_weight=0, or {remedy}."
            )

    # Every step of adaptation trains the draft.
    if config.draft.interval != 1:
        raise ValueError(
            f"draft.interval={config.draft.interval} with task=mtp_adapt: the interval is that of training "
            "during RL, and every step of adaptation trains the draft. Set draft.interval=1."
        )

    # In adaptation, `adapt.warmup` sets the learning-rate schedule; the schedule in `draft` is for RL.
    for name, value, unused in (
        ("warmup_steps", config.draft.warmup_steps, 0),
        ("lr_schedule", config.draft.lr_schedule, LrSchedule.CONSTANT),
    ):
        if value != unused:
            raise ValueError(
                f"draft.{name}={value} with task=mtp_adapt: its learning rate rises over adapt.warmup="
                f"{config.adapt.warmup} of the steps and is constant afterwards. Set draft.{name}={unused} "
                "and adapt.warmup."
            )


def check_run_dir(run: RunSettings) -> None:
    """Refuse a run directory that cannot be written or reused. Raises ValueError.

    The check writes a file in the directory, then removes the file and every folder that it had to create.
    """
    directory = resolve(run.dir)
    checkpoints = directory / "checkpoints"
    new = [path for path in (checkpoints, *checkpoints.parents) if not path.exists()]

    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        probe = checkpoints / ".writable"
        try:
            # 1 MiB is about the size of the first steps' records.
            probe.write_bytes(bytes(1 << 20))
        finally:
            probe.unlink(missing_ok=True)
            # A command that is refused later must leave no folders; another run may already use one of them.
            with suppress(OSError):
                for path in new:
                    path.rmdir()
    except OSError as error:
        raise ValueError(
            f"checkpoint directory {checkpoints} is not writable ({error.strerror or error}): "
            "set run.dir to a directory you can write to, with space for checkpoints."
        ) from error

    if run.resume is Resume.NEVER and _holds_run(directory):
        raise ValueError(
            f"run.dir={run.dir!r} already holds a run and run.resume=never: "
            "choose another run.dir, or set run.resume=auto to continue it."
        )


def _holds_run(directory: Path) -> bool:
    """Return whether a directory contains records or checkpoints of a run."""
    return (directory / "metrics.jsonl").exists() or any((directory / "checkpoints").glob("step_*"))
