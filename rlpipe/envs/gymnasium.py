"""Gymnasium's environments as text: `env=gymnasium env.gymnasium.id=FrozenLake-v1`.

The first message has the first observation and the actions. Every turn of the model is one action, and the
reply is the next observation in the text format of `envs.spaces`. With
`env.gymnasium.kwargs={render_mode: ansi}`, an observation is the environment's text drawing, with the
highlighted cell in brackets. If a turn names no action, the reply lists the possible actions; the turn still
counts. Each step gives the environment's reward. An instance is a seed for `reset`. The info has `score`, the
sum of the environment's rewards, and `invalid_turns`.
"""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import Any

from rlpipe.config.env import EnvConfig
from rlpipe.config.limits import did_you_mean
from rlpipe.config.user_code import described, load_function
from rlpipe.envs.base import StepResult
from rlpipe.envs.seeded import SeededSuite, opening, require
from rlpipe.envs.spaces import action_names, check_space, describe, to_action, to_text

_HIGHLIGHT = re.compile(r"\x1b\[[0-9;]*4[0-7]m(.+?)\x1b\[0?m", re.DOTALL)  # the player's cell
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def check_gymnasium(config: EnvConfig) -> None:
    """Make the environment and run Gymnasium's `check_env`. Raises ValueError if that reports a problem."""
    require("gymnasium", extra="gymnasium")
    from gymnasium.utils.env_checker import check_env

    env = _make_env(config)
    try:
        if env.render_mode != "ansi":
            check_space(env.observation_space, "observation")
        check_space(env.action_space, "action")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # advice on normalised spaces, irrelevant for text
            check_env(env.unwrapped, skip_render_check=True)
        action_names(env, config.gymnasium.actions)
    except Exception as error:  # assertions, gymnasium.error.Error, and any error of the environment
        where, reason = f"env.gymnasium.id={config.gymnasium.id!r}", described(error).rstrip(".")
        raise ValueError(f"{where} cannot be used: {reason}. Correct the environment.") from error
    finally:
        env.close()


def make_gymnasium(config: EnvConfig, seed: int) -> SeededSuite:
    """Make the suite that `env.gymnasium` configures. seed: the run's seed."""
    return SeededSuite(config, seed, partial(GymnasiumEpisode, config))


class GymnasiumEpisode:
    """One attempt: `reset(seed)`, then a step for every turn."""

    def __init__(self, config: EnvConfig, seed: int) -> None:
        self._config, self._env = config, _make_env(config)
        self._info = {"score": 0.0, "invalid_turns": 0}
        self._names = action_names(self._env, config.gymnasium.actions)
        self._observation, _ = self._env.reset(seed=seed)

    def messages(self) -> list[dict[str, str]]:
        """Return the system prompt, if one is set, then the actions and the first observation."""
        actions = describe(self._env.action_space, self._names)
        return opening(self._config, f"{self._show()}\nAnswer with {actions}.")

    def step(self, action: str) -> StepResult:
        """Take the action that the text names; if it names none, the reward is `invalid_reward`."""
        try:
            chosen = to_action(self._env.action_space, action, self._names)
        except ValueError as hint:
            self._info["invalid_turns"] += 1
            penalty = self._config.gymnasium.invalid_reward
            return StepResult(observation=f"{self._show()}\n{hint}", reward=penalty, info=dict(self._info))

        self._observation, reward, terminated, truncated, _ = self._env.step(chosen)
        self._info["score"] += float(reward)
        done = bool(terminated or truncated)
        return StepResult(
            observation="" if done else self._show(),
            done=done,
            truncated=bool(truncated and not terminated),
            reward=float(reward),
            info={**self._info, "submitted": bool(terminated)},
        )

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
        # The name of a user's class is an identifier; a registered id ends with a version such as -v1.
        if name.rpartition(":")[2].isidentifier() and ":" in name:
            return load_function(name, setting="env.gymnasium.id", takes="**kwargs")(**kwargs)
        return gymnasium.make(name, disable_env_checker=True, **kwargs)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        reason, where = described(error).rstrip("."), f"env.gymnasium.id={name!r}, kwargs={kwargs}"
        hint = did_you_mean(name, gymnasium.registry, most=3) or " Give an id such as FrozenLake-v1."
        raise ValueError(f"{where}: {reason}.{'' if name in gymnasium.registry else hint}") from error
