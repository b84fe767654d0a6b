"""The environment Protocol: a suite lists instances, an episode is one attempt at one of them.

Owns the contract between collector and environments. An `Episode` is one attempt at one instance;
its methods may block (they run a sandbox), so the collector calls them in threads.
Infrastructure failures raise `InfrastructureError`; they are never a reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

TRAIN = "train"  # the split that runs train on


class InfrastructureError(RuntimeError):
    """The environment, not the model, failed: the trajectory is retried, then masked."""


@dataclass(slots=True, kw_only=True)
class StepResult:
    """Outcome of one action.

    observation: text shown to the model next (empty when done).
    done: the episode is over and `reward` is set.
    info: metadata to record in the trajectory.
    """

    observation: str = ""
    done: bool = False
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)


class Episode(Protocol):
    """One attempt."""

    def messages(self) -> list[dict[str, str]]:
        """Return the opening chat messages, [{'role': ..., 'content': ...}, ...]."""
        ...

    def step(self, action: str) -> StepResult:
        """Act on the text that the model wrote this turn (may block on a sandbox).

        A turn that `rollout.max_new_tokens` cut off comes here as well, with the text up to there.
        Raises InfrastructureError when the sandbox failed."""
        ...

    def finish(self) -> StepResult:
        """End without a submission (out of turns or context); done=True with the reward."""
        ...

    def close(self) -> None:
        """Free the sandbox and its files."""
        ...


class Suite(Protocol):
    """A set of instances by split. Splits: 'train' and any number of held-out sets.

    A suite may have an attribute `tools`: OpenAI schemas of tools that the chat template shows.
    """

    max_turns: int

    def splits(self) -> Sequence[str]:
        """Return the names of the held-out sets, the primary one first."""
        ...

    def instance_ids(self, split: str) -> Sequence[str]:
        """Return the ids of a split, in a fixed order."""
        ...

    def episode(self, instance_id: str) -> Episode:
        """Start a fresh attempt at an instance."""
        ...


@runtime_checkable
class CountsSandbox(Protocol):
    """A suite that reuses outcomes of its sandbox and counts them; implementing it is optional."""

    def sandbox_counts(self) -> tuple[int, int]:
        """Return (outcomes that were reused, outcomes in all) since the start."""
        ...


class SplitTable:
    """The splits of a suite, from a table of ids by split: `train`, then the held-out sets."""

    def __init__(self, ids: Mapping[str, Sequence[str]]) -> None:
        self._ids = ids

    def splits(self) -> Sequence[str]:
        """Return the names of the held-out sets, the primary one first."""
        return [name for name in self._ids if name != TRAIN]

    def instance_ids(self, split: str) -> Sequence[str]:
        """Return the ids of a split, in a fixed order. Raises ValueError for a split that does not exist."""
        if split not in self._ids:
            raise ValueError(f"no split {split!r}; there are {', '.join(self._ids)}.")
        return self._ids[split]


def suite_tools(suite: Suite) -> list[dict[str, Any]] | None:
    """Return the schemas of tools that the chat template displays; None when the suite has none."""
    return getattr(suite, "tools", None) or None


def sandbox_counts(suite: Suite) -> tuple[int, int]:
    """Return (outcomes that were reused, outcomes in all) of a suite's sandbox; zeros when it counts none."""
    return suite.sandbox_counts() if isinstance(suite, CountsSandbox) else (0, 0)
