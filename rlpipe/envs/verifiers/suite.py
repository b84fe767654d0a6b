"""Environments of verifiers 0.4 in process: `env=verifiers env.verifiers.taskset=my_tasks.py:MyTaskset`.

    Env.run(task, agents) --turn(message)--> what the model reads --step(action)--> Segment --> ... rewards

The library's `run` is a coroutine that talks to an agent; here the agent is the model in training. With a
plain taskset, the model answers once, after any number of turns with tool calls. The reward is the weighted
sum of the task's rewards; the info has rewards and metrics by name. Harnesses, which call the model
themselves, are rejected (`load`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from rlpipe.config.env import EnvConfig
from rlpipe.envs.base import TRAIN, SplitTable, StepResult
from rlpipe.envs.rehearsal import rehearse
from rlpipe.envs.seeded import require
from rlpipe.envs.verifiers.agent import TheModel
from rlpipe.envs.verifiers.load import load_environment, tasks_by_split
from rlpipe.envs.verifiers.toolsets import schemas_of


def check_verifiers(config: EnvConfig) -> None:
    """Load the environment and rehearse a task of each split. Raises ValueError if it cannot be used."""
    require("verifiers", extra="verifiers")
    suite = VerifiersSuite(config)
    rehearse(suite, config.verifiers.taskset, episodes=1, setting="env.verifiers.taskset")


class VerifiersSuite(SplitTable):
    """A suite of a taskset's tasks, in the same shuffled order for every seed; the first are held out."""

    def __init__(self, config: EnvConfig) -> None:
        self._config, self.max_turns = config, config.max_turns
        self._env = load_environment(config.verifiers)
        splits = tasks_by_split(self._env.taskset, config)
        self._tasks = {name: task for tasks in splits.values() for name, task in tasks.items()}
        super().__init__({split: list(tasks) for split, tasks in splits.items()})

        schemas = schemas_of(self._env.taskset, next(iter(splits[TRAIN].values())))
        self.tools: list[dict[str, Any]] | None = schemas if config.tools.in_template else None

    def episode(self, instance_id: str) -> VerifiersEpisode:
        """Start a new attempt at a task."""
        return VerifiersEpisode(self._config, self._env, self._tasks[instance_id])


class VerifiersEpisode:
    """One call of the environment's `run`."""

    def __init__(self, config: EnvConfig, env: Any, task: Any) -> None:
        self._config, self._env, self._task = config, env, task
        self._agents = TheModel(config, env)
        self._run: asyncio.Task[None] | None = None

    async def messages(self) -> list[dict[str, str]]:
        """Start the environment, and return its first message."""
        self._run = asyncio.create_task(self._env.run(self._task, self._agents))
        if (messages := await self._next()) is None:
            raise ValueError("the environment ended before the model's first turn.")
        return messages

    async def step(self, action: str) -> StepResult:
        """Send the answer to the environment; return its next message, or the score if it ends."""
        await self._agents.answers.put(action)
        messages = await self._next()
        return self._scored(submitted=True) if messages is None else StepResult(observation=messages)

    async def finish(self) -> StepResult:
        """End because turns or context are used up; score the conversation so far."""
        await self._agents.answers.put(None)
        await self._next()
        return self._scored(submitted=False)

    async def close(self) -> None:
        """Stop the environment if it is still waiting for a turn."""
        if self._run:
            self._run.cancel()

    async def _next(self) -> list[dict[str, str]] | None:
        """Return the environment's next message; None if it has ended. Raises the environment's error."""
        assert self._run, "messages() comes first"
        messages = asyncio.create_task(self._agents.messages.get())
        await asyncio.wait({messages, self._run}, return_when=asyncio.FIRST_COMPLETED)
        if messages.done():
            return messages.result()
        messages.cancel()
        if error := self._run.exception():
            raise error.__cause__ or error  # the library wraps errors of a task's code
        return None

    def _scored(self, *, submitted: bool) -> StepResult:
        trace = self._agents.trace
        numbers = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        numbers |= {name: value for name, value in trace.metrics.items() if value is not None}
        return StepResult(done=True, reward=trace.reward, info={**numbers, "submitted": submitted})
