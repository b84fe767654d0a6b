"""One attempt at a SWE instance by a user's program: `env=swe env.agent.run="python my_agent.py"`.

    files of the repository -> the agent, in a separate sandbox until it ends -> changed files -> the tests

The agent runs as in the environment `agent`; the repository is its folder, and the problem statement is its
task. There is no `submit`: the files at the end are graded as `episode` grades a submission.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlpipe.config.env import EnvConfig
from rlpipe.envs.agent.command import SandboxedCommand
from rlpipe.envs.base import AgentAddress, StepResult
from rlpipe.envs.swe.instances import Instance

if TYPE_CHECKING:
    from rlpipe.envs.swe.workspace import CheckoutWorkspace, TreeWorkspace


def agent_of(config: EnvConfig) -> SandboxedCommand | None:
    """Return the agent that `env.agent.run` names, or None if empty. Raises ValueError if it cannot run."""
    if not config.agent.run.strip():
        return None
    if config.agent.is_function:
        raise ValueError(
            f"env.agent.run={config.agent.run!r} is a function, and env=swe takes a command: it runs in a "
            "sandbox with the repository."
        )
    return SandboxedCommand(config, [Path(name).expanduser().resolve() for name in config.instance_files])


class SweAgentEpisode:
    """One attempt of an agent; implements `rlpipe.envs.base.AgentEpisode`."""

    def __init__(
        self, instance: Instance, workspace: TreeWorkspace | CheckoutWorkspace, agent: SandboxedCommand
    ) -> None:
        self._instance, self._workspace, self._agent = instance, workspace, agent

    async def run_agent(self, address: AgentAddress) -> str | None:
        """Run the agent on the repository; return its output."""
        text = self._instance.problem_statement
        task = {
            "id": self._instance.instance_id,
            "prompt": text,
            "messages": [{"role": "user", "content": text}],
            "row": {},
        }
        answer, tree = await self._agent.run_on(self._workspace.tree, address, task)
        self._workspace.replace(tree)
        return answer

    def step(self, action: str) -> StepResult:
        """Grade the repository after the agent's changes. Raises InfrastructureError if the sandbox fails."""
        grade = self._workspace.grade()
        info = {"submitted": True, **grade.info(), **self._instance.labels}
        return StepResult(done=True, reward=float(grade.solved), info=info)

    def close(self) -> None:
        """Delete the repository."""
        self._workspace.close()
