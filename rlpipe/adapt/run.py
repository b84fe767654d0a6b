"""The recipe `mtp_adapt`: trains the MTP layer of a frozen model, or an EAGLE-3 draft, to draft for it.

    own rollouts or conversations --> DataOrder --> pack --> trainer.adapt_step --> draft
                                                                  | every eval_every steps
    held-out rollouts, sampled once, without drafts --> trainer.draft_tables --> expected acceptance
                                                                  | after the last step
    held-out prompts --> engine (each mode) --> counts <-- trainer.mtp_stats on the same tokens

Owns the loop and its files: rollouts.jsonl, evaluations/step_N.json, checkpoints/step_N, and, after the last
step, results.json and model/ (for EAGLE-3 draft/ with only the draft). Batches are functions of the step, and
evaluation does not change the trainer, so a resumed run continues bit for bit.

Differences from Bebop §6.1: without `adapt.data` the data are the policy's own samples; prefixes of siblings
are run once; `draft.depths` depths are trained, three by default, while the paper trains five.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlpipe.actors.engines import check_engine
from rlpipe.adapt.conversations import ConversationFormat, read_conversations
from rlpipe.adapt.domains import Domain, make_domains, make_suites
from rlpipe.adapt.evaluation import DomainEvaluation, Evaluation, expect, generate
from rlpipe.adapt.generation import generate_domains
from rlpipe.adapt.order import DataOrder
from rlpipe.adapt.rollouts import complete_rollouts
from rlpipe.batching.packing import pack, trainable
from rlpipe.config.draft import DraftConfig
from rlpipe.config.env import EnvName
from rlpipe.config.paths import resolve, resolve_model
from rlpipe.config.run import Config
from rlpipe.config.spec import SpecMode
from rlpipe.config.trainer import LrSchedule
from rlpipe.drafts.kinds import DRAFTERS
from rlpipe.envs import check_environment
from rlpipe.envs.base import Suite
from rlpipe.loop.checkpoints import CheckpointStore
from rlpipe.loop.event_loop import run_coroutine
from rlpipe.metrics.bus import MetricsBus
from rlpipe.metrics.values import Last, Mean, Sum, Value
from rlpipe.types import Trajectory

if TYPE_CHECKING:
    import torch

    from rlpipe.actors.adapt_cluster import TrainerRanks
    from rlpipe.actors.ray_session import RaySession
    from rlpipe.batching.micro_batch import PackedBatch
    from rlpipe.drafts.loss.stats import MtpStats
    from rlpipe.drafts.standalone_trainer import DraftTrainer
    from rlpipe.trainer.megatron import MegatronTrainer


@dataclass(slots=True)
class Adaptation:
    """The task `mtp_adapt`. step: number of completed optimizer steps.

    The task runs in this process, but several trainer ranks, or several engines that record rollouts, run in
    separate processes. done: step of the newest checkpoint, None without one; evaluations of later steps are
    measured again.
    """

    config: Config
    run_dir: Path
    done: InitVar[int | None]
    step: int = 0
    bus: MetricsBus = field(init=False)
    checkpoints: CheckpointStore = field(init=False)
    _stop: bool = False
    _trajectories: int = 0
    _ray: RaySession | None = None
    _trainer: MegatronTrainer | DraftTrainer | TrainerRanks = field(init=False)
    _suites: dict[EnvName, Suite] = field(init=False)
    _domains: list[Domain] = field(init=False)
    _held_out: dict[str, list[Trajectory]] = field(default_factory=dict)  # the model's rollouts by domain

    def __post_init__(self, done: int | None) -> None:
        self._suites, self._domains = check_adaptation(self.config)
        remove_evaluations(self.run_dir, done)

    def prepare(self, bus: MetricsBus, checkpoints: CheckpointStore, give_up: Callable[[str], None]) -> None:
        """Start Ray if there are several trainer ranks or rollout workers."""
        self.bus, self.checkpoints = bus, checkpoints
        if self.config.trainer.world_size > 1 or self.config.rollout.workers > 1:
            from rlpipe.actors.ray_session import RaySession

            self._ray = RaySession(self.config, give_up)

    def run(self) -> bool:
        """Train until `run.steps` or a stop request, evaluate, checkpoint; return whether all is done."""
        config = self.config
        check_evaluations(config, self.run_dir)
        trajectories = self._load()
        if self._stop:
            return False
        self._trainer = _make_trainer(config, trajectories)
        try:
            order = DataOrder(
                trajectories,
                config.adapt.batch,
                seed=config.run.seed,
                context_weight=config.adapt.context_weight,
            )
            self._resume()
            self._train(order)
            if self.step not in self.checkpoints.steps():
                self._save()
            if self.step == config.run.steps:
                self._finish()
        finally:
            self._trainer.close()
        return self.step == config.run.steps

    def waits_for(self) -> str:
        """Return a text on what the task currently waits for."""
        if not self._trajectories:
            return "the rollouts to train on"
        return (
            f"step {min(self.step + 1, self.config.run.steps)} of {self.config.run.steps}, or an evaluation"
        )

    def request_stop(self) -> None:
        """Make `run` finish the step or evaluation in progress, save a checkpoint and return."""
        self._stop = True

    def close(self, at_once: bool) -> None:
        """End Ray and all processes that it started; `run` closes its trainer."""
        if self._ray is not None:
            self._ray.stop(at_once)

    def _load(self) -> list[Trajectory]:
        """Read the conversations of `adapt.data`, or sample the model's own rollouts."""
        settings, config = self.config.adapt, self.config
        if settings.data:
            source = resolve(settings.data)
            chat = ConversationFormat(resolve_model(config.model.path))
            trajectories = [
                chat.trajectory(messages, f"{source.stem}:{number}", config.rollout.max_context)
                for number, messages in enumerate(read_conversations(source))
            ]
        else:
            file = resolve(settings.rollouts) if settings.rollouts else self.run_dir / "rollouts.jsonl"
            self.bus.event("phase", message=f"own rollouts on {settings.prompts} prompts ({file.name})")
            trajectories = complete_rollouts(
                config,
                self._suites[config.env.name],
                file,
                stopped=lambda: self._stop,
                on_event=self.bus.event,
            )

        self._trajectories = len(trajectories)
        tokens, cut = sum(t.response_length for t in trajectories), sum(t.truncated for t in trajectories)
        self.bus.event("adapt_data", trajectories=len(trajectories), sampled_tokens=tokens, truncated=cut)
        return trajectories

    def _resume(self) -> None:
        """Load the newest complete checkpoint, if there is one."""
        newest = self.checkpoints.newest()
        for broken in self.checkpoints.broken:
            self.bus.event("checkpoint_corrupt", step=broken.step, reason=broken.reason)

        if newest is not None:
            path, state = newest
            self._trainer.load(path / "trainer")
            self.step = int(state["step"])
            self.bus.event("resumed", step=self.step, path=path.name)

    def _train(self, order: DataOrder) -> None:
        """Train, evaluate and save until the last step or a stop."""
        settings = self.config.run
        if self.step == 0 and self.config.adapt.eval_first:
            self._evaluate()
            self.bus.commit(0)

        while self.step < settings.steps and not self._stop:
            started = time.monotonic()
            batch = self._pack(order[self.step])
            metrics = self._trainer.adapt_step(batch)
            self.step += 1
            seconds = time.monotonic() - started

            self.bus.emit(self.step, metrics | _step_metrics(self.step, batch, order, seconds))
            if self._due(self.config.adapt.eval_every):
                self._evaluate()
            if self._due(settings.save_every):
                self._save()
            self.bus.commit(self.step)

    def _due(self, every: int) -> bool:
        """Return whether an action that runs every `every` steps is due; it always is at the last step."""
        return self.step == self.config.run.steps or bool(every and self.step % every == 0)

    def _pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        """Pack the trajectories of a step into micro-batches, without advantages."""
        config = self.config
        return pack(
            trajectories,
            None,
            config.trainer.micro_batch_tokens,
            dp_size=config.trainer.dp,
            temperature=config.rollout.temperature,
            share_prefixes=self._trainer.shares_prefixes,
        )

    def _evaluate(self) -> None:
        """Evaluate the current draft and emit its metrics."""
        started = time.monotonic()
        measured = self._measured()
        seconds = time.monotonic() - started
        self.bus.emit(self.step, measured.metrics() | {"timing_s/validate": Mean(seconds, 1)})
        for name, text in measured.lines():
            self.bus.event("acceptance", step=self.step, held_out=name, tokens_per_step=text)

    def _measured(self) -> Evaluation:
        """Evaluate the current draft; domains that were measured before an interruption are only read."""
        config, file = self.config, evaluation_file(self.run_dir, self.step)
        known = Evaluation.read(file).domains if file.is_file() else {}
        generates = self.step == config.run.steps or not has_expectations(config)
        missing = [d for d in self._domains if d.name not in known or generates > bool(known[d.name].by_mode)]
        if missing:
            self.bus.event("phase", message=f"measuring acceptance after step {self.step}")
            evaluation = Evaluation(
                step=self.step, gamma=config.spec.gamma, temperature=config.rollout.temperature
            )
            evaluation.domains = known | {
                domain.name: DomainEvaluation(in_domain=domain.in_domain) for domain in missing
            }
            if has_expectations(config):
                self._expect(evaluation, missing)
            if generates:
                self._generate(evaluation, missing)
            evaluation.write(file)
        return Evaluation.read(file)

    def _expect(self, evaluation: Evaluation, domains: Sequence[Domain]) -> None:
        """Compute the draft's expected acceptance on the held-out rollouts."""
        trainer = cast("MegatronTrainer | TrainerRanks", self._trainer)  # see `has_expectations`
        for name, trajectories in self._recorded(domains).items():
            if trajectories:
                tables = trainer.draft_tables(self._pack(trajectories))
                expect(self.config, evaluation.domains[name], trajectories, tables)

    def _recorded(self, domains: Sequence[Domain]) -> dict[str, list[Trajectory]]:
        """Return the frozen model's rollouts of held-out sets; they are sampled at the first use."""
        if missing := [domain for domain in domains if domain.name not in self._held_out]:
            rollouts = generate_domains(
                self.config, missing, SpecMode.NONE, weights=None, on_event=self.bus.event
            )
            for name, recorded in rollouts.items():
                self._held_out[name] = [t for t in recorded.trajectories if trainable(t)]
        return {domain.name: self._held_out[domain.name] for domain in domains}

    def _generate(self, evaluation: Evaluation, domains: Sequence[Domain]) -> None:
        """Generate answers to the first prompts of held-out sets, with an engine that uses the draft."""
        count = self.config.adapt.eval_generated or None
        some = [replace(domain, instance_ids=domain.instance_ids[:count]) for domain in domains]
        config, weights = self._drafting()
        generate(
            config,
            evaluation.domains,
            some,
            weights=weights,
            teacher_force=self._forced,
            on_event=self.bus.event,
        )

    def _drafting(self) -> tuple[Config, dict[str, torch.Tensor] | None]:
        """Return the settings and weights with which an engine uses the current draft."""
        drafter = self.config.adapt.drafter
        if not drafter.kind.has_directory:
            return self.config, self._trainer.export_weights()

        # The engine loads a draft with a separate directory from there.
        path = self.run_dir / "draft.evaluated"
        self._trainer.save_hf(path)
        spec = replace(self.config.spec, drafter=drafter, draft_path=str(path))
        return replace(self.config, spec=spec), None

    def _forced(self, trajectories: Sequence[Trajectory]) -> MtpStats:
        return self._trainer.mtp_stats(self._pack(trajectories))

    def _save(self) -> None:
        """Write a checkpoint: the trainer's state and the model in Hugging Face's format."""
        started = time.monotonic()

        async def write(path: Path) -> None:
            self._trainer.save(path / "trainer")
            self._trainer.save_hf(path / "hf")

        state = {"recipe": self.config.recipe, "seed": self.config.run.seed}
        path = run_coroutine(self.checkpoints.save(self.step, state, write))
        seconds = time.monotonic() - started
        self.bus.event("checkpoint", step=self.step, path=path.name, seconds=round(seconds, 3))

    def _finish(self) -> None:
        """Save the model or draft for engines, and the results."""
        # Evaluations are missing if the run was longer before, lost a file or has new held-out sets.
        self._measured()

        product = self.run_dir / product_name(self.config)
        staging = product.with_suffix(".staging")
        shutil.rmtree(staging, ignore_errors=True)
        self._trainer.save_hf(staging)
        shutil.rmtree(product, ignore_errors=True)
        staging.rename(product)

        shutil.rmtree(self.run_dir / "draft.evaluated", ignore_errors=True)
        write_results(self.config, self.run_dir)
        print(f"{product.name}: {product}", flush=True)


def product_name(config: Config) -> str:
    """Return the name of the directory that a finished run saves for engines: model or draft."""
    return "draft" if config.adapt.drafter.kind.has_directory else "model"


def evaluations(run_dir: Path) -> Path:
    """Return the directory of a run's evaluations."""
    return run_dir / "evaluations"


def evaluation_file(run_dir: Path, step: int) -> Path:
    """Return the file of the evaluation after a step; see `Evaluation`."""
    return evaluations(run_dir) / f"step_{step}.json"


def has_expectations(config: Config) -> bool:
    """Return whether expected acceptance is computed: the trainer must unroll all of the engine's depths."""
    return not config.adapt.drafter.kind.has_directory and config.draft.depths >= config.spec.gamma


def check_adaptation(config: Config) -> tuple[dict[EnvName, Suite], list[Domain]]:
    """Make the environments and held-out sets before training, to find errors early.

    Writes nothing.

    Raises:
        ValueError: if an environment, an engine or a held-out set cannot be used.
    """
    settings = config.adapt
    for name in settings.environments(config.env):
        check_environment(replace(config.env, name=name))

    modes = {config.spec.mode}
    if not settings.drafter.kind.has_directory:
        modes |= set(map(SpecMode, settings.eval_modes))
    for mode in sorted(modes):
        check_engine(replace(config, spec=replace(config.spec, mode=mode)))

    suites = make_suites(settings, config.env, config.run.seed)
    return suites, make_domains(settings, config.env, suites)


def check_evaluations(config: Config, run_dir: Path) -> None:
    """Refuse a run with evaluations under another gamma or temperature, as these are not comparable.

    Raises:
        ValueError: names the setting and the value to set.
    """
    settings = {"spec.gamma": config.spec.gamma, "rollout.temperature": config.rollout.temperature}
    for file in sorted(evaluations(run_dir).glob("step_*.json")):
        earlier = Evaluation.read(file)
        for (name, value), known in zip(settings.items(), (earlier.gamma, earlier.temperature), strict=True):
            if value != known:
                raise ValueError(
                    f"{name}={value}, but {file} was measured with {name}={known}, and one run's evaluations "
                    f"must compare: set {name}={known}, or another run.dir."
                )


def remove_evaluations(run_dir: Path, after: int | None) -> None:
    """Remove evaluations of steps later than `after`, the newest checkpoint (None: remove all)."""
    for file in evaluations(run_dir).glob("step_*.json"):
        if after is None or int(file.stem.removeprefix("step_")) > after:
            file.unlink()


def write_results(config: Config, run_dir: Path) -> None:
    """Write results.json: figures of every evaluation as [value, standard error].

    Later evaluations also have the difference to the first one and its error, paired by prompt.
    """
    files = sorted(evaluations(run_dir).glob("step_*.json"), key=lambda f: int(f.stem.split("_")[1]))
    measured = [Evaluation.read(file) for file in files]

    draft = config.draft
    results = {
        "model": config.model.path,
        "drafter": config.adapt.drafter.value,
        "objective": {
            **_objective(draft),
            "depths": draft.depths,
            "lr": draft.lr,
            "steps": config.run.steps,
            "seed": config.run.seed,
        },
        "gamma": config.spec.gamma,
        "temperature": config.rollout.temperature,
        "columns": ["value", "standard error", "change since the first", "its standard error"],
        "evaluations": {
            str(one.step): one.summary(measured[0] if number else None) for number, one in enumerate(measured)
        },
    }
    (run_dir / "results.json").write_text(json.dumps(results, indent=1) + "\n")


def _objective(draft: DraftConfig) -> dict[str, str]:
    """Return the names of the objective that was minimised."""
    anchors = {} if draft.windows else {"anchors": draft.anchors.value}
    return {"loss": draft.objective.value} | anchors


def _make_trainer(
    config: Config, trajectories: Sequence[Trajectory]
) -> MegatronTrainer | DraftTrainer | TrainerRanks:
    """Make a trainer of only the draft, with a short warm-up and a constant learning rate."""
    draft = replace(
        config.draft,
        warmup_steps=ceil(config.adapt.warmup * config.run.steps),
        lr_schedule=LrSchedule.CONSTANT,
    )
    if make_trainer := DRAFTERS[config.adapt.drafter].make_trainer:
        from rlpipe.actors.trainers import train_alongside

        return make_trainer(replace(config, draft=draft), "", trajectories, train_alongside=train_alongside)
    from rlpipe.trainer.megatron import MegatronTrainer

    make = partial(
        MegatronTrainer,
        config.trainer,
        config.algo,
        draft,
        model_path=str(resolve_model(config.model.path)),
        total_steps=config.run.steps,
        adapt_only=True,
        ppow=config.ppow,
        seed=config.run.seed,
    )
    if config.trainer.world_size == 1:
        return make()
    from rlpipe.actors.adapt_cluster import TrainerRanks

    return TrainerRanks(config, make)


def _step_metrics(step: int, batch: PackedBatch, order: DataOrder, seconds: float) -> dict[str, Value]:
    """Return the metrics that only the loop can measure."""
    return {
        "training/global_step": Last(step),
        "training/epoch": Last(order.epoch(step)),
        "timing_s/step": Mean(seconds, 1),
        "perf/time_per_step": Mean(seconds, 1),
        "perf/train_tokens": Sum(batch.tokens),
    }
