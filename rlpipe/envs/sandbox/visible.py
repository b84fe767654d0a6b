"""The mounts of a sandbox: the paths of this machine that it shows in addition to /usr, and those it hides.

Owns the search for a program's environment. If rlpipe runs as root, sandboxes run as user `nobody`; this
module makes an environment visible to `nobody` even in a folder that only root may enter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rlpipe.config.paths import shipped

USR = Path("/usr")
# Shell program that runs in a new mount namespace. Its arguments are pairs of source and mount point, then
# `--` and a command. It mounts each source at its mount point, and then executes the command.
_MOUNT = 'while [ "$1" != -- ]; do mount --rbind "$1" "$2" || exit 125; shift 2; done; shift; exec "$@"'


def environment_of(program: Path) -> list[Path]:
    """Return the paths outside /usr that an executable file needs.

    These are its virtual environment and its Python, or, for any other program, only the file.
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
    """Return a command prefix for bwrap and options of bwrap that show paths read-only, at the same location.

    points: an empty folder for mount points. as_nobody: bwrap runs as user `nobody`, who cannot enter some of
    root's folders.
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
    """Return options of bwrap that hide files in the visible folders.

    secret: files to hide. Code and data of rlpipe are always hidden, because they contain right answers.
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
