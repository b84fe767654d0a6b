"""A user's advantages and policy losses, named `module:function` or `path/to/file.py:function`.

    advantage(token_level_rewards, response_mask, index)                        -> advantages [B, S]
    policy_loss(old_log_prob, log_prob, advantages, response_mask, ...)         -> losses [B, S]

Both have verl's signatures, and receive only the arguments that they name. They may also return the same
values as verl's functions: advantages and returns, or aggregated loss and metrics. Owns their loading, their
arguments, and the checks of their results; `user_correction` does the same for a user's correction.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlpipe.config.user_code import described, load_function, raised_at

if TYPE_CHECKING:
    import torch

ADVANTAGE, POLICY_LOSS = "algo.advantage", "algo.policy_loss"
ARGUMENTS = {
    ADVANTAGE: ("token_level_rewards", "response_mask", "index", "norm_adv_by_std_in_grpo"),
    POLICY_LOSS: (
        "old_log_prob",
        "log_prob",
        "advantages",
        "response_mask",
        "loss_agg_mode",
        "config",
        "rollout_is_weights",
    ),
}


@functools.cache
def user_function(setting: str, name: str) -> Callable[..., Any]:
    """Return the function that a setting names; it is loaded only once until `reload`.

    Raises ValueError when it cannot be imported, or requires an argument that is not available.
    """
    function = load_function(name, setting=setting, takes=", ".join(ARGUMENTS[setting]))
    if missing := sorted(required_arguments(function) - set(ARGUMENTS[setting])):
        raise ValueError(
            f"{setting}={name!r} needs {', '.join(missing)}, but rlpipe passes "
            f"{', '.join(ARGUMENTS[setting])} only: take those of them that it needs, by these names."
        )
    return function


reload = user_function.cache_clear


def required_arguments(function: Callable[..., Any]) -> set[str]:
    """Return the names of the arguments without a default."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind not in variable}


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function takes by name."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def check_grid(setting: str, name: str, value: object, mask: torch.Tensor) -> torch.Tensor:
    """Return `value`. Raises ValueError unless it has the mask's shape and is finite where the mask is 1."""
    import torch

    where = f"{setting}={name!r} returned"
    if not isinstance(value, torch.Tensor) or value.shape != mask.shape:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise ValueError(
            f"{where} {shape}, not a tensor of shape {tuple(mask.shape)} as response_mask: give one number "
            "for each token, as in values[:, None] * response_mask."
        )
    if not torch.isfinite(value[mask.bool()].float()).all():
        raise ValueError(
            f"{where} values that are not finite: keep divisors above 0, as in x / (std + 1e-6) for a group "
            "of equal rewards."
        )
    return value


def rehearsed(setting: str, name: str, call: Callable[[], Any]) -> Any:
    """Return the result of `call`, which calls a user's function on a tiny batch. Raises ValueError."""
    try:
        return call()
    except ValueError as error:
        if str(error).startswith(f"{setting}="):
            raise
        raise _raised(setting, name, error) from error
    # The user's code may raise anything.
    except Exception as error:
        raise _raised(setting, name, error) from error


def _raised(setting: str, name: str, error: BaseException) -> ValueError:
    return ValueError(
        f"{raised_at(error)}: {setting}={name!r} raised {described(error)} on a batch of four answers. "
        "Correct that line; docs/your_algorithm.md describes its arguments."
    )
