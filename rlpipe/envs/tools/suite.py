"""All tool-use instances of a run. Splits: `train`, `held_instances` and `held_families`.

Held-out indices start at 0 for every seed of the run, and training indices at (1 + seed) million. The indices
that trained the shipped model (recipes/agent_rl) start at a billion. Families in `held_families` are never
trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from rlpipe.config.env import INDEX_STRIDE, EnvConfig, SandboxBackend, ToolName
from rlpipe.envs.base import TRAIN, SplitTable
from rlpipe.envs.sandbox import Sandbox, check_sandbox, make_tree_runner
from rlpipe.envs.tools.episode import ToolEpisode, same_answer
from rlpipe.envs.tools.generate import HELD_OUT_FAMILIES, TRAIN_FAMILIES, make_instance
from rlpipe.envs.tools.library import files, make_tools


def check_tools(config: EnvConfig) -> None:
    """Raise ValueError if a tool needs a sandbox and the configured one has the wrong kind or cannot run."""
    if ToolName.PYTHON not in config.tools.names:
        return
    if config.sandbox.backend is not SandboxBackend.BUBBLEWRAP:
        raise ValueError(
            f"env.tools.names has python, which runs under bubblewrap, not env.sandbox.backend="
            f"{config.sandbox.backend}: set it to bubblewrap, or leave python out."
        )

    check_sandbox(config.sandbox)


class ToolSuite(SplitTable):
    """A suite of tool-use tasks. tools: OpenAI schemas for the chat template; None with schema=system."""

    def __init__(self, config: EnvConfig, seed: int) -> None:
        settings = config.tools
        self._config = config
        self.max_turns = config.max_turns
        self._runner = make_tree_runner(config.sandbox) if ToolName.PYTHON in settings.names else None

        # Making the schemas needs neither documents nor a sandbox.
        described = [tool.schema() for tool in make_tools(settings.names, {}, None)]
        self.tools: list[dict[str, Any]] | None = described if settings.in_template else None

        if not settings.families or set(settings.families) - set(TRAIN_FAMILIES):
            raise ValueError(
                f"env.tools.families={settings.families} must be one or more of {', '.join(TRAIN_FAMILIES)}."
            )

        first = (1 + seed) * INDEX_STRIDE
        super().__init__(
            {
                TRAIN: ids(settings.families, range(first, first + settings.train_size)),
                "held_instances": ids(settings.families, range(settings.held_out_size)),
                "held_families": ids(HELD_OUT_FAMILIES, range(settings.held_out_size)),
            }
        )

    def episode(self, instance_id: str) -> ToolEpisode:
        """Start a new attempt at an instance."""
        instance = make_instance(instance_id)
        sandbox = self._sandbox(files(instance))
        return ToolEpisode(
            question=instance.question,
            tools=make_tools(self._config.tools.names, instance.documents, sandbox),
            score=partial(_score, instance.answer),
            config=self._config,
            sandbox=sandbox,
            extra={"family": instance.family},
        )

    def _sandbox(self, contents: dict[str, str]) -> Sandbox | None:
        if self._runner is None:
            return None

        from rlpipe.envs.sandbox.local import TreeSandbox
        from rlpipe.envs.sandbox.tree import tree_of

        return TreeSandbox(self._runner, tree_of(contents))

    def sandbox_counts(self) -> tuple[int, int]:
        """Return (reused outcomes, all outcomes) as numbers since the start; zeros without a cache."""
        return self._runner.counts if self._runner else (0, 0)


def ids(families: Sequence[str] | dict[str, Any], indices: range) -> list[str]:
    """Return the first len(indices) ids, alternating between the families.

    >>> ids(["sum", "value"], range(3))
    ['sum:0', 'value:0', 'sum:1']
    """
    names = list(families)
    return [f"{names[i % len(names)]}:{indices.start + i // len(names)}" for i in range(len(indices))]


def _score(expected: str, answer: str) -> float:
    return float(same_answer(answer, expected))
