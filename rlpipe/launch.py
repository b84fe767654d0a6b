"""The composition root: the only place that picks implementations.

Owns start-up and shut-down order, the run directory, and what Ctrl-C means: once, the step in
progress is finished and a checkpoint left; twice, everything stops at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlpipe.actors.dumped_cluster import with_dump
from rlpipe.actors.engines import check_engine
from rlpipe.config.paths import resolve
from rlpipe.config.run import ClusterMode, Config, Task, of_half
from rlpipe.controller import Controller, first_cause
from rlpipe.envs import check_environment, make_suite
from rlpipe.metrics.bus import MetricsBus
from rlpipe.metrics.jsonl import forget_steps
from rlpipe.metrics.sinks import make_sinks
from rlpipe.pipeline.checkpoints import CheckpointStore
from rlpipe.pipeline.dump import Dump, DumpedPrompts
from rlpipe.pipeline.ledger import Ledger
from rlpipe.pipeline.masked import TooManyMasked
from rlpipe.pipeline.prompts import PromptStream


def launch(config: Config, resolved: str) -> int:
    """Run what the recipe asks for; returns the exit status.

    resolved: the composed configuration as YAML, kept as `config.yaml` in the run directory.
    """
    run_dir = resolve(config.run.dir)
    (run_dir / "config.yaml").write_text(resolved)
    if config.task is Task.TINY_MODEL:
        from rlpipe.warmstart.train import run_tiny_model

        run_tiny_model(config.warmstart, run_dir)
        return 0
    if config.task is Task.MTP_ADAPT:
        return _launch_adaptation(config, run_dir)
    return _launch_rl(config, run_dir)


def _launch_rl(config: Config, run_dir: Path) -> int:
    config, half = of_half(config), config.run.half
    prompts, held_out = None, {}
    if half.rolls:
        check_environment(config.env)
        check_engine(config)
        suite = make_suite(config.env, seed=config.run.seed)
        if half.trains:
            sizes = config.val.instances or None
            held_out = {split: list(suite.instance_ids(split))[:sizes] for split in suite.splits()}
        prompts = PromptStream(suite.instance_ids("train"), seed=config.run.seed)
    checkpoints = CheckpointStore(run_dir / "checkpoints", config.run.keep_last, config.run.keep_best)
    newest = checkpoints.newest()
    done = 0 if newest is None else int(newest[1]["step"])
    dump = _dump(config, done)
    forget_steps(run_dir, done)
    bus = MetricsBus(make_sinks(config, run_dir), events=run_dir / "events.jsonl")
    ledger = Ledger(run_dir / "ledger.sqlite", bus.event)
    bus.event("start", recipe=config.recipe, pid=os.getpid(), cluster=config.cluster.mode, half=half)
    if injected := config.injection.active():
        bus.event("injection", **injected)
    cluster = None
    finished = "failed"
    try:
        bus.event("phase", message="starting engines and trainer")
        cluster = _make_cluster(config, bus)
        if dump is not None:
            cluster = with_dump(cluster, dump, config, bus.event)
        controller = Controller(
            config=config,
            run_dir=run_dir,
            cluster=cluster,
            prompts=prompts or DumpedPrompts(dump),
            held_out=held_out,
            bus=bus,
            ledger=ledger,
            checkpoints=checkpoints,
        )
        asyncio.run(_run_until_done(controller, cluster))
        finished = "done" if controller.version >= config.run.steps else "stopped"
    except KeyboardInterrupt:
        finished = "interrupted"
    except TooManyMasked as verdict:
        print(f"rlpipe: {verdict}", file=sys.stderr, flush=True)
        return 1
    except BaseExceptionGroup as group:  # the loop's tasks failed: a fault, not a setting
        raise RuntimeError(f"the run failed: {first_cause(group)!r}") from first_cause(group)
    finally:
        bus.event("end", outcome=finished)
        _stop_cluster(config, cluster)
        ledger.close()
        bus.close()
        if config.metrics.report:
            print(f"report: {_write_report(run_dir)}", flush=True)
    return {"done": 0, "stopped": 0}.get(finished, 130)


def _dump(config: Config, done: int) -> Dump | None:
    """The dump this run reads or, behind step `done`, writes; None without one. Raises ValueError."""
    if not config.run.dump:
        return None
    directory = resolve(config.run.dump)
    return Dump.create(directory, config, done) if config.run.half.rolls else Dump.open(directory, config)


def _launch_adaptation(config: Config, run_dir: Path) -> int:
    from rlpipe.adapt.run import Adaptation, forget_evaluations, product_name

    for name in config.adapt.environments(config.env):
        check_environment(replace(config.env, name=name))
    checkpoints = CheckpointStore(run_dir / "checkpoints", config.run.keep_last, config.run.keep_best)
    newest = checkpoints.newest()
    done = None if newest is None else int(newest[1]["step"])
    forget_steps(run_dir, done or 0)
    forget_evaluations(run_dir, done)
    bus = MetricsBus(make_sinks(config, run_dir), events=run_dir / "events.jsonl")
    bus.event("start", recipe=config.recipe, pid=os.getpid(), cluster=ClusterMode.INLINE)
    adaptation = Adaptation(config=config, run_dir=run_dir, bus=bus, checkpoints=checkpoints)
    finished = "failed"
    try:
        with _stopping(adaptation.request_stop):
            finished = "done" if adaptation.run() else "stopped"
    except KeyboardInterrupt:
        finished = "interrupted"
    finally:
        bus.event("end", outcome=finished)
        bus.close()
        if config.metrics.report:
            print(f"report: {_write_report(run_dir)}", flush=True)
    if finished == "done":
        product = product_name(config)
        print(f"{product}: {run_dir / product}", flush=True)
    return {"done": 0, "stopped": 0}.get(finished, 130)


@contextmanager
def _stopping(request_stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C once: `request_stop`; twice: KeyboardInterrupt."""
    presses = 0

    def interrupt(*_: object) -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            raise KeyboardInterrupt
        print(
            "\nrlpipe: finishing what is in progress, then a checkpoint (Ctrl-C again: stop at once).",
            file=sys.stderr,
            flush=True,
        )
        request_stop()

    before = {name: signal.signal(name, interrupt) for name in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


async def _run_until_done(controller: Controller, cluster: Any) -> None:
    """Run the controller with Ctrl-C handled, then stop the components it used."""
    loop = asyncio.get_running_loop()
    presses = 0

    def interrupt() -> None:
        nonlocal presses
        presses += 1
        if presses > 1:
            print("\nrlpipe: stopped at once; the last checkpoint stands.", file=sys.stderr, flush=True)
            _exit_now(controller.bus, cluster)
        print(
            "\nrlpipe: finishing the step in progress, then a checkpoint (Ctrl-C again: stop at once).",
            file=sys.stderr,
            flush=True,
        )
        controller.request_stop()

    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, interrupt)
    try:
        await controller.run()
    finally:
        await cluster.close()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(name)


def _make_cluster(config: Config, bus: MetricsBus) -> Any:
    if config.cluster.mode is ClusterMode.INLINE:
        from rlpipe.actors.inline_cluster import InlineCluster

        return InlineCluster(config, bus.event)
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # a busy machine is slow, not broken
    import ray

    from rlpipe.actors.ray_cluster import RayCluster

    logging.getLogger("ray").setLevel(logging.ERROR)

    package_root = str(Path(__file__).resolve().parent.parent)
    half = config.run.half
    actors = config.rollout.workers * half.rolls + config.trainer.world_size * half.trains
    local = {} if config.cluster.address else {"num_cpus": max(actors, os.cpu_count() or 1)}
    try:
        ray.init(
            address=config.cluster.address or "local",
            include_dashboard=False,
            logging_level="ERROR",
            configure_logging=False,
            runtime_env={"env_vars": {"PYTHONPATH": package_root, "PYTHONWARNINGS": "ignore"}},
            **local,
        )
    except Exception as error:  # Ray raises bare Exception
        raise ValueError(
            f"Ray did not start ({str(error).splitlines()[0]}). Is the machine overloaded, or "
            f"cluster.address={config.cluster.address!r} wrong? cluster=inline runs without Ray."
        ) from error
    return RayCluster(config, bus.event)


def _stop_cluster(config: Config, cluster: Any) -> None:
    """Leave no process behind, whatever happened."""
    if config.cluster.mode is ClusterMode.RAY:
        import ray

        if ray.is_initialized():
            ray.shutdown()
    elif cluster is not None:
        cluster.kill()


def _exit_now(bus: MetricsBus, cluster: Any) -> None:
    """The second Ctrl-C: kill every actor and leave, waiting a second at most for the sinks."""
    cluster.kill()
    bus.close(timeout=1)
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()
    os._exit(130)


def _write_report(run_dir: Path) -> Path:
    from rlpipe.report.write import write_report

    report = run_dir / "report.html"
    write_report([run_dir], report)
    return report
