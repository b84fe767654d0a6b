"""Tasks of a data set for an agent, graded by reward functions: `env=agent env.agent.run=my_agent.py:solve`.

    run_agent(address) -> the agent calls the endpoint until it is done -> answer --step--> reward

As in the environment `function`, an instance is a row, and reward functions score the answer. The agent gets
the prompt and the columns of the row, except the columns that the reward reads, so it does not see the right
answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from rlpipe.config.data import weighted_rewards
from rlpipe.config.env import EnvConfig
from rlpipe.envs.agent.program import Program, load_agent
from rlpipe.envs.base import AgentAddress
from rlpipe.envs.function.examples import Example
from rlpipe.envs.function.rewards import Reward
from rlpipe.envs.function.suite import FunctionEpisode, FunctionSuite

_GRADING = ("reward_model", "extra_info")  # columns of verl's layout that hold the right answer


def grading_files(config: EnvConfig) -> list[Path]:
    """Return the files that grade an agent: the data sets and the files with the reward functions."""
    data, reward = config.function.data, config.function.reward
    names = [data.train, data.held_out_name]
    names += [one.name.rpartition(":")[0] for one in weighted_rewards(reward)] if reward else []
    return [path for name in names if name and (path := Path(name).expanduser().resolve()).exists()]


class AgentEpisode(FunctionEpisode):
    """One attempt of an agent; implements `rlpipe.envs.base.AgentEpisode`."""

    def __init__(
        self,
        example: Example,
        rewards: Sequence[Reward],
        *,
        grouped: bool,
        program: Program,
        task: dict[str, Any],
    ) -> None:
        super().__init__(example, rewards, grouped=grouped)
        self._program, self._task = program, task

    def run_agent(self, address: AgentAddress) -> str | Awaitable[str | None] | None:
        """Run the agent on the task; return its answer."""
        return self._program(address, self._task)


class AgentSuite(FunctionSuite):
    """A suite of the rows of a data set. Splits: `train` and `held_out`.

    max_turns: maximum number of turns of the model in one attempt. Raises ValueError for wrong settings.
    """

    def __init__(self, config: EnvConfig) -> None:
        super().__init__(config)
        self.max_turns = config.max_turns
        self._program = load_agent(config, grading_files(config))
        if config.agent.is_function:
            self.notes.append(
                f"env.agent.run={config.agent.run} is a function: it runs with your rights, and could read "
                "what grades it. A command runs in the sandbox."
            )
        self._hidden = {name for reward in self.rewards for name in reward.signature.names} | {*_GRADING}

    def episode(self, instance_id: str) -> AgentEpisode:
        """Start a new attempt at a row."""
        example = self.example(instance_id)
        return AgentEpisode(
            example,
            self.rewards,
            grouped=self._grouped,
            program=self._program,
            task=self._task_of(instance_id, example),
        )

    def _task_of(self, instance_id: str, example: Example) -> dict[str, Any]:
        """Return the data of a row that the agent may see."""
        reader = self._readers[instance_id.partition("/")[0]]
        hidden = (self._hidden | {reader.answer_column}) - {reader.prompt_column}
        # If a reward reads the whole row, any column may hold the answer, so hide all columns.
        if "row" in self._hidden:
            hidden |= example.row.keys()
        return {
            "id": instance_id,
            "prompt": example.text,
            "messages": [dict(message) for message in example.messages],
            "row": {name: value for name, value in example.row.items() if name not in hidden},
        }
