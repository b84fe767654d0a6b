"""Sandboxes over trees of files on this machine: a tree in, a tree out, with remembered outcomes.

Owns the memo and the sandbox that an episode holds. A command is treated as a pure function of (command,
tree); where it is not (`date`, `$RANDOM`), its first outcome is reused for all. Commands that exceeded a
limit are run again, since that may have been the machine's load.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from rlpipe.config.env import SandboxConfig
from rlpipe.envs.sandbox.base import CommandResult
from rlpipe.envs.sandbox.bubblewrap import execute
from rlpipe.envs.sandbox.tree import File, Tree, fingerprint

_OVERHEAD = 1024  # bytes a remembered outcome takes in addition to its contents, roughly
_MEMO_BYTES = 256 << 20  # for remembered outcomes; the least recently used ones leave first


class Memo:
    """A least-recently-used map bounded by bytes, with counts; safe for threads. hits <= lookups."""

    def __init__(self, max_bytes: int) -> None:
        self._free_bytes = max_bytes
        self._values: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = self.lookups = 0

    def get(self, key: Hashable) -> Any | None:
        """Return the value remembered for a key, or None."""
        with self._lock:
            self.lookups += 1
            if key not in self._values:
                return None

            self.hits += 1
            self._values.move_to_end(key)
            return self._values[key][1]

    def put(self, key: Hashable, value: object, size: int) -> None:
        """Remember a value of `size` bytes; least recently used values are dropped to make room."""
        with self._lock:
            self._free_bytes += self._values.pop(key, (0, None))[0] - size
            self._values[key] = (size, value)
            while self._free_bytes < 0:
                self._free_bytes += self._values.popitem(last=False)[1][0]


class TreeRunner:
    """Runs commands on trees; one for all episodes of a suite.

    >>> from rlpipe.envs.sandbox.tree import tree_of
    >>> runner = TreeRunner(SandboxConfig())
    >>> result, tree = runner.run(tree_of({"a": "1"}), "cat a; echo 2 > b")
    >>> result.output, sorted(tree)
    ('1', ['a', 'b'])
    """

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.memo = Memo(_MEMO_BYTES) if config.memo else None

    @property
    def counts(self) -> tuple[int, int]:
        """(outcomes that were reused, outcomes in all) since the start; zeros without a memo."""
        return (self.memo.hits, self.memo.lookups) if self.memo else (0, 0)

    def run(
        self, tree: Tree, command: str, *, timeout_s: float | None = None, stdin: bytes = b""
    ) -> tuple[CommandResult, Tree]:
        """Return the result of a command and the tree it leaves; a run with stdin is never remembered.

        Raises InfrastructureError when the sandbox failed.
        """
        memo = None if stdin else self.memo
        key = (command, timeout_s, fingerprint(tree)) if memo else None
        if memo and (known := memo.get(key)) is not None:
            return known

        timeout_s = self.config.timeout_s if timeout_s is None else timeout_s
        result, left = execute(self.config, tree, command, timeout_s=timeout_s, stdin=stdin)

        # Entries that did not change are shared with the old tree, so that a remembered tree costs little.
        left = {path: old if (old := tree.get(path)) == new else new for path, new in left.items()}

        if memo and result.exceeded is None:
            remembered = CommandResult(output=result.output, exit_code=result.exit_code)
            memo.put(key, (remembered, left), _OVERHEAD + len(result.output) + _size(left))

        return result, left


def _size(tree: Tree) -> int:
    return sum(len(entry.content) for entry in tree.values() if isinstance(entry, File))


class TreeSandbox:
    """A `Sandbox` whose work tree is a value: `tree` is what the next command starts from."""

    def __init__(self, runner: TreeRunner, tree: Tree) -> None:
        self._runner = runner
        self.tree = tree

    def run(self, command: str, *, timeout_s: float | None = None, stdin: bytes = b"") -> CommandResult:
        """Run a command and keep the tree it leaves."""
        result, self.tree = self._runner.run(self.tree, command, timeout_s=timeout_s, stdin=stdin)
        return result

    def close(self) -> None:
        """Do nothing: a tree needs no resources between commands."""
