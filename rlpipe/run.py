"""`python -m rlpipe.run +recipe=NAME [overrides]`: compose -> typed config -> launch, or a sweep of that.

Owns the command line; imports no torch, so `--help` and `--cfg job` answer at once.
"""

from __future__ import annotations

import sys

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rlpipe.config.checks import check
from rlpipe.config.paths import shipped
from rlpipe.config.run import Config
from rlpipe.memory import check_memory
from rlpipe.sweep import Sweep

ConfigStore.instance().store(name="schema", node=Config)


def recipes() -> list[str]:
    """Names that `+recipe=` accepts from the shipped configs."""
    return sorted(path.stem for path in (shipped("configs") / "recipe").glob("*.yaml"))


def usage() -> str:
    """What to type, for someone who typed too little."""
    names = "\n".join(f"  python -m rlpipe.run +recipe={name}" for name in recipes())
    return (
        f"rlpipe needs a recipe. Shipped recipes:\n{names}\n"
        "Add overrides like run.dir=DIR run.steps=20 run.seed=1 spec.mode=none cluster=inline; "
        "--cfg job prints every setting."
    )


_SWEEP = Sweep()


def run_composed(resolved: str) -> int:
    """Check a composed configuration (YAML), then launch it; returns the exit status."""
    try:
        config: Config = OmegaConf.to_object(OmegaConf.merge(Config, OmegaConf.create(resolved)))
        check(config)
        check_memory(config)
        from rlpipe.launch import launch

        return launch(config, resolved=resolved)
    except ValueError as error:
        print(f"rlpipe: {error}", file=sys.stderr)
        return 2


@hydra.main(version_base="1.3", config_path=str(shipped("configs")), config_name="config")
def _composed(composed: DictConfig) -> int:
    """What Hydra made of the command line, once for every job of a sweep."""
    if not composed.recipe:
        print(usage())
        sys.exit(2)
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        return _SWEEP.run_job(composed)
    sys.exit(run_composed(OmegaConf.to_yaml(composed, resolve=True)))


def main() -> int:
    """Run the command line; returns the exit status of a sweep, and leaves with that of a run."""
    _composed()
    return _SWEEP.finish() if _SWEEP.jobs else 0


if __name__ == "__main__":
    sys.exit(main())
