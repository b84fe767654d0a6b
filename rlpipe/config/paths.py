"""Paths of shipped files, in a checkout and in an installed wheel.

`shipped("configs")` returns `rlpipe/_data/configs` (in a wheel) or `configs` of the checkout.
`resolve("shipped:models/tiny")` returns the path of a file that a setting names. `resolve_model` also accepts
names of released models and ids of the Hugging Face hub.
"""

from __future__ import annotations

from pathlib import Path

from rlpipe.models.hub import hub_directory, hub_id
from rlpipe.models.released import RELEASED, cache_directory

PREFIX = "shipped:"
_PACKAGE = Path(__file__).resolve().parent.parent


def shipped(relative: str) -> Path:
    """Return the absolute path of a file or folder that comes with rlpipe.

    The wheel of rlpipe has the default model; the package rlpipe-models has the others. Raises ValueError if
    neither the installation nor the checkout has the file.
    """
    places = [_PACKAGE / "_data" / relative, _PACKAGE.parent / relative]
    for place in places:
        if place.exists():
            return place

    remedy = "Install the package rlpipe-models" if relative.startswith("models/") else "Reinstall rlpipe"
    raise ValueError(
        f"{relative!r} is not in this installation of rlpipe: looked at {', '.join(map(str, places))}. "
        f"{remedy}, or give a path of your own."
    )


def resolve(path: str) -> Path:
    """Return the path of `shipped:NAME`; for any other path, expand `~` and make it absolute."""
    if path.startswith(PREFIX):
        return shipped(path.removeprefix(PREFIX))
    return Path(path).expanduser().resolve()


def resolve_model(path: str, setting: str = "model.path") -> Path:
    """Return the directory of a model: a path as in `resolve`, a fetched model, or a model of the hub.

    Args:
        path: value of a setting that names a model. A name in `RELEASED` is a released model. `org/name` or
            `org/name@revision`, if no such path exists, is a model of the hub; it is downloaded unless it is
            in the cache. `./NAME` is always a folder.
        setting: name of the setting, for messages.

    Raises:
        ValueError: the released model has not been fetched, or the model of the hub cannot be downloaded.
    """
    if path not in RELEASED:
        hub = hub_id(path)
        return resolve(path) if hub is None else hub_directory(*hub, setting)

    directory = cache_directory(path)
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{setting}={path} is a released model that is not on this machine ({directory} does not exist): "
            f"run `rlpipe fetch {path}` first. A folder of that name is {setting}=./{path}."
        )
    return directory
