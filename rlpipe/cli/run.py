"""`rlpipe run +recipe=NAME [KEY=VALUE ...]`: compose -> typed config -> launch, for one run or a sweep.

Owns the command line; imports no torch, so that `--help` and `--cfg job` are fast.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlpipe.cli.hydra_errors import check_arguments, explained, explaining, refused, settings_first
from rlpipe.cli.sweep import Sweep
from rlpipe.config.number_format import by_speed
from rlpipe.config.openmp import spin_briefly
from rlpipe.config.paths import resolve, shipped
from rlpipe.config.run import Config
from rlpipe.preflight.memory_check import check_memory
from rlpipe.preflight.models import prepare_models
from rlpipe.preflight.settings import check
from rlpipe.types import RunStopped

ConfigStore.instance().store(name="schema", node=Config)
OmegaConf.register_new_resolver("by_speed", by_speed, replace=True)


def recipes() -> list[str]:
    """Return the names of the shipped recipes, which `+recipe=` accepts."""
    return sorted(path.stem for path in (shipped("configs") / "recipe").glob("*.yaml"))


def usage(command: str) -> str:
    """Return the help that `rlpipe run` or `rlpipe check` prints if no recipe is named."""
    names = "\n".join(f"  rlpipe {command} +recipe={name}" for name in recipes())
    return (
        f"rlpipe {command} needs a recipe. Shipped recipes:\n{names}\n"
        "Add overrides like run.dir=DIR run.steps=20 run.seed=1 spec.mode=none cluster=inline; "
        "--cfg job prints every setting."
    )


def config_of(overrides: Sequence[str]) -> tuple[Config, str]:
    """Return the settings of a command line, composed and typed but not checked, and their YAML.

    overrides: the arguments after `rlpipe run`; of Hydra's options, only --config-dir is used.

    Raises ValueError with the setting, its value and a hint if the settings cannot be composed.
    """
    try:
        arguments = settings_first(overrides)
        check_arguments(arguments)
        given = get_args_parser().parse_args(arguments)
        words: list[str] = given.overrides
        if given.config_dir:
            words = [*words, f"hydra.searchpath=['file://{Path(given.config_dir).resolve()}']"]

        with hydra.initialize_config_dir(config_dir=str(shipped("configs")), version_base="1.3"):
            composition = hydra.compose(config_name="config", overrides=words)

        return OmegaConf.to_object(composition), OmegaConf.to_yaml(composition, resolve=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ValueError(explained(error, overrides)) from error


def check_before(config: Config) -> None:
    """Check everything except the task itself: settings, sizes, memory, files, machine, user code.

    Downloads models from the Hugging Face hub and changes the settings to their directories.
    Raises ValueError with the setting, its value and a hint.
    """
    prepare_models(config)
    check(config)

    # Import these late, so that wrong settings are reported quickly.
    from rlpipe.actors.ray_session import set_ray_environment
    from rlpipe.preflight.checkpoint_and_machine import check_sizes, check_surroundings

    check_sizes(config)
    check_memory(config)

    # Do this before the user's code or verl imports Ray.
    set_ray_environment(config)
    check_surroundings(config)


Work = Callable[[Config, str], int]  # function of a checked configuration and its YAML


def run_composed(resolved: str, work: Work | None = None, composition: DictConfig | None = None) -> int:
    """Check a composed configuration, then launch it or call `work`; return the exit status.

    resolved: the configuration as YAML. composition: the same configuration as Hydra's typed object, if
    available; it need not be created again from the YAML.
    """
    config: Config | None = None
    try:
        if composition is None:
            config = OmegaConf.to_object(OmegaConf.merge(Config, OmegaConf.create(resolved)))
        else:
            config = OmegaConf.to_object(composition)

        check_before(config)

        if work is None:
            from rlpipe.launch import launch

            work = launch
        return work(config, resolved)
    except ValueError as error:
        print(f"rlpipe: {error}", file=sys.stderr)
        return 2
    except RunStopped as stop:
        print(f"rlpipe: {stop}", file=sys.stderr)
        return 1
    # The run failed: print one line, and write the traceback into the run directory.
    except Exception as error:
        if config is None or os.environ.get("RLPIPE_TRACEBACK"):
            raise

        print(f"rlpipe: {_kept(config, error)}", file=sys.stderr)
        return 1


def _kept(config: Config, error: Exception) -> str:
    """Write the traceback of an error into the run directory; return the error as one sentence."""
    first = str(error).partition("\n")[0]
    message = first if isinstance(error, RuntimeError) and first else f"{type(error).__name__}: {first}"

    file = resolve(config.run.dir) / "traceback.txt"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(traceback.format_exception(error)))
    except OSError as full:
        return f"{message} (its traceback could not be written to {file}: {full.strerror or full})"

    return f"{message} (traceback: {file})"


def compose(arguments: Sequence[str], work: Work | None = None, *, command: str = "run") -> int:
    """Compose a command line, check it, and launch it or call `work`; return the exit status."""
    # Hydra reads the command line from sys.argv.
    sys.argv = [sys.argv[0], *arguments]
    sweep, status = Sweep(), 0

    @hydra.main(version_base="1.3", config_path=str(shipped("configs")), config_name="config")
    def composed(composition: DictConfig) -> int | None:
        """Run a composed command line; Hydra calls this function once for every job of a sweep."""
        nonlocal status
        if not composition.recipe:
            print(usage(command))
            status = 2
        elif HydraConfig.get().mode is RunMode.MULTIRUN:
            return sweep.run_job(composition)
        else:
            try:
                resolved = OmegaConf.to_yaml(composition, resolve=True)
            except OmegaConfBaseException as error:
                raise SystemExit(refused(error)) from None
            raise SystemExit(run_composed(resolved, work, composition))

        return None

    def run_jobs() -> int:
        composed()
        return sweep.finish() if sweep.jobs else status

    return explaining(run_jobs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line. A sweep returns its exit status; a single run exits with its exit status."""
    spin_briefly()
    return compose(sys.argv[1:] if arguments is None else arguments)
