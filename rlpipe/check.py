"""`rlpipe check +recipe=NAME [key=value ...]`: all that a launch looks at, and starts nothing.

An environment of one's own (`env.suite`) is played with random answers, several episodes of every split, all
turns; at a launch the rehearsal is one short episode of each. Leaves no files.
"""

from __future__ import annotations

import sys

from rlpipe.config.env import EnvName
from rlpipe.config.run import Config, Task
from rlpipe.run import compose

EPISODES = 8  # of every split


def check_all(config: Config, resolved: str) -> int:
    """Play the rehearsal of a configuration whose settings and surroundings are already checked."""
    from rlpipe.actors.engines import check_engine
    from rlpipe.launch import check_instances, suites_of

    if config.run.half.rolls:
        check_engine(config)
    for suite in suites_of(config):
        if config.task is Task.RL:
            check_instances(config.val, suite)
        if config.env.name is not EnvName.USER:
            continue
        from rlpipe.envs.rehearsal import rehearse

        steps = rehearse(suite, config.env.suite, episodes=EPISODES)
        print(f"env.suite={config.env.suite}: {steps} steps with random answers, every value as it must be")
    print(f"rlpipe: nothing wrong found. `rlpipe run +recipe={config.recipe} ...` starts it.")
    return 0


def main() -> int:
    """Returns the exit status."""
    return compose(check_all)


if __name__ == "__main__":
    sys.exit(main())
