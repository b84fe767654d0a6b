"""Lists settings by name, and finds the setting that is most similar to an unknown name. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any

from rlpipe.config.renamed import outdated_setting
from rlpipe.config.run import Config


def settings(config: Any = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and the default of every section and setting, such as "spec" and "spec.gamma"."""
    config = Config() if config is None else config
    for part in fields(config):
        if part.metadata.get("omegaconf_ignore"):
            continue
        name, value = f"{prefix}{part.name}", getattr(config, part.name)
        yield name, value
        if is_dataclass(value):
            yield from settings(value, f"{name}.")


def closest_setting(key: str) -> str:
    """Return the setting that a name most likely means; "" if none is similar.

    >>> closest_setting("steps"), closest_setting("spec.gama")
    ('run.steps', 'spec.gamma')
    """
    known = dict(settings())
    if key in known:
        return key

    last_parts = {name: name.rpartition(".")[2] for name in known}
    last = key.rpartition(".")[2]

    # Try a correct name in another section, then a misspelt full name, then a misspelt last part.
    if same := sorted(name for name in known if last_parts[name] == last):
        return same[0]
    if close := get_close_matches(key, list(known), n=1):
        return close[0]
    if close := get_close_matches(last, set(last_parts.values()), n=1):
        return next(name for name in known if last_parts[name] == close[0])

    return ""


def unknown_setting(key: str, value: str) -> ValueError | None:
    """Return the error for a dotted key; None if it is a setting, or a key in a setting that is a mapping."""
    known = dict(settings())
    parts = key.split(".")
    parents = [".".join(parts[:n]) for n in range(1, len(parts))]
    if key in known or any(isinstance(known.get(parent), dict) for parent in parents):
        return None

    # For a name of an earlier version, the new name is a better answer than a similar name.
    if refusal := outdated_setting(key, value):
        return refusal

    closest = closest_setting(key)
    meant = f" Did you mean {closest}?" if closest else ""
    return ValueError(
        f"{key}={value}: there is no setting {key!r}.{meant} Correct the name; `rlpipe run --cfg job` prints "
        "every setting."
    )


def kind_of(key: str) -> str:
    """Return the kind of values that a setting accepts, inferred from its default."""
    default = dict(settings()).get(key)
    if is_dataclass(default):
        return f"set its parts, as in {key}.{fields(default)[0].name}=VALUE"

    kinds = {bool: "true or false", int: "a whole number", float: "a number", list: "a list in brackets"}
    if isinstance(default, Enum):
        return f"choose one of {', '.join(type(default).__members__)}"

    shown = default if isinstance(default, str) else json.dumps(default, default=str)
    return f"give {kinds.get(type(default), 'a value of that kind')}, as in {key}={shown}"
