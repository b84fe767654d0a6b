"""A work tree as a value: the files before and after a command.

Owns writing a tree into an empty directory, and reading a tree from a directory that hostile code has
written. Reading follows no symlinks, ignores everything except files, links and directories, and stops at a
limit. A tree includes executable bits, but no times, owners, other modes or bytecode.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_LONGEST_PATH = 1000  # maximum bytes of a relative path, within the system's limit and cheap to check
_EPOCH_NS = 1_000_000_000 * 10**9  # one time for all files, so that listings are deterministic


@dataclass(slots=True, frozen=True)
class File:
    """A regular file."""

    content: bytes
    executable: bool = False


@dataclass(slots=True, frozen=True)
class Link:
    """A symbolic link, stored as a link and never followed by the host."""

    target: str


@dataclass(slots=True, frozen=True)
class EmptyDirectory:
    """A directory without entries; the paths of the files imply all other directories."""


Entry = File | Link | EmptyDirectory
Tree = Mapping[str, Entry]  # relative path with "/" -> entry


class TreeTooLarge(Exception):
    """Raised if a tree exceeds its limit of bytes, entries or depth."""


@dataclass(slots=True, kw_only=True, frozen=True)
class TreeLimits:
    """Limits of a tree.

    max_bytes: disk space of all files together. max_entries: number of files, links and directories.
    """

    max_bytes: int
    max_entries: int


def tree_of(files: Mapping[str, str]) -> dict[str, Entry]:
    """Return a tree of text files.

    >>> tree_of({"a.py": "x = 1"})
    {'a.py': File(content=b'x = 1', executable=False)}
    """
    return {path: File(text.encode()) for path, text in files.items()}


def fingerprint(tree: Tree) -> bytes:
    """Return a digest that is equal for equal trees, regardless of the order of their paths."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(tree):
        digest.update(repr((path, tree[path])).encode(errors="surrogateescape"))
    return digest.digest()


def write_tree(tree: Tree, root: Path, owner: int | None) -> None:
    """Create the tree in an empty directory. owner: user id of the files; None: this process's user."""
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

    # Set the times of directories last, since creating an entry changes the time of its directory.
    for directory in made:
        os.utime(directory, ns=(_EPOCH_NS, _EPOCH_NS))


def _give(path: Path, owner: int | None, mode: int) -> None:
    path.chmod(mode)
    if owner is not None:
        os.chown(path, owner, owner)


def read_tree(root: Path, limits: TreeLimits) -> dict[str, Entry]:
    """Read a tree from a directory to which no process writes any more.

    Raises TreeTooLarge if it exceeds the limits, and OSError if the disk fails.
    """
    tree: dict[str, Entry] = {}
    used = count = 0
    pending = [""]

    while pending:
        directory = pending.pop()
        entries = _list(root / directory)
        count += len(entries)
        if count > limits.max_entries or len(os.fsencode(directory)) > _LONGEST_PATH:
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
    """List a directory that this user owns, even if the command removed its read permission."""
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        directory.chmod(0o755)
    with os.scandir(directory) as entries:
        return list(entries)


def _content(path: Path) -> bytes:
    if not os.access(path, os.R_OK):
        path.chmod(0o644)

    # Never follow a link out of the tree.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def exceeds(root: Path, limits: TreeLimits, used: int = 0) -> bool:
    """Return whether a directory exceeds its limits while a process may still write to it.

    Sparse files count with their allocated blocks. used: bytes to add to those in the directory.
    """
    if used > limits.max_bytes:
        return True

    count = 0
    pending = [str(root)]
    longest = len(os.fsencode(root)) + _LONGEST_PATH
    while pending:
        directory = pending.pop()
        if len(os.fsencode(directory)) > longest:
            return True

        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    info = entry.stat(follow_symlinks=False)
                    count += 1
                    used += info.st_blocks * 512
                    if stat.S_ISDIR(info.st_mode):
                        pending.append(entry.path)
                    if count > limits.max_entries or used > limits.max_bytes:
                        return True
        except OSError:
            # The command has just removed or closed the entry; `read_tree` makes the final decision.
            continue
    return False


def remove_tree(root: Path) -> None:
    """Delete a directory that hostile code has written, of any depth and with any modes.

    Every directory is moved to the top level before it is emptied, so paths stay short and the time is linear
    in the number of entries. Raises OSError if an entry cannot be deleted.
    """
    trash = root.with_name(f"{root.name}.trash")
    trash.mkdir()
    root.chmod(0o700)
    root.rename(trash / "0")

    top = os.open(trash, os.O_RDONLY)
    try:
        pending, made = ["0"], 1
        while pending:
            directory = pending.pop()
            here = os.open(directory, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=top)
            try:
                with os.scandir(here) as entries:
                    for entry in list(entries):
                        if entry.is_dir(follow_symlinks=False):
                            # The mode of a directory may forbid even this user to list it.
                            os.chmod(entry.name, 0o700, dir_fd=here)
                            os.rename(entry.name, str(made), src_dir_fd=here, dst_dir_fd=top)
                            pending.append(str(made))
                            made += 1
                        else:
                            os.unlink(entry.name, dir_fd=here)
            finally:
                os.close(here)
            os.rmdir(directory, dir_fd=top)
    finally:
        os.close(top)
    trash.rmdir()


def scratch() -> Path:
    """Return the folder for the work trees of running commands, in memory if the machine supports it."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
