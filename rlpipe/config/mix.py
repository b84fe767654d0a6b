"""Converts the members of `env.mix` from mappings to settings of environments. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from math import fsum
from re import fullmatch
from typing import TYPE_CHECKING, Any, TypeVar

from rlpipe.config.limits import did_you_mean

if TYPE_CHECKING:
    from rlpipe.config.env import EnvConfig

C = TypeVar("C")
SHARE = "share"
_TASK = ("data", "reward")  # settings of the environment `function`
_COMMON = ("threads", "retries", "step_timeout_s", "sandbox", "mix")  # belong to the run, not to a member


def members_of(env: EnvConfig) -> dict[str, tuple[float, EnvConfig]]:
    """Return the share and settings of each member of `env.mix`, by name.

    Settings that a member does not set have the defaults of `env`, not the values of the run's `env`. Only
    threads, retries, step_timeout_s and the sandbox are taken from the run. Raises ValueError.
    """
    members: dict[str, tuple[float, EnvConfig]] = {}
    for name, given in env.mix.items():
        where = f"env.mix.{name}"
        if not fullmatch(r"[A-Za-z][\w-]*", str(name)):
            raise ValueError(
                f"{where}: name a member by letters, digits, '_' and '-', as its metrics are named."
            )
        if not isinstance(given, Mapping):
            raise ValueError(f"{where}={given!r}: give settings, as in {{share: 0.5, name: reasoning}}.")

        settings = dict(given)
        share = settings.pop(SHARE, None)
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ValueError(
                f"{where}.share={share!r}: give the member's share of the prompts, above 0 up to 1."
            )
        if common := [key for key in _COMMON if key in settings]:
            raise ValueError(f"{where}.{common[0]}: it is one for the run, set env.{common[0]}.")
        if not {"name", "suite"} & settings.keys():
            raise ValueError(f"{where} has neither name nor suite: name its environment.")

        # `data` and `reward` of a member are among its other settings.
        task = {key: settings.pop(key) for key in _TASK if key in settings}
        if task:
            settings["function"] = task

        for key in _COMMON[:-1]:
            settings[key] = getattr(env, key)
        member = built(type(env), settings, where)
        member.function.model = env.function.model
        members[name] = (float(share), member)

    total = fsum(share for share, _ in members.values())
    if abs(total - 1) > 1e-6:
        shares = ", ".join(f"{name} {share:g}" for name, (share, _) in members.items())
        raise ValueError(f"env.mix has the shares {shares}, in all {total:g}: make them add up to 1.")
    if len(members) < 2:
        raise ValueError(f"env.mix has one member, {next(iter(members))!r}: set env.name, or add another.")
    return members


def built(cls: type[C], values: Mapping[str, Any], where: str) -> C:
    """Create a dataclass of settings from a mapping; nested mappings become nested sections.

    where: name of the section, for messages. Raises ValueError for unknown settings and values of a wrong
    type.
    """
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            hint = did_you_mean(str(key), known) or f" There are {', '.join(known)}."
            raise ValueError(f"{where} has no setting {key!r}.{hint}")

        field = known[key]
        default = field.default if field.default_factory is MISSING else field.default_factory()
        arguments[key] = _typed(value, default, f"{where}.{key}")
    return cls(**arguments)


def _typed(value: object, default: Any, where: str) -> Any:
    """Return the value of a setting with the type of its default. Raises ValueError for other types."""
    if is_dataclass(default):
        if isinstance(value, Mapping):
            return built(type(default), value, where)
        if isinstance(value, type(default)):
            return value
    elif isinstance(default, bool) or isinstance(value, bool):
        if isinstance(value, type(default)):
            return value
    elif isinstance(default, float) and isinstance(value, int):
        return float(value)
    elif default is None or isinstance(
        value, (type(default), str) if isinstance(default, str) else type(default)
    ):
        return value

    expected = "a section" if is_dataclass(default) else f"a {type(default).__name__}"
    raise ValueError(f"{where}={value!r}: give {expected}.")
