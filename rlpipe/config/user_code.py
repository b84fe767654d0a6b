"""Functions that live outside the package, named by a setting as "module:function". Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any


def load_function(name: str, *, setting: str, takes: str) -> Callable[..., Any]:
    """The function that a setting names.

    setting, takes: for messages, the setting and what the function is called with. The folder the run was
    started in is searched as well, in workers too: `python FILE` would do so.
    Raises ValueError when it cannot be imported or called.
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if name.count(":") != 1:
        raise ValueError(f"{setting}={name!r} must be module:function, the module without .py.")
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{setting}={name!r} cannot be imported from {here}: {error}. Start the run in its folder, "
            "put that on PYTHONPATH, or install it."
        ) from error
    if not callable(found):
        raise ValueError(f"{setting}={name!r} is a {type(found).__name__}, not a function({takes}).")
    return found
