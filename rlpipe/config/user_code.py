"""Loads functions from outside the package, named by a setting as "module:function". Imports no torch."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

_PACKAGE = str(Path(__file__).resolve().parents[1])


def load_function(name: str, *, setting: str, takes: str) -> Callable[..., Any]:
    """Import the function that a setting names.

    setting, takes: for messages, the setting and the arguments of the function. The folder in which the run
    was started is searched as well, as by `python FILE`; in workers too.
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
    # The module is executed when it is imported, and may raise anything.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ValueError(
            f"{raised_at(error)}: importing {setting}={name!r} raised {described(error)}. Correct that line."
        ) from error

    if not callable(found):
        raise ValueError(f"{setting}={name!r} is a {type(found).__name__}, not a function({takes}).")
    return found


def described(error: BaseException) -> str:
    """Return the type and first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": ")


def raised_at(error: BaseException) -> str:
    """Return file and line of the user's code that raised an error: the last frame outside libraries."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"

    # Frames of rlpipe, the standard library and installed packages are not the user's.
    frames = traceback.extract_tb(error.__traceback__)
    inside = (_PACKAGE, sys.prefix, sys.base_prefix, "<frozen")
    own = [frame for frame in frames if not frame.filename.startswith(inside)] or frames[-1:]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "?"
