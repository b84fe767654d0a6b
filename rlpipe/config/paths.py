"""Paths of shipped files, in a checkout and in an installed wheel.

`shipped("configs")` returns `rlpipe/_data/configs` (a wheel) or the checkout's `configs` (a clone);
`resolve("shipped:models/tiny")` reads the form in which settings name such files, and `resolve_model` the
names of released models too.
"""

from __future__ import annotations

from pathlib import Path

from rlpipe.models.released import RELEASED, cache_directory

PREFIX = "shipped:"
_PACKAGE = Path(__file__).resolve().parent.parent


def shipped(relative: str) -> Path:
    """Return the absolute path of a file or folder that comes with rlpipe.

    Raises ValueError when neither the wheel nor the checkout has it.
    """
    places = [_PACKAGE / "_data" / relative, _PACKAGE.parent / relative]
    for place in places:
        if place.exists():
            return place

    raise ValueError(
        f"{relative!r} is not shipped with this rlpipe: looked at {', '.join(map(str, places))}. "
        "Reinstall rlpipe, or give a path of your own."
    )


def resolve(path: str) -> Path:
    """Return a setting's path: that of `shipped:NAME`, or an ordinary path made absolute, `~` expanded."""
    if path.startswith(PREFIX):
        return shipped(path.removeprefix(PREFIX))
    return Path(path).expanduser().resolve()


def resolve_model(path: str, setting: str = "model.path") -> Path:
    """Return the directory of a model: as `resolve`, or where the released model of that name is.

    Args:
        path: value of a setting that names a model. A name of `RELEASED` is that model, `./NAME` a folder.
        setting: its name, for messages.

    Raises:
        ValueError: the released model has not been fetched.
    """
    if path not in RELEASED:
        return resolve(path)

    directory = cache_directory(path)
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{setting}={path} is a released model that is not on this machine ({directory} does not exist): "
            f"run `rlpipe fetch {path}` first. A folder of that name is {setting}=./{path}."
        )
    return directory
