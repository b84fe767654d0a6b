"""Environments: what a model acts on and what rewards it. `base` holds the contract.

Owns picking the suite a configuration names; heavy libraries are imported on use.
"""

from __future__ import annotations

from rlpipe.config.env import EnvConfig, EnvName
from rlpipe.envs.base import Suite

__all__ = ["check_environment", "make_suite"]


def check_environment(config: EnvConfig) -> None:
    """What making a suite does not find wrong: the tools that playing it needs.

    Raises ValueError: a missing sandbox tool, an unknown task.
    """
    if config.name is EnvName.REASONING:
        from rlpipe.envs.math import check_reasoning

        check_reasoning(config)
        return
    if config.name is EnvName.USER:
        from rlpipe.envs.user_suite import load_suite_maker

        load_suite_maker(config.suite)
        return
    if config.name is EnvName.TOOLS:
        from rlpipe.envs.tools.suite import check_tools

        check_tools(config)
        return
    from rlpipe.envs.sandbox import check_sandbox

    check_sandbox(config.sandbox)


def make_suite(config: EnvConfig, seed: int = 0) -> Suite:
    """The suite that `env.name` selects. Raises ValueError for a bad data file.

    seed: of the run; decides which reasoning tasks are drawn for training.
    """
    if config.name is EnvName.REASONING:
        from rlpipe.envs.math import MathSuite

        return MathSuite(config, seed)
    if config.name is EnvName.USER:
        from rlpipe.envs.user_suite import make_user_suite

        return make_user_suite(config, seed)
    if config.name is EnvName.TOOLS:
        from rlpipe.envs.tools.suite import ToolSuite

        return ToolSuite(config, seed)
    from rlpipe.envs.swe.suite import SweSuite

    return SweSuite(config)
