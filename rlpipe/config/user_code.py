"""Loads functions from outside the package. Imports no torch.

A setting names a function as `module:function` or as `path/to/file.py:function`. A file's path is relative to
the folder in which the run was started; `absolute` makes the path absolute, so that it names the same file in
every process. Folders of user code are searched after installed packages, so a user's file `numpy.py` does
not replace numpy. Each file is a separate module, so two files with the same name do not collide.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from rlpipe.config.limits import did_you_mean

_PACKAGE = str(Path(__file__).resolve().parents[1])
_user_folders: set[str] = set()  # folders of the files that were loaded


def is_user_code(name: str) -> bool:
    """Return whether a setting names a user's function, and not a function of rlpipe or verl."""
    return ":" in name or name.endswith(".py")


def absolute(name: str) -> str:
    """Return the name of a function with an absolute path of its file; other names are returned unchanged.

    >>> absolute("my_env:make_suite"), absolute("/home/me/my_env.py:make_suite")
    ('my_env:make_suite', '/home/me/my_env.py:make_suite')
    """
    file, _, function = name.rpartition(":")
    return f"{Path(file).expanduser().resolve()}:{function}" if file.endswith(".py") else name


def load_function(name: str, *, setting: str, takes: str) -> Callable[..., Any]:
    """Import the function that a setting names, as `module:function` or `path/to/file.py:function`.

    setting, takes: name of the setting and arguments of the function, for messages. Modules are also searched
    in the folder in which the run was started, and a file can import modules in its folder. This also works
    in workers. Raises ValueError when the function cannot be imported or called.
    """
    where = f"{setting}={name!r}"
    source, _, function = name.rpartition(":")
    is_file = source.endswith(".py")
    if not source or not function or (":" in source and not is_file):
        example = f"{Path(name).name}:NAME" if name.endswith(".py") else "my_code.py:NAME"
        raise ValueError(
            f"{where} must be module:function or path/to/file.py:function: add the function, as in {example}."
        )

    module = _load_file(Path(source).expanduser().resolve(), where) if is_file else _load(source, where)

    try:
        loaded = attrgetter(function)(module)
    except AttributeError:
        file = getattr(module, "__file__", None) or f"the module {source}"
        raise ValueError(f"{where}: {file} has no {function!r}.{_hint(module, function)}") from None

    if not callable(loaded):
        raise ValueError(f"{where} is a {type(loaded).__name__}, not a function({takes}).")
    return loaded


def _load(name: str, where: str) -> ModuleType:
    """Import a module by its name. Raises ValueError."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)

    try:
        return importlib.import_module(name)
    # The import executes the module, which may raise anything.
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{where} cannot be imported from {here}: {error}. Name its file (path/to/file.py:function), "
                "start the run in its folder, put that on PYTHONPATH, or install it."
            ) from error
        raise _failed(error, where, raised_at(error)) from error


def _load_file(file: Path, where: str) -> ModuleType:
    """Execute a file as a separate module; return the loaded module if the file is unchanged.

    Raises ValueError.
    """
    if not file.is_file():
        siblings = [path.name for path in file.parent.glob("*.py")]
        raise ValueError(
            f"{where}: there is no file {file}.{did_you_mean(file.name, siblings)} A relative path starts at "
            "the folder in which the run is started."
        )

    stat = file.stat()
    version = hashlib.sha256(f"{file} {stat.st_mtime_ns} {stat.st_size}".encode()).hexdigest()[:12]
    name = f"{file.stem}_{version}"
    if name in sys.modules:
        return sys.modules[name]

    _search(file.parent)
    spec = spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = module_from_spec(spec)
    # Dataclasses and pickle find a class by the name of its module.
    sys.modules[name] = module

    try:
        spec.loader.exec_module(module)
    # The file's code may raise anything.
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _failed(error, where, raised_at(error, otherwise=str(file))) from error
    return module


def _search(folder: Path) -> None:
    """Make the modules of a user's folder importable, after those that are installed."""
    others, path = _user_folders - {str(folder)}, str(folder)
    _user_folders.add(path)

    # Put the folder before the folders of earlier files, because their modules may have the same names.
    sys.path[:] = [entry for entry in sys.path if entry not in others]
    if path not in sys.path:
        sys.path.append(path)
    sys.path.extend(sorted(others))

    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        is_others = isinstance(file, str) and str(Path(file).parent) in others
        if is_others and (folder / f"{name}.py").is_file():
            del sys.modules[name]


def _hint(module: ModuleType, function: str) -> str:
    """Return a sentence, after a space, with the function that was probably meant, or all functions."""
    names = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    return did_you_mean(function, names) or f" It defines {', '.join(names) or 'no function'}."


def _failed(error: BaseException, where: str, at: str) -> ValueError:
    """Return the ValueError for user code that raised an error when it was imported."""
    hint = "Correct that line"
    if isinstance(error, ModuleNotFoundError):
        hint = f"Correct that line, install it, or put {error.name}.py into the same folder"
    return ValueError(f"{at}: importing {where} raised {described(error)}. {hint}.")


def described(error: BaseException) -> str:
    """Return the type and first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".rstrip(": ")


def raised_at(error: BaseException, *, otherwise: str = "") -> str:
    """Return file and line where the user's code raised an error: the last frame outside libraries.

    otherwise: returned if no frame belongs to the user's code; if empty, the last frame is returned.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"

    frames = traceback.extract_tb(error.__traceback__)
    last = _last_of_user(frames)
    if last is None and otherwise:
        return otherwise

    last = last or (frames[-1] if frames else None)
    return f"{last.filename}:{last.lineno}" if last else "?"


def users_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return "file:line `text`" of the last frame in user code. frames: with lines, outermost first."""
    stack = traceback.StackSummary.extract(iter(frames))
    last = _last_of_user(stack) or (stack[-1] if stack else None)
    return (
        "?" if last is None else f"{last.filename}:{last.lineno}" + (f" `{last.line}`" if last.line else "")
    )


def _last_of_user(frames: traceback.StackSummary) -> traceback.FrameSummary | None:
    """Return the last frame in the user's code; None if there is none."""
    # Frames of rlpipe, the standard library and installed packages do not belong to the user's code.
    inside = (_PACKAGE, sys.prefix, sys.base_prefix, "<frozen")
    user_frames = [
        frame
        for frame in frames
        if str(Path(frame.filename).parent) in _user_folders or not frame.filename.startswith(inside)
    ]
    return user_frames[-1] if user_frames else None
