"""`rlpipe check +recipe=NAME [key=value ...]`: all that a launch looks at, and starts nothing.

An environment of one's own (`env.suite`) is played with random answers, several episodes of every split, all
turns; at a launch the rehearsal is one short episode of each. Leaves no files.
"""

from __future__ import annotations

import sys

from rlpipe.cli.run import compose
from rlpipe.config.run import Config
from rlpipe.envs.base import Suite

EPISODES = 8  # of every split


def check_all(config: Config, resolved: str) -> int:
    """What a task needs and its run directory, where settings and surroundings are already checked."""
    from rlpipe.launch import check_run_directory, check_task

    check_task(config, lambda suite: _rehearse(suite, config.env.suite))
    check_run_directory(config, resolved)
    print(f"rlpipe: nothing wrong found. `rlpipe run +recipe={config.recipe} ...` starts it.")
    return 0


def _rehearse(suite: Suite, name: str) -> None:
    from rlpipe.envs.rehearsal import rehearse

    steps = rehearse(suite, name, episodes=EPISODES)
    print(f"env.suite={name}: {steps} steps with random answers, every value as it must be")


def main() -> int:
    """Returns the exit status."""
    return compose(check_all)


if __name__ == "__main__":
    sys.exit(main())
