"""Sandboxes on trees of files on this machine: a command maps a tree to a new tree, and outcomes are cached.

Owns the cache and the sandbox of an episode. A command is treated as a pure function of (command, tree); if
it is not one (`date`, `$RANDOM`), its first outcome is still reused. Outcomes of commands that exceeded a
limit are not cached, since the load of the machine may have been the cause.
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

_OVERHEAD = 1024  # approximate bytes of a cached outcome in addition to its contents
_MEMO_BYTES = 256 << 20  # size of the cache of outcomes; the least recently used ones are dropped first


class Memo:
    """A thread-safe LRU cache limited by bytes. Counts `hits` and `lookups`; hits <= lookups."""

    def __init__(self, max_bytes: int) -> None:
        self._free_bytes = max_bytes
        self._values: OrderedDict[Hashable, tuple[int, Any]] = OrderedDict()
        self._lock = threading.Lock()
        self.hits = self.lookups = 0

    def get(self, key: Hashable) -> Any | None:
        """Return the cached value of a key, or None."""
        with self._lock:
            self.lookups += 1
            if key not in self._values:
                return None

            self.hits += 1
            self._values.move_to_end(key)
            return self._values[key][1]

    def put(self, key: Hashable, value: object, size: int) -> None:
        """Cache a value of `size` bytes; drop the least recently used values to make room."""
        with self._lock:
            self._free_bytes += self._values.pop(key, (0, None))[0] - size
            self._values[key] = (size, value)
            while self._free_bytes < 0:
                self._free_bytes += self._values.popitem(last=False)[1][0]


class TreeRunner:
    """Runs commands on trees; all episodes of a suite share one runner.

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
        """Return (reused outcomes, all outcomes) as numbers since the start; zeros without a cache."""
        return (self.memo.hits, self.memo.lookups) if self.memo else (0, 0)

    def run(
        self, tree: Tree, command: str, *, timeout_s: float | None = None, stdin: bytes = b""
    ) -> tuple[CommandResult, Tree]:
        """Return the result of a command and the resulting tree; a run with stdin is never cached.

        Raises InfrastructureError if the sandbox fails.
        """
        memo = None if stdin else self.memo
        key = (command, timeout_s, fingerprint(tree)) if memo else None
        if memo and (known := memo.get(key)) is not None:
            return known

        timeout_s = self.config.timeout_s if timeout_s is None else timeout_s
        result, left = execute(self.config, tree, command, timeout_s=timeout_s, stdin=stdin)

        # Share unchanged entries with the old tree, so that a cached tree needs little memory.
        left = {path: old if (old := tree.get(path)) == new else new for path, new in left.items()}

        if memo and result.exceeded is None:
            remembered = CommandResult(output=result.output, exit_code=result.exit_code)
            memo.put(key, (remembered, left), _OVERHEAD + len(result.output) + _size(left))

        return result, left


def _size(tree: Tree) -> int:
    return sum(len(entry.content) for entry in tree.values() if isinstance(entry, File))


class TreeSandbox:
    """A `Sandbox` whose work tree is a value: the next command starts from `tree`."""

    def __init__(self, runner: TreeRunner, tree: Tree) -> None:
        self._runner = runner
        self.tree = tree

    def run(self, command: str, *, timeout_s: float | None = None, stdin: bytes = b"") -> CommandResult:
        """Run a command; the next command starts from the resulting tree."""
        result, self.tree = self._runner.run(self.tree, command, timeout_s=timeout_s, stdin=stdin)
        return result

    def close(self) -> None:
        """Do nothing: a tree needs no resources between commands."""
