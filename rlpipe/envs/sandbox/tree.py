"""A work tree as a value: what files a command starts from and what it leaves behind.

Owns writing a tree into an empty directory and reading one back from a directory that hostile code
has written. Reading follows no symlink, ignores what is neither file, link nor directory, and stops
at a limit. Times, owners and modes are not part of a tree (an executable bit is), nor is bytecode.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_EPOCH_NS = 1_000_000_000 * 10**9  # one time for all files, so that listings are deterministic


@dataclass(slots=True, frozen=True)
class File:
    """A regular file."""

    content: bytes
    executable: bool = False


@dataclass(slots=True, frozen=True)
class Link:
    """A symbolic link, kept as a link and never followed by the host."""

    target: str


@dataclass(slots=True, frozen=True)
class EmptyDirectory:
    """A directory without entries; all others follow from the paths of what they hold."""


Entry = File | Link | EmptyDirectory
Tree = Mapping[str, Entry]  # relative path with "/" -> entry


class TreeTooLarge(Exception):
    """The tree exceeds its limit of bytes, of entries or of depth."""


@dataclass(slots=True, kw_only=True, frozen=True)
class TreeLimits:
    """max_bytes: of all files, as the disk counts them. max_entries: files, links and directories."""

    max_bytes: int
    max_entries: int


def tree_of(files: Mapping[str, str]) -> dict[str, Entry]:
    """A tree of text files.

    >>> tree_of({"a.py": "x = 1"})
    {'a.py': File(content=b'x = 1', executable=False)}
    """
    return {path: File(text.encode()) for path, text in files.items()}


def fingerprint(tree: Tree) -> bytes:
    """Equal for equal trees, whatever the order of their paths."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(tree):
        digest.update(repr((path, tree[path])).encode(errors="surrogateescape"))
    return digest.digest()


def write_tree(tree: Tree, root: Path, owner: int | None) -> None:
    """Create the tree in an empty directory, given to user `owner` (None: to us)."""
    made = {root}
    for path, entry in tree.items():
        target = root / path
        directory = target if isinstance(entry, EmptyDirectory) else target.parent
        for parent in reversed([directory, *directory.parents]):
            if parent.is_relative_to(root) and parent not in made:
                parent.mkdir()
                _give(parent, owner, 0o755)
                made.add(parent)
        if isinstance(entry, Link):
            target.symlink_to(entry.target)
        elif isinstance(entry, File):
            target.write_bytes(entry.content)
            _give(target, owner, 0o755 if entry.executable else 0o644)
            os.utime(target, ns=(_EPOCH_NS, _EPOCH_NS))
    for directory in made:
        os.utime(directory, ns=(_EPOCH_NS, _EPOCH_NS))


def _give(path: Path, owner: int | None, mode: int) -> None:
    path.chmod(mode)
    if owner is not None:
        os.chown(path, owner, owner)


def read_tree(root: Path, limits: TreeLimits) -> dict[str, Entry]:
    """Read back a directory no process writes to any more.

    Raises TreeTooLarge; OSError when the disk fails.
    """
    try:
        return _read(root, limits)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # deeper than a path can name
            raise TreeTooLarge from error
        raise


def _read(root: Path, limits: TreeLimits) -> dict[str, Entry]:
    tree: dict[str, Entry] = {}
    used = count = 0
    pending = [""]
    while pending:
        directory = pending.pop()
        entries = _list(root / directory)
        count += len(entries)
        if count > limits.max_entries:
            raise TreeTooLarge
        if directory and not entries:
            tree[directory] = EmptyDirectory()
        for entry in entries:
            path = f"{directory}/{entry.name}" if directory else entry.name
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(info.st_mode):
                tree[path] = Link(str(Path(entry.path).readlink()))
            elif stat.S_ISDIR(info.st_mode):
                if entry.name != "__pycache__":
                    pending.append(path)
            elif stat.S_ISREG(info.st_mode):
                used += info.st_size
                if used > limits.max_bytes:
                    raise TreeTooLarge
                tree[path] = File(_content(Path(entry.path)), bool(info.st_mode & stat.S_IXUSR))
    return tree


def _list(directory: Path) -> list[os.DirEntry[str]]:
    """Entries of a directory of ours, whatever mode it was given."""
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        directory.chmod(0o755)
    with os.scandir(directory) as entries:
        return list(entries)


def _content(path: Path) -> bytes:
    if not os.access(path, os.R_OK):
        path.chmod(0o644)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def exceeds(root: Path, limits: TreeLimits) -> bool:
    """Whether a directory that is being written to is over its limits; sparse files count as they are."""
    used = count = 0
    pending = [str(root)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    info = entry.stat(follow_symlinks=False)
                    count += 1
                    used += info.st_blocks * 512
                    if stat.S_ISDIR(info.st_mode):
                        pending.append(entry.path)
                    if count > limits.max_entries or used > limits.max_bytes:
                        return True
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return True
            # anything else: the command removed or closed it between two looks; read_tree decides
    return False


def remove_tree(root: Path) -> None:
    """Delete a directory that hostile code has written, however deep and whatever its modes.

    Raises OSError when it is still there.
    """
    try:
        shutil.rmtree(root)
    except (OSError, RecursionError):
        subprocess.run(["chmod", "-R", "u+rwX", str(root)], capture_output=True, check=False)
        removed = subprocess.run(["rm", "-rf", "--", str(root)], capture_output=True, text=True, check=False)
        if removed.returncode:
            raise OSError(f"cannot remove {root}: {removed.stderr.strip()}") from None
