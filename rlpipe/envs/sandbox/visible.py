"""The mounts of a sandbox: what it shows of this machine besides /usr, and what it hides.

Owns the search for a program's environment, and the way in which user `nobody`, as which sandboxes run when
we are root, can see an environment below a folder that only root may enter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rlpipe.config.paths import shipped

USR = Path("/usr")
# Mounts each source at the point after it, in a mount namespace of its own, then becomes the command.
_MOUNT = 'while [ "$1" != -- ]; do mount --rbind "$1" "$2" || exit 125; shift 2; done; shift; exec "$@"'


def environment_of(program: Path) -> list[Path]:
    """Return the folders besides /usr that an executable file needs: its virtual environment and its Python.

    A program outside of both needs only its own file.
    """
    prefix = program.parent.parent
    if (prefix / "pyvenv.cfg").is_file():
        python = (prefix / "bin" / "python").resolve()
        needed = [prefix, python.parent.parent]
    elif (real := program.resolve()).name.startswith("python"):
        needed = [real.parent.parent]
    else:
        needed = [program]
    return [path for path in dict.fromkeys(needed) if not path.is_relative_to(USR)]


def show(paths: Iterable[Path], points: Path, *, as_nobody: bool) -> tuple[list[str], list[str]]:
    """Return a prefix of the bwrap command and options of bwrap; they show paths, read-only, where they are.

    points: an empty folder for mount points. as_nobody: root starts bwrap as another user, who may not enter
    all of root's folders.
    """
    mounted, options = [], []
    for number, path in enumerate(paths):
        source = path
        if as_nobody and not all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents):
            source = points / str(number)
            source.mkdir() if path.is_dir() else source.touch()
            mounted += [str(path), str(source)]
        options += ["--ro-bind", str(source), str(path)]
    before = ["unshare", "--mount", "sh", "-c", _MOUNT, "sh", *mounted, "--"] if mounted else []
    return before, options


def hide(shown: Sequence[Path], secret: Iterable[Path] = ()) -> list[str]:
    """Return bwrap's options that hide files in the visible folders.

    secret: files to hide; code and data of rlpipe, which contain right answers, are hidden as well.
    """
    options = []
    package = Path(__file__).resolve().parents[2]
    for path in (package, shipped("data"), *secret):
        if not any(path.is_relative_to(folder) for folder in shown):
            continue
        if path.is_dir():
            options += ["--tmpfs", str(path), "--remount-ro", str(path)]
        elif path.is_file():
            options += ["--ro-bind", "/dev/null", str(path)]
    return options
