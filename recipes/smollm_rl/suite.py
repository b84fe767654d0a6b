"""Makes the tasks an environment of rlpipe: one turn per episode, and a held-out set for each task.

`env.options`: tasks (to train on and to measure) and only_held_out (to measure only), both lists of names in
`TASKS` or `UNSCORED`; train and held_out (numbers of prompts of each task).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.smollm_rl.prompts import UNSCORED
from recipes.smollm_rl.tasks import TASKS, Data
from rlpipe.config.env import EnvConfig
from rlpipe.envs.base import TRAIN, SplitTable, StepResult

ALL_TASKS = TASKS | UNSCORED


class Attempt:
    """One answer to one prompt."""

    def __init__(self, task: str, prompt: str, data: Data) -> None:
        self._task, self._prompt, self._data = task, prompt, data

    def messages(self) -> list[dict[str, str]]:
        """Return the prompt."""
        return [{"role": "user", "content": self._prompt}]

    def step(self, action: str) -> StepResult:
        """Score the answer."""
        reward = ALL_TASKS[self._task].score(self._data, action)
        return StepResult(done=True, reward=reward, info={"submitted": True})

    def finish(self) -> StepResult:
        """End without an answer."""
        return StepResult(done=True, reward=0.0, info={"submitted": False})

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


class Suite(SplitTable):
    """The suite of all tasks; ids are `task.train.number` and `task.held_out.number`.

    Raises ValueError for a task that does not exist, or for more prompts than a task has.
    """

    max_turns = 1

    def __init__(
        self, tasks: Sequence[str], only_held_out: Sequence[str] = (), *, train: int, held_out: int
    ) -> None:
        for option, names in {"tasks": tasks, "only_held_out": only_held_out}.items():
            unknown = [name for name in names if name not in ALL_TASKS]
            if unknown or not tasks:
                raise ValueError(f"env.options.{option}={list(names)}: choose of {', '.join(ALL_TASKS)}.")

        self._examples: dict[str, tuple[str, str, Data]] = {}
        held_out_ids = {task: self._add(task, held_out, held_out=True) for task in (*tasks, *only_held_out)}
        train_ids = [self._add(task, train, held_out=False) for task in tasks]

        # The tasks take turns, so that the first prompts cover all of them.
        super().__init__(
            {TRAIN: [name for turn in zip(*train_ids, strict=True) for name in turn]} | held_out_ids
        )

    def episode(self, instance_id: str) -> Attempt:
        """Start an attempt."""
        return Attempt(*self._examples[instance_id])

    def _add(self, task: str, count: int, *, held_out: bool) -> list[str]:
        """Make `count` prompts of a task, and return their ids."""
        examples = ALL_TASKS[task].examples(count, held_out=held_out)
        ids = [f"{task}.{'held_out' if held_out else TRAIN}.{number}" for number in range(count)]
        self._examples |= {name: (task, *example) for name, example in zip(ids, examples, strict=True)}
        return ids


def make_suite(config: EnvConfig, seed: int) -> Suite:
    """Make the suite that `env.options` describes; its prompts are the same for every seed."""
    options: Mapping[str, Any] = config.options
    return Suite(
        options.get("tasks", list(TASKS)),
        options.get("only_held_out", []),
        train=options.get("train", 400),
        held_out=options.get("held_out", 100),
    )
