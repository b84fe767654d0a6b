"""Loads an environment of the library verifiers: its taskset and its `run`.

Rejects tasks that need a harness or a runtime, because `env=verifiers` provides neither.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

from rlpipe.config.env import EnvConfig, VerifiersConfig
from rlpipe.config.user_code import load_function
from rlpipe.envs.base import TRAIN

_HARNESS = "harnesses, runtimes and containers are not part of env=verifiers, where the model itself answers"


def load_environment(config: VerifiersConfig) -> Any:
    """Make the environment; its attribute `taskset` has the tasks. Raises ValueError if it cannot be used."""
    import verifiers.v1 as vf
    from verifiers.v1.envs.single_agent import SingleAgentEnv
    from verifiers.v1.utils import loaders
    from verifiers.v1.utils.generic import concrete_type

    where = f"env.verifiers.taskset={config.taskset!r}"
    if not config.taskset:
        raise ValueError(f"{where}: name a taskset, as an installed id, module:Class or file.py:Class.")
    try:
        if ":" in config.taskset:
            taskset_class: Any = load_function(
                config.taskset, setting="env.verifiers.taskset", takes="config"
            )
            env_class: Any = SingleAgentEnv
        else:
            taskset_class = loaders.taskset_class(config.taskset)
            env_class = loaders.environment_class(config.taskset)
            if loaders.default_harness_id(config.taskset) == config.taskset:
                raise ValueError(f"it brings a harness of its own: {_HARNESS}")
        if config.env:
            env_class = load_function(config.env, setting="env.verifiers.env", takes="config")

        settings = concrete_type(taskset_class, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
        taskset = taskset_class(settings.model_validate(config.config))
        env_config: Any = concrete_type(env_class, vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
        env_settings = env_config()
        _check_task(taskset.task_type())
        _check_seats(env_class, env_settings)
    except Exception as error:  # an error of the library, of pydantic, or of the user's code
        if str(error).startswith("env."):
            raise
        reason = " ".join(str(error).split())  # pydantic names the field on a second line
        raise ValueError(f"{where}: {reason}.") from error

    # Skip the constructor, which loads harnesses by default.
    env = object.__new__(env_class)
    env.config, env.taskset = env_settings, taskset
    return env


def tasks_by_split(taskset: Any, config: EnvConfig) -> dict[str, dict[str, Any]]:
    """Return the tasks of each split by id; the sizes are `env.held_out_size` and `env.train_size`."""
    ordered = taskset.shuffle(seed=0) if taskset.bounded else taskset
    count = config.held_out_size + config.train_size
    tasks = {f"task:{task.data.idx}": task for task in itertools.islice(ordered, count)}
    if len(tasks) <= config.held_out_size:
        raise ValueError(
            f"env.verifiers.taskset={config.verifiers.taskset!r} has {len(tasks)} tasks, of which "
            f"env.held_out_size={config.held_out_size} are held out: lower it, so that some are left."
        )
    names = list(tasks)
    parts = {TRAIN: names[config.held_out_size :], "held_out": names[: config.held_out_size]}
    return {split: {name: tasks[name] for name in ids} for split, ids in parts.items()}


def _check_task(task_class: Any) -> None:
    """Raise ValueError for a task that needs a harness."""
    from verifiers.v1.utils.decorators import discover_decorated

    task = object.__new__(task_class)
    if task_class.NEEDS_CONTAINER:
        raise ValueError(f"its tasks need a container: {_HARNESS}")
    for kind in ("stop", "intercept"):
        if functions := discover_decorated(task, kind):
            raise ValueError(f"{functions[0].__name__} is a @{kind}, which a harness calls: {_HARNESS}")
    for function in (*discover_decorated(task, "reward"), *discover_decorated(task, "metric")):
        needed = inspect.signature(function).parameters.get("runtime")
        if needed is not None and needed.default is inspect.Parameter.empty:
            raise ValueError(f"{function.__name__} takes a runtime: {_HARNESS}")


def _check_seats(env_class: Any, settings: Any) -> None:
    """Raise ValueError for an environment with several agents, because each would need a trajectory."""
    from verifiers.v1.configs.agent import agent_config_fields

    seats = list(agent_config_fields(settings))
    if len(seats) != 1:
        raise ValueError(f"{env_class.__name__} has the agents {', '.join(seats)}: only one can be the model")
