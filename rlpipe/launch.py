"""The composition root: the only module that chooses implementations; it runs every task.

Owns the order of start-up and shut-down, the run directory, and the effect of Ctrl-C and SIGTERM. The first
signal finishes the step in progress and saves a checkpoint; the second stops everything at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from rlpipe.actors.dumped_cluster import with_dump
from rlpipe.actors.engines import check_engine
from rlpipe.actors.leftovers import watched_over
from rlpipe.config.env import EnvConfig, EnvName, SandboxBackend
from rlpipe.config.metrics import WandbMode
from rlpipe.config.mix import members_of
from rlpipe.config.number_format import number_format_advice
from rlpipe.config.paths import resolve, resolve_model
from rlpipe.config.run import (
    ClusterMode,
    Config,
    RunMode,
    Task,
    ValConfig,
    for_run_mode,
    with_weight_transfer,
)
from rlpipe.envs import check_environment, make_suite
from rlpipe.envs.base import TRAIN, Suite, num_players, suite_tools, train_stages
from rlpipe.envs.function.rehearsal import rehearse_rewards
from rlpipe.envs.function.suite import FunctionSuite
from rlpipe.envs.mixture import MixtureSuite
from rlpipe.envs.rehearsal import Prompts, rehearse
from rlpipe.loop.checkpoints import CheckpointStore
from rlpipe.loop.controller import Controller, first_cause
from rlpipe.loop.dump import Dump, DumpedPrompts
from rlpipe.loop.event_loop import run_coroutine
from rlpipe.loop.ledger import Ledger
from rlpipe.loop.progress import progress_watched
from rlpipe.loop.prompts import MixedPrompts, PromptStream
from rlpipe.loop.run_directory import CONFIG, LOCK, check_free, held, keep_settings, settings_changed
from rlpipe.loop.start_record import record_start
from rlpipe.metrics.bus import MetricsBus
from rlpipe.metrics.jsonl import read_jsonl, truncate_records
from rlpipe.metrics.sinks import make_sinks
from rlpipe.rollout.prompt_check import PromptCheck
from rlpipe.types import CONTINUES, RunStopped

_LEAVING_S = 5.0
_ANSWER_S = 10.0  # time limit for the loop to report what it waits for
_REHEARSAL_S = 5.0  # time limit for the rehearsal of an environment at a launch
_LONG_REHEARSAL_S = 30.0  # time limit for the rehearsal of reward functions in `rlpipe check`


class RunTask(Protocol):
    """A task that `run_task` runs. Its constructor writes no file; wrong settings raise ValueError."""

    def prepare(self, bus: MetricsBus, checkpoints: CheckpointStore, give_up: Callable[[str], None]) -> None:
        """Start the processes of the task.

        give_up: function that ends the run at once with a message; any thread may call it.
        """

    def waits_for(self) -> str:
        """Return what the task waits for now, as text; called from a thread other than the task's."""
        ...

    def run(self) -> bool:
        """Run until the end (return True) or until a stop is requested (return False); save a checkpoint."""
        ...

    def request_stop(self) -> None:
        """Request that `run` finish its step, save a checkpoint and return; safe in a signal handler."""

    def close(self, at_once: bool) -> None:
        """End every process of the task. at_once: do not wait for them to finish."""


def launch(config: Config, resolved: str) -> int:
    """Run the task of a configuration; return the exit status. Raises the error that ended the run.

    resolved: the composed configuration as YAML, stored as `config.yaml` in the run directory.
    """
    run_dir = resolve(config.run.dir)
    new = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        with held(run_dir), watched_over(config.env.sandbox.backend is SandboxBackend.DOCKER):
            return _launch(config, resolved, run_dir)
    except ValueError:
        # The run was refused: remove the folders that were created only for its lock.
        if new and not (run_dir / CONFIG).exists():
            with suppress(OSError):
                (run_dir / LOCK).unlink()
                for path in new:
                    path.rmdir()
        raise


def _launch(config: Config, resolved: str, run_dir: Path) -> int:
    """Run a task from its newest checkpoint to its end; return the exit status."""
    checkpoints = _checkpoints(config, run_dir)
    newest = checkpoints.newest()
    done = None if newest is None else int(newest[1]["step"])

    # A run continues from its newest checkpoint, with the same settings.
    changed = settings_changed(run_dir, resolved, step=done, resume=config.run.resume)

    if config.task is Task.MTP_ADAPT:
        from rlpipe.adapt.run import Adaptation

        task: RunTask = Adaptation(config, run_dir, done)
    else:
        task = ReinforcementLearning(config, run_dir, done)

    # The constructor refuses wrong settings, so the run is accepted from here on.
    keep_settings(run_dir, resolved)
    record_start(run_dir)
    earlier = 0 if done else len(read_jsonl(run_dir / "metrics.jsonl")[0])
    truncate_records(run_dir, done or 0)
    if earlier:
        print(
            f"rlpipe: starting over: {run_dir} has records of {earlier} steps and no checkpoint to continue "
            "from; the records were removed.",
            file=sys.stderr,
            flush=True,
        )
    return run_task(task, config, run_dir, checkpoints, changed)


def run_task(
    task: RunTask,
    config: Config,
    run_dir: Path,
    checkpoints: CheckpointStore,
    changed: dict[str, str] | None = None,
) -> int:
    """Run a task until it ends or a signal stops it; return the exit status.

    changed: settings that changed since the run was last started, to be logged.
    """
    bus = MetricsBus(make_sinks(config, run_dir), events=run_dir / "events.jsonl")
    mode = config.cluster.mode if config.task is Task.RL else ClusterMode.INLINE
    extra = {"changed": changed} if changed else {}
    bus.event("start", recipe=config.recipe, pid=os.getpid(), cluster=mode, half=config.run.half, **extra)

    leave = _Leaving(task, bus, checkpoints)
    # From here on, every exit writes the `end` event and ends the processes of the task.
    outcome, status = "failed", 1
    try:
        with progress_watched(bus, task.waits_for, config.metrics.waiting_s):
            task.prepare(bus, checkpoints, lambda sentence: leave(sentence, "failed", 1))
            with _stopping(task.request_stop, leave):
                outcome, status = "done" if task.run() else "stopped", 0
    except KeyboardInterrupt:
        outcome, status = "interrupted", 130
    except RunStopped as stop:
        raise RunStopped(_as_continued(str(stop), checkpoints)) from stop
    finally:
        bus.event("end", outcome=outcome)
        task.close(at_once=False)
        bus.close()
        if config.metrics.report:
            print(f"report: {_write_report(run_dir)}", flush=True)
        if config.metrics.wandb is not WandbMode.OFF:
            _export_workspace(run_dir)

    return status


def _as_continued(text: str, checkpoints: CheckpointStore) -> str:
    """Return the message of a run that ended, corrected if there is no checkpoint to continue from."""
    if checkpoints.steps():
        return text
    return text.replace(CONTINUES, "Run again; it starts from the beginning, as there is no checkpoint yet.")


class _Leaving:
    """Ends this process at once: prints a message, writes the `end` event and ends all child processes.

    Only the first call has an effect: a second Ctrl-C also ends Ray, whose failure must not be reported too.
    """

    def __init__(self, task: RunTask, bus: MetricsBus, checkpoints: CheckpointStore) -> None:
        self._task, self._bus, self._checkpoints = task, bus, checkpoints
        self._begun = threading.Lock()

    def __call__(self, sentence: str, outcome: str, status: int) -> None:
        """Close what can be closed within the time limit, print the sentence, and end the process."""
        if not self._begun.acquire(blocking=False):
            return

        # Close in another thread: the signal may have interrupted this one while it held a lock that closing
        # needs.
        last = threading.Thread(target=self._close, args=(outcome,), daemon=True)
        last.start()
        last.join(_LEAVING_S)

        sentence = _as_continued(sentence, self._checkpoints)
        _write_message(sentence)
        os._exit(status)

    def _close(self, outcome: str) -> None:
        self._bus.event("end", outcome=outcome)
        self._task.close(at_once=True)
        self._bus.close(timeout=1)


@contextmanager
def _stopping(request_stop: Callable[[], None], leave: Callable[[str, str, int], None]) -> Iterator[None]:
    """Request a stop on the first SIGINT or SIGTERM, and leave at once on the second.

    Python handles signals in the main thread only: in any other thread, this installs no handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    presses = 0

    def interrupt(*_: object) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            leave(f"stopped at once. {CONTINUES}", "interrupted", 130)

        _write_message("finishing what is in progress, then a checkpoint (Ctrl-C again: stop at once).")
        request_stop()

    # Restore the earlier handlers afterwards, because this may run inside another program.
    before = {name: signal.signal(name, interrupt) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


def _write_message(sentence: str) -> None:
    """Write a message to standard error from a signal handler.

    The signal may have interrupted a `print`, even the one of this handler, and then another `print` raises
    RuntimeError: write without the buffer. A closed terminal must not keep the run from stopping.
    """
    with suppress(OSError):
        os.write(2, f"\nrlpipe: {sentence}\n".encode())


def _check_instances(val: ValConfig, suite: Suite) -> None:
    """Raise ValueError if `val.instances` exceeds both its default and the size of every held-out set."""
    sizes = {split: len(suite.instance_ids(split)) for split in suite.splits()}
    if val.every and val.instances > max(ValConfig().instances, *sizes.values()):
        there = ", ".join(f"{split} {size}" for split, size in sizes.items())
        raise ValueError(
            f"val.instances={val.instances}, and the held-out sets have fewer ({there}): lower it, or set 0 "
            "for all of them."
        )


def _check_games(config: Config, suite: Suite) -> None:
    """Raise ValueError if the attempts at an instance are not a multiple of the players of its game."""
    if not hasattr(suite, "players"):
        return

    sizes = {split: ("val.samples", config.val.samples) for split in suite.splits() if config.val.every}
    sizes[TRAIN] = ("pipeline.group_size", config.pipeline.group_size)
    for split, (setting, attempts) in sizes.items():
        for instance in suite.instance_ids(split):
            if attempts % (players := num_players(suite, instance)):
                raise ValueError(
                    f"{setting}={attempts} attempts at an instance, and {players} at a time play a game of "
                    f"{instance!r}: make it a multiple of {players}."
                )


def check_task(config: Config, rehearsal: Callable[[Suite, Prompts], object] | None = None) -> list[Suite]:
    """Check the engines, environments and dumps of a run; return its suites.

    rehearsal: function that steps through a user's suite and checks its prompts; None runs one short episode
        of each split, as at a launch.
    Writes no file. Raises ValueError with the setting, its value and a hint.
    """
    config = for_run_mode(config)
    if config.task is Task.MTP_ADAPT:
        from rlpipe.adapt.run import check_adaptation

        suites, _ = check_adaptation(config)
        if rehearsal is not None and EnvName.USER in suites:
            rehearsal(suites[EnvName.USER], _prompts(config, suites[EnvName.USER]))
        return list(suites.values())

    # A train-only run reads a dump and needs neither engine nor environment.
    directory = resolve(config.run.dump) if config.run.dump else None
    if not config.run.half.generates:
        Dump.open(directory, config)
        return []

    check_engine(config)
    check_environment(config.env)
    suite = make_suite(config.env, seed=config.run.seed)

    # Step through the code of the user, since most mistakes in it appear only when it runs.
    for name, users in _user_suites(config.env, suite):
        prompts = _prompts(config, users)
        if rehearsal is not None:
            rehearsal(users, prompts)
            continue

        outcome = rehearse(
            users,
            name,
            episodes=1,
            turns=2,
            budget_s=_REHEARSAL_S,
            timeout_s=config.env.step_timeout_s,
            prompts=prompts,
        )
        for note in outcome.notes:
            print(f"rlpipe: {note}", file=sys.stderr)

    for own in suite.members.values() if isinstance(suite, MixtureSuite) else [suite]:
        if isinstance(own, FunctionSuite):
            _check_rows(own, config, _REHEARSAL_S if rehearsal is None else _LONG_REHEARSAL_S)

    _check_instances(config.val, suite)
    _check_games(config, suite)
    _note_few_instances(len(suite.instance_ids(TRAIN)), config.pipeline.prompts_per_step)
    if directory is not None:
        Dump.check_new(directory, config)

    return [suite]


def _user_suites(env: EnvConfig, suite: Suite) -> list[tuple[str, Suite]]:
    """Return those suites of a run that are user code, as pairs of the `env.suite` setting and the suite."""
    if isinstance(suite, MixtureSuite):
        members = members_of(env)
        return [pair for name, own in suite.members.items() for pair in _user_suites(members[name][1], own)]
    return [(env.suite, suite)] if env.name is EnvName.USER else []


def _note_few_instances(instances: int, prompts: int) -> None:
    """Print a note if there are fewer instances than prompts per step, so that a step repeats some."""
    if instances < prompts:
        print(
            f"rlpipe: there are {instances} training instances and pipeline.prompts_per_step={prompts}, so a "
            "step repeats instances: lower it, or give more instances.",
            file=sys.stderr,
        )


def _prompts(config: Config, suite: Suite) -> Prompts:
    path, template = resolve_model(config.model.path), config.model.chat_template
    return PromptCheck(path, config.rollout.max_context, suite_tools(suite), template=template)


def _check_rows(suite: FunctionSuite, config: Config, budget_s: float) -> None:
    """Check a data set and its reward functions, and print notes on them. Raises ValueError.

    Drops the prompts that are too long for the context.
    """
    context, answer = config.rollout.max_context, config.rollout.max_new_tokens
    limit = config.data.max_prompt_tokens or max(context - answer, 1)
    suite.drop_long(_prompts(config, suite).opening, min(limit, context - 1))

    suite.notes += rehearse_rewards(suite, budget_s=budget_s)
    for note in suite.notes:
        print(f"rlpipe: {note}", flush=True)


def check_run_directory(config: Config, resolved: str) -> None:
    """Raise ValueError if the run directory is in use or holds another experiment. Writes no file.

    resolved: the configuration as YAML.
    """
    run_dir = resolve(config.run.dir)
    check_free(run_dir)
    steps = _checkpoints(config, run_dir).steps()
    settings_changed(run_dir, resolved, step=steps[-1] if steps else None, resume=config.run.resume)


def _checkpoints(config: Config, run_dir: Path) -> CheckpointStore:
    return CheckpointStore(run_dir / "checkpoints", config.run.keep_last, config.run.keep_best)


class ReinforcementLearning:
    """The task `rl` in any of its modes: runs a cluster and its controller.

    done: step of the newest checkpoint, or None.
    """

    def __init__(self, config: Config, run_dir: Path, done: int | None) -> None:
        self._config, self._run_dir = for_run_mode(config), run_dir
        config, run_mode = self._config, config.run.half
        self._held_out: dict[str, list[str]] = {}
        self._notes: list[str] = []

        suites = check_task(config)
        if run_mode.generates:
            (suite,) = suites
            self._notes = list(getattr(suite, "notes", []))
            if run_mode.trains:
                sizes = config.val.instances or None
                self._held_out = {split: list(suite.instance_ids(split))[:sizes] for split in suite.splits()}
            self._prompts = _prompt_stream(suite, config.run.seed)

        # A train-only run takes its prompts from the dump.
        self._dump = _dump(config, done or 0)
        if not run_mode.generates:
            self._prompts = DumpedPrompts(self._dump)

        self._cluster = self._pool = self._ray = self._ledger = self._loop = None

    def prepare(self, bus: MetricsBus, checkpoints: CheckpointStore, give_up: Callable[[str], None]) -> None:
        """Start engines, trainer and controller from the newest checkpoint."""
        config = self._config
        if injected := config.injection.active():
            bus.event("injection", **injected)

        if self._notes:
            bus.event("data", notes=self._notes)

        for advice in number_format_advice(config):
            bus.event("phase", message=advice)

        self._ledger = Ledger(self._run_dir / "ledger.sqlite", bus.event)
        bus.event("phase", message="starting engines and trainer")

        if config.cluster.mode is ClusterMode.RAY:
            from rlpipe.actors.ray_session import RaySession

            self._ray = RaySession(config, give_up)

        # `_pool` is the cluster that adds and drains workers, without the wrapper that writes a dump.
        self._cluster = self._pool = _make_cluster(config, bus)
        if self._dump is not None:
            self._cluster = with_dump(self._cluster, self._dump, config, event=bus.event)

        self._event = bus.event
        self._controller = Controller(
            config=config,
            run_dir=self._run_dir,
            cluster=self._cluster,
            prompts=self._prompts,
            held_out=self._held_out,
            bus=bus,
            ledger=self._ledger,
            checkpoints=checkpoints,
        )

    def run(self) -> bool:
        """Run the loop to its end; return whether the last step was reached."""
        try:
            run_coroutine(self._run())
        except BaseExceptionGroup as group:
            # The tasks of the loop failed, so no setting is the cause. Report only the first exception.
            cause = first_cause(group)
            if isinstance(cause, RunStopped):
                raise cause from group
            raise RuntimeError(f"the run failed: {cause!r}") from cause

        return self._controller.version >= self._config.run.steps

    async def _run(self) -> None:
        """Run the controller and serve the requests of `rlpipe pool`, then close the cluster."""
        assert self._cluster is not None, "prepare comes before run"
        self._loop = asyncio.get_running_loop()
        serving = asyncio.ensure_future(self._serve_pool())
        try:
            await self._controller.run()
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await self._cluster.close()

    async def _serve_pool(self) -> None:
        """Serve requests of `rlpipe pool`, if the run uses Ray and both generates and trains."""
        if self._config.cluster.mode is ClusterMode.RAY and self._config.run.half is RunMode.BOTH:
            from rlpipe.actors.pool import serve

            await serve(self._pool, self._run_dir, self._controller.growth, self._event)

    def waits_for(self) -> str:
        """Return what the run waits for, as text; called from a thread other than the loop's."""
        if self._loop is None:
            return "engines and trainer to start"

        try:
            answer = asyncio.run_coroutine_threadsafe(self._controller.waits_for(), self._loop)
            return answer.result(_ANSWER_S)
        except TimeoutError:
            return "its event loop, which does not answer"
        except (RuntimeError, CancelledError):  # the loop has ended
            return "the end of the run"

    def request_stop(self) -> None:
        """Make `run` finish the step in progress, save a checkpoint and return; safe in a signal handler."""
        if self._loop is None:
            return self._controller.request_stop()

        # The signal handler may run in a thread other than the loop's. If the loop has ended, nothing is left
        # to stop.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._controller.request_stop)

    def close(self, at_once: bool) -> None:
        if self._ray is not None:
            self._ray.stop(at_once)
        elif self._cluster is not None:
            self._cluster.kill()

        if self._ledger is not None and not at_once:
            self._ledger.close()


def _prompt_stream(suite: Suite, seed: int) -> PromptStream:
    """Return the training prompts: in the proportions of a mixture, or in the stages of a curriculum."""
    if isinstance(suite, MixtureSuite):
        return MixedPrompts(suite.train_sets(), seed)
    return PromptStream.of_stages(train_stages(suite), seed)


def _dump(config: Config, done: int) -> Dump | None:
    """Return the dump that this run reads, or writes after step `done`; None if it has no dump.

    Raises ValueError if the dump does not fit the run.
    """
    if not config.run.dump:
        return None

    directory = resolve(config.run.dump)
    return Dump.create(directory, config, done) if config.run.half.generates else Dump.open(directory, config)


def _make_cluster(config: Config, bus: MetricsBus) -> Any:
    """Return the cluster that the settings select, with a weight transfer that suits its machines."""
    # The weight transfer depends on the number of machines and on whether they have GPUs.
    hosts, gpus = 1, False
    if config.cluster.mode is ClusterMode.RAY:
        from rlpipe.actors.ray_cluster import hosts_and_gpus

        hosts, gpus = hosts_and_gpus()

    config, transfer = with_weight_transfer(config, hosts=hosts, gpus=gpus)
    if transfer:
        bus.event("phase", message=transfer)

    if config.cluster.mode is ClusterMode.INLINE:
        from rlpipe.actors.inline_cluster import InlineCluster

        return InlineCluster(config, bus.event)

    from rlpipe.actors.ray_cluster import RayCluster

    return RayCluster(config, bus.event)


def _export_workspace(run_dir: Path) -> None:
    """Write the spec of the run's W&B workspace; `rlpipe workspace --spec FILE` creates it after a login."""
    from rlpipe.report.workspace import NAME, export_spec

    try:
        export_spec(run_dir, run_dir / NAME)
    except OSError as error:  # a full disk must not change the outcome of the run
        print(f"rlpipe: {NAME} was not written: {error}", file=sys.stderr)


def _write_report(run_dir: Path) -> Path:
    from rlpipe.report.write import write_report

    report = run_dir / "report.html"
    write_report([run_dir], report)
    return report
