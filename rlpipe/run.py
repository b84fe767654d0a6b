"""`python -m rlpipe.run +recipe=NAME [overrides]`: compose -> typed config -> launch.

Owns the command line; imports no torch, so `--help` and `--cfg job` answer at once.
"""

from __future__ import annotations

import sys

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from rlpipe.config.checks import check
from rlpipe.config.paths import shipped
from rlpipe.config.run import Config

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


@hydra.main(version_base="1.3", config_path=str(shipped("configs")), config_name="config")
def main(composed: DictConfig) -> None:
    """Check everything that can be checked, then launch."""
    if not composed.recipe:
        print(usage())
        sys.exit(2)
    try:
        config: Config = OmegaConf.to_object(composed)
        check(config)
        from rlpipe.launch import launch

        sys.exit(launch(config, resolved=OmegaConf.to_yaml(composed, resolve=True)))
    except ValueError as error:
        print(f"rlpipe: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
