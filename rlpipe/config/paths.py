"""Paths of shipped files, in a checkout and in an installed wheel.

`shipped("configs")` returns `rlpipe/_data/configs` (a wheel) or the checkout's `configs` (a clone);
`resolve("shipped:models/tiny")` reads the form in which settings name such files.
"""

from __future__ import annotations

from pathlib import Path

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
