"""Environments, in which a model acts and is rewarded. `base` defines the interface.

Owns the table of environments that ship with the package. To add one, write a file with a suite, add its name
to `EnvName`, write two small functions that import it on use, and add a row to `ENVIRONMENTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rlpipe.config.env import EnvConfig, EnvName
from rlpipe.config.mix import members_of
from rlpipe.envs.base import Suite

__all__ = ["ENVIRONMENTS", "Environment", "check_environment", "make_suite"]


@dataclass(slots=True, kw_only=True)
class Environment:
    """One row of `ENVIRONMENTS`.

    check: raises ValueError if this machine lacks something that episodes need. make: makes the suite from
    the settings and the run's seed; raises ValueError for a bad data file.
    """

    check: Callable[[EnvConfig], object]
    make: Callable[[EnvConfig, int], Suite]


def _check_swe(config: EnvConfig) -> None:
    from rlpipe.envs.sandbox import check_sandbox
    from rlpipe.envs.swe.agent import agent_of

    check_sandbox(config.sandbox)
    if agent := agent_of(config):
        agent.check()


def _make_swe(config: EnvConfig, seed: int) -> Suite:
    from rlpipe.envs.swe.suite import SweSuite

    return SweSuite(config)


def _check_reasoning(config: EnvConfig) -> None:
    from rlpipe.envs.math import check_reasoning

    check_reasoning(config)


def _make_reasoning(config: EnvConfig, seed: int) -> Suite:
    from rlpipe.envs.math import MathSuite

    return MathSuite(config, seed)


def _check_tools(config: EnvConfig) -> None:
    from rlpipe.envs.tools.suite import check_tools

    check_tools(config)


def _make_tools(config: EnvConfig, seed: int) -> Suite:
    from rlpipe.envs.tools.suite import ToolSuite

    return ToolSuite(config, seed)


def _check_gymnasium(config: EnvConfig) -> None:
    from rlpipe.envs.gymnasium import check_gymnasium

    check_gymnasium(config)


def _make_gymnasium(config: EnvConfig, seed: int) -> Suite:
    from rlpipe.envs.gymnasium import make_gymnasium

    return make_gymnasium(config, seed)


def _check_textarena(config: EnvConfig) -> None:
    from rlpipe.envs.textarena import check_textarena

    check_textarena(config)


def _make_textarena(config: EnvConfig, seed: int) -> Suite:
    from rlpipe.envs.textarena import TextArenaSuite

    return TextArenaSuite(config, seed)


def _check_verifiers(config: EnvConfig) -> None:
    from rlpipe.envs.verifiers.suite import check_verifiers

    check_verifiers(config)


def _make_verifiers(config: EnvConfig, seed: int) -> Suite:
    from rlpipe.envs.verifiers.suite import VerifiersSuite

    return VerifiersSuite(config)


def _check_openenv(config: EnvConfig) -> None:
    from rlpipe.envs.openenv import check_openenv

    check_openenv(config)


def _make_openenv(config: EnvConfig, seed: int) -> Suite:
    from rlpipe.envs.openenv import make_openenv

    return make_openenv(config, seed)


def _check_function(config: EnvConfig) -> None:
    """Check nothing: the environment needs only data set and reward, which are checked with the suite."""


def _make_function(config: EnvConfig, seed: int) -> Suite:
    from rlpipe.envs.function.suite import FunctionSuite

    return FunctionSuite(config)


def _check_agent(config: EnvConfig) -> None:
    from rlpipe.envs.agent.command import SandboxedCommand
    from rlpipe.envs.agent.program import load_agent

    if isinstance(agent := load_agent(config), SandboxedCommand):
        agent.check()


def _make_agent(config: EnvConfig, seed: int) -> Suite:
    from rlpipe.envs.agent.suite import AgentSuite

    return AgentSuite(config)


def _check_user(config: EnvConfig) -> None:
    from rlpipe.envs.user_suite import load_suite_maker

    load_suite_maker(config.suite)


def _make_user(config: EnvConfig, seed: int) -> Suite:
    from rlpipe.envs.user_suite import make_user_suite

    return make_user_suite(config, seed)


def _check_mix(config: EnvConfig) -> None:
    for name, (_, member) in members_of(config).items():
        with _of_member(name):
            check_environment(member)


def _make_mix(config: EnvConfig, seed: int) -> Suite:
    from rlpipe.envs.mixture import MixtureSuite

    suites: dict[str, tuple[float, Suite]] = {}
    for name, (share, member) in members_of(config).items():
        with _of_member(name):
            suites[name] = (share, make_suite(member, seed))
    return MixtureSuite(suites)


@contextmanager
def _of_member(name: str) -> Iterator[None]:
    """Add the name of a mixture's member to every ValueError that the block raises."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"env.mix.{name}: {error}") from error


# Each environment is imported on first use, because most runs need only one.
ENVIRONMENTS: dict[EnvName, Environment] = {
    EnvName.SWE: Environment(check=_check_swe, make=_make_swe),
    EnvName.REASONING: Environment(check=_check_reasoning, make=_make_reasoning),
    EnvName.TOOLS: Environment(check=_check_tools, make=_make_tools),
    EnvName.GYMNASIUM: Environment(check=_check_gymnasium, make=_make_gymnasium),
    EnvName.TEXTARENA: Environment(check=_check_textarena, make=_make_textarena),
    EnvName.VERIFIERS: Environment(check=_check_verifiers, make=_make_verifiers),
    EnvName.OPENENV: Environment(check=_check_openenv, make=_make_openenv),
    EnvName.AGENT: Environment(check=_check_agent, make=_make_agent),
    EnvName.FUNCTION: Environment(check=_check_function, make=_make_function),
    EnvName.USER: Environment(check=_check_user, make=_make_user),
    EnvName.MIX: Environment(check=_check_mix, make=_make_mix),
}


def check_environment(config: EnvConfig) -> None:
    """Check that this machine has what episodes of `env.name` need.

    Raises ValueError otherwise, for example for a missing sandbox tool or an unknown task.
    """
    ENVIRONMENTS[config.name].check(config)


def make_suite(config: EnvConfig, seed: int = 0) -> Suite:
    """Make the suite that `env.name` selects. Raises ValueError for a bad data file.

    seed: the run's seed; determines which instances are used for training.
    """
    return ENVIRONMENTS[config.name].make(config, seed)
