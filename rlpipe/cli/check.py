"""`rlpipe check +recipe=NAME [key=value ...]`: every check of a launch, without starting the run.

Runs a user's environment (`env.suite`) with random answers for several full episodes of every split; a launch
runs one short episode of each split. Writes no files.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlpipe.cli.run import compose
from rlpipe.config.run import Config
from rlpipe.envs.base import Suite

if TYPE_CHECKING:
    from rlpipe.envs.rehearsal import Prompts

EPISODES = 8  # number of episodes of every split
USAGE = """usage: rlpipe check +recipe=NAME [KEY=VALUE ...]

Validate a run without starting it: settings, memory, checkpoint, data, machine, run directory. A custom
environment (env.suite) is stepped through several episodes of every split with random answers.
`rlpipe run --cfg job` prints every setting."""


def check_all(config: Config, resolved: str) -> int:
    """Check the task and its run directory, after settings and machine have been checked; return 0."""
    from rlpipe.launch import check_run_directory, check_task

    check_task(config, lambda suite, prompts: _rehearse(suite, config.env.suite, prompts))
    check_run_directory(config, resolved)

    print(f"rlpipe: nothing wrong found. `rlpipe run +recipe={config.recipe} ...` starts it.")
    return 0


def _rehearse(suite: Suite, name: str, prompts: Prompts) -> None:
    from rlpipe.envs.rehearsal import rehearse

    outcome = rehearse(suite, name, episodes=EPISODES, prompts=prompts)
    print(f"env.suite={name}: {outcome.steps} steps with random answers, every value as it must be")
    for note in outcome.notes:
        print(f"note: {note}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the run that a command line describes; return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "-h" in arguments or "--help" in arguments:
        print(USAGE)
        return 0

    return compose(arguments, check_all, command="check")
