"""Gymnasium's environments as text: `env=gymnasium env.gymnasium.id=FrozenLake-v1`.

The first message has the first observation and the actions. Every turn of the model is one action, answered
by the next observation as `envs.spaces` writes it; with `env.gymnasium.kwargs={render_mode: ansi}` it is the
environment's own drawing, the highlighted cell in brackets. A turn that names no action is answered by what
to write, and uses up a turn. The reward is the sum of the steps'. An instance is the seed of `reset`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

from rlpipe.config.env import EnvConfig
from rlpipe.config.user_code import described, load_function
from rlpipe.envs.base import StepResult
from rlpipe.envs.seeded import SeededSuite, did_you_mean, opening, require
from rlpipe.envs.spaces import check_space, describe, to_action, to_text

# Names of actions, from Gymnasium's documents.
ACTION_NAMES = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
}
_HIGHLIGHT = re.compile(r"\x1b\[[0-9;]*4[0-7]m(.+?)\x1b\[0?m", re.DOTALL)  # where the player is
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def check_gymnasium(config: EnvConfig) -> None:
    """Make the environment and run Gymnasium's own `check_env`. Raises ValueError for what it finds."""
    require("gymnasium", extra="gymnasium")
    from gymnasium.utils.env_checker import check_env

    env = _make_env(config)
    try:
        if env.render_mode != "ansi":
            check_space(env.observation_space, "observation")
        check_space(env.action_space, "action")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice about normalised spaces, which a model does not read
            check_env(env.unwrapped, skip_render_check=True)
        _action_names(env, config)
    except Exception as error:  # assertions, TypeError, gymnasium.error.Error, and whatever the code raises
        where, reason = f"env.gymnasium.id={config.gymnasium.id!r}", described(error).rstrip(".")
        raise ValueError(f"{where} cannot be used: {reason}. Correct the environment.") from error
    finally:
        env.close()


def make_gymnasium(config: EnvConfig, seed: int) -> SeededSuite:
    """Make the suite of `env.gymnasium`. seed: of the run."""
    return SeededSuite(config, seed, partial(GymnasiumEpisode, config))


class GymnasiumEpisode:
    """One attempt: `reset(seed)`, then a step for every turn."""

    def __init__(self, config: EnvConfig, seed: int) -> None:
        self._config, self._env, self._total = config, _make_env(config), 0.0
        self._names = _action_names(self._env, config)
        self._observation, _ = self._env.reset(seed=seed)

    def messages(self) -> list[dict[str, str]]:
        """Return the system prompt, if one is set, then the actions and the first observation."""
        actions = describe(self._env.action_space, self._names)
        return opening(self._config, f"{self._show()}\nAnswer with {actions}.")

    def step(self, action: str) -> StepResult:
        """Take the action that the text names. One that names none costs `invalid_reward` and a step."""
        try:
            chosen = to_action(self._env.action_space, action, self._names)
        except ValueError as hint:
            self._total += self._config.gymnasium.invalid_reward
            return StepResult(observation=f"{self._show()}\n{hint}", info={"valid": 0.0})

        self._observation, reward, terminated, truncated, _ = self._env.step(chosen)
        self._total += float(reward)
        if terminated or truncated:
            return StepResult(done=True, reward=self._total, info={"submitted": bool(terminated)})
        return StepResult(observation=self._show())

    def finish(self) -> StepResult:
        """End at a limit of turns or context, with the rewards so far."""
        return StepResult(done=True, reward=self._total, info={"submitted": False})

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _show(self) -> str:
        if self._env.render_mode != "ansi":
            return to_text(self._env.observation_space, self._observation)
        return _COLOUR.sub("", _HIGHLIGHT.sub(r"[\1]", str(self._env.render()))).strip()


def _make_env(config: EnvConfig) -> Any:
    """Make the environment. Raises ValueError for an unknown id or bad kwargs."""
    import gymnasium

    name, kwargs = config.gymnasium.id, config.gymnasium.kwargs
    try:
        # A class of the user's has a name that Python allows; a registered id has a version.
        if name.partition(":")[2].isidentifier():
            return load_function(name, setting="env.gymnasium.id", takes="**kwargs")(**kwargs)
        return gymnasium.make(name, disable_env_checker=True, **kwargs)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        reason, where = described(error).rstrip("."), f"env.gymnasium.id={name!r}, kwargs={kwargs}"
        hint = did_you_mean(name, gymnasium.registry) or " Give an id such as FrozenLake-v1."
        raise ValueError(f"{where}: {reason}.{'' if name in gymnasium.registry else hint}") from error


def _action_names(env: Any, config: EnvConfig) -> Sequence[str]:
    """Return the names of the actions of a Discrete space; empty when none are known."""
    size, given = getattr(env.action_space, "n", 0), config.gymnasium.actions
    if given and len(given) != size:
        raise ValueError(f"env.gymnasium.actions={given} has {len(given)} names for {size} actions.")

    known = ACTION_NAMES.get(env.spec.name if env.spec else "", ())
    own = getattr(env.unwrapped, "get_action_meanings", lambda: known)()
    return given or (own if len(own) == size else ())
