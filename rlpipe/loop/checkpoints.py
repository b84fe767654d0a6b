"""Checkpoint directories `checkpoints/step_N/`, complete or absent; the newest and the best are retained.

Owns naming, atomicity, verification and pruning; other modules write the content. The order of a save:

    step_N.tmp/  content -> to the disk -> state.json with size and CRC-32 of every file -> rename to step_N
    step_M (no longer wanted) -> rename to step_M.old -> removed

A crash at any point leaves the earlier checkpoints unchanged, and leftovers that the next start removes. A
checkpoint that does not match its state.json is renamed to `step_N.corrupt`, and the previous checkpoint is
used. The content must not change while it is written: the controller passes copies, so that training
continues meanwhile.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATE = "state.json"
SCORE = "val/reward"  # the entry of state.json that `keep_best` compares
_CHUNK = 4 << 20  # bytes read at once


@dataclass(slots=True, kw_only=True)
class Broken:
    """A checkpoint that was renamed to step_N.corrupt. reason: the damage that was detected."""

    step: int
    reason: str


class CheckpointStore:
    """Checkpoints of one run. keep, keep_best: how many to retain of the newest, and of the highest SCORE.

    broken: checkpoints that were renamed to step_N.corrupt since the start, for the log.
    """

    def __init__(self, directory: Path, keep: int, keep_best: int = 0) -> None:
        self._directory = directory
        self._keep, self._keep_best = keep, keep_best
        self.broken: list[Broken] = []

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, ascending."""
        return sorted(int(path.name.removeprefix("step_")) for path in self._named(r"step_\d+"))

    def path(self, step: int) -> Path:
        """Return the directory of the checkpoint of a step."""
        return self._directory / f"step_{step}"

    def fault(self, step: int) -> str | None:
        """Describe the damage of a checkpoint in a sentence; None if it is complete."""
        return _fault(self.path(step))

    async def save(self, step: int, state: dict[str, Any], write: Callable[[Path], Awaitable[None]]) -> Path:
        """Call `begin`, `write` (which fills the directory) and `finish`; after an error, call `abandon`."""
        try:
            await write(self.begin(step))
            return self.finish(step, state)
        except BaseException:
            self.abandon(step)
            raise

    def begin(self, step: int) -> Path:
        """Make a new directory for the checkpoint of a step, to be filled; only one at a time.

        Raises OSError (ENOSPC) when the free disk space is smaller than the newest checkpoint.
        """
        self.abandon(step)
        self._require_space()

        partial = self._partial(step)
        partial.mkdir(parents=True)
        return partial

    def finish(self, step: int, state: dict[str, Any]) -> Path:
        """Add `state.json` to the filled directory, rename it to its final name, prune the others."""
        final, partial = self.path(step), self._partial(step)
        _seal(partial, {"step": step, **state})

        # A step is written again only when its checkpoint could not be loaded.
        if final.exists():
            self.set_aside(step, "it was written again")

        # With the rename the checkpoint appears complete or not at all.
        partial.rename(final)
        _to_disk(self._directory)
        self._prune()
        return final

    def abandon(self, step: int) -> None:
        """Remove a checkpoint that was begun; earlier checkpoints remain."""
        shutil.rmtree(self._partial(step), ignore_errors=True)

    def newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest complete checkpoint and its state; None if there is none.

        Leftovers of a crash are removed, and newer checkpoints that are broken are renamed (`broken`).
        Raises ValueError when there are checkpoints but none is complete; then no file is moved.
        """
        for leftover in self._named(r"step_\d+\.(tmp|old)"):
            shutil.rmtree(leftover)

        checkpoint = self.before(None)
        if checkpoint is None and (steps := self.steps()):
            raise ValueError(
                f"none of the checkpoints in {self._directory} is complete (step {steps[-1]}: "
                f"{_fault(self.path(steps[-1]))}). Bring one back, or remove them to start from step 0."
            )
        return checkpoint

    def before(self, step: int | None) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest complete checkpoint before `step` (None: any step); rename newer broken ones."""
        passed: list[Broken] = []
        for older in reversed([s for s in self.steps() if step is None or s < step]):
            reason = _fault(self.path(older))
            if reason is None:
                for fault in passed:
                    self.set_aside(fault.step, fault.reason)
                state = json.loads((self.path(older) / STATE).read_text())
                del state["files"]
                return self.path(older), state
            passed.append(Broken(step=older, reason=reason))

        return None

    def set_aside(self, step: int, reason: str) -> None:
        """Rename a checkpoint that cannot be loaded to step_N.corrupt."""
        aside = self._directory / f"step_{step}.corrupt"
        shutil.rmtree(aside, ignore_errors=True)
        self.path(step).rename(aside)
        self.broken.append(Broken(step=step, reason=reason))

    def _named(self, pattern: str) -> list[Path]:
        """Return the directories whose full name matches; files and other folders are ignored."""
        return [p for p in self._directory.glob("step_*") if re.fullmatch(pattern, p.name) and p.is_dir()]

    def _partial(self, step: int) -> Path:
        return self._directory / f"step_{step}.tmp"

    def _require_space(self) -> None:
        """Refuse a save for which there is no space: a rank with a full disk would block all others."""
        if not (steps := self.steps()):
            return

        taken = sum(file.stat().st_size for file in _files(self.path(steps[-1])))
        free = shutil.disk_usage(self._directory).free
        if free < taken:
            message = f"{free >> 20} MiB are free and the last checkpoint took {taken >> 20}"
            raise OSError(errno.ENOSPC, message, str(self._directory))

    def _prune(self) -> None:
        """Remove all checkpoints except the newest and the best."""
        steps = self.steps()
        scores = {step: score for step in steps if (score := self._score(step)) is not None}

        # Of equal scores, the newer checkpoint is retained.
        best = sorted(scores, key=lambda step: (scores[step], step))[max(0, len(scores) - self._keep_best) :]

        # Rename first, so that a crash during the removal leaves no incomplete step_N.
        for step in set(steps[: -self._keep]) - set(best):
            removed = self._directory / f"step_{step}.old"
            self.path(step).rename(removed)
            shutil.rmtree(removed)

    def _score(self, step: int) -> float | None:
        try:
            return json.loads((self.path(step) / STATE).read_text()).get(SCORE)
        except (OSError, ValueError):
            # A broken checkpoint has no score; loading it would report the damage.
            return None


def _seal(directory: Path, state: dict[str, Any]) -> None:
    """Flush every file to the disk, then write their sizes and checksums into state.json."""
    held = {}
    for file in _files(directory):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        held[str(file.relative_to(directory))] = [file.stat().st_size, file_sum(file)]
        _to_disk(file.parent)

    with (directory / STATE).open("w") as file:
        json.dump(state | {"files": held}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())

    _to_disk(directory)


def _fault(directory: Path) -> str | None:
    """Return the first difference between a checkpoint and its state.json; None if there is none."""
    try:
        held = json.loads((directory / STATE).read_text())["files"]
        for name, (size, checksum) in held.items():
            file = directory / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes instead of {size}"
            if checksum not in (file_sum(file), edge_sum(file)):
                return f"{name} has other bytes than were written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{STATE} cannot be read ({type(error).__name__}: {error})"

    return None


def _files(directory: Path) -> list[Path]:
    return sorted(p for p in directory.rglob("*") if p.is_file())


def edge_sum(file: Path) -> int:
    """Return the CRC-32 of the first and last 4 MiB, which early runs recorded instead of the full sum."""
    edge = 4 * 2**20
    with file.open("rb") as opened:
        start = zlib.crc32(opened.read(edge))
        opened.seek(max(edge, file.stat().st_size - edge))
        return zlib.crc32(opened.read(), start)


def file_sum(file: Path) -> int:
    """Return the CRC-32 of all bytes of a file."""
    total = 0
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            total = zlib.crc32(chunk, total)
    return total


def _to_disk(directory: Path) -> None:
    """Flush a directory to the disk; until then, a crash may lose new names in it."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
