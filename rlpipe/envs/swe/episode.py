"""One attempt at a SWE instance: commands in, observations out, until `submit`.

Owns the protocol with the model: how a turn's text is parsed, what the model sees next, and when it gets a
reward. In `plain` mode the full text is the command; in `fenced` mode the command is the only ```bash block,
as in mini-swe-agent. The reward is 1.0 if the model changed files and submitted, and every required test
passes; else 0.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rlpipe.config.env import ActionMode, EnvConfig
from rlpipe.envs.base import StepResult
from rlpipe.envs.sandbox import CommandResult
from rlpipe.envs.swe.instances import Instance

if TYPE_CHECKING:
    from rlpipe.envs.swe.workspace import Workspace

SUBMIT = "submit"
_SUBMISSIONS = (SUBMIT, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
_LONGEST_COMMAND = 100_000  # maximum bytes; Linux accepts 128 KiB in one argument
_BLOCK = re.compile(r"```(?:bash|mswea_bash_command)[ \t]*\n(.*?)\n?```", re.DOTALL)

FENCED_SYSTEM_PROMPT = """\
You are a software engineer who repairs a repository through a Linux shell.
Each of your turns holds your reasoning and exactly one command, in one block:

```bash
your command here
```

Every command runs in a new shell in the root of the repository; only changes to its files last. There
is no network, and a command ends after a time limit. Change source files only: tests are replaced by
the original ones before your work is judged. When the issue is solved, run this alone:

```bash
submit
```
"""
_FORMAT_ERROR = "Expected exactly one ```bash block with one command, found {count}. Nothing was run."


def opening(instance: Instance, config: EnvConfig) -> list[dict[str, str]]:
    """Return the opening chat messages of an attempt."""
    system = config.system_prompt
    if not system and config.action_mode is ActionMode.FENCED:
        system = FENCED_SYSTEM_PROMPT

    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": instance.problem_statement}]


def parse_action(text: str, mode: ActionMode) -> tuple[str | None, int]:
    """Return (command, number of commands) of a turn's text; the command is None unless there is exactly one.

    >>> parse_action("Look.\\n```bash\\nls\\n```", ActionMode.FENCED)
    ('ls', 1)
    """
    text = text.encode(errors="replace").decode().replace("\0", "")  # a shell accepts no NUL or surrogate
    if mode is ActionMode.PLAIN:
        return text, 1

    blocks = _BLOCK.findall(text)
    return (blocks[0] if len(blocks) == 1 else None), len(blocks)


def observation(result: CommandResult, config: EnvConfig) -> str:
    """Format the outcome of a command for the model."""
    text = result.output.rstrip("\n")
    if result.exceeded:
        text = f"{text}\n{result.exceeded}".lstrip("\n")

    text = shorten(text, config.max_observation_chars)
    if config.action_mode is ActionMode.PLAIN:
        return text

    return f"<returncode>{result.exit_code}</returncode>\n<output>\n{text}\n</output>"


def shorten(text: str, limit: int) -> str:
    """Shorten a text to `limit` characters, half from the start and half from the end, and mark the gap.

    >>> shorten("abcdefgh", 4)
    'ab\\n[4 characters left out]\\ngh'
    """
    if len(text) <= limit:
        return text

    tail = limit // 2
    return f"{text[: limit - tail]}\n[{len(text) - limit} characters left out]\n{text[len(text) - tail :]}"


class SweEpisode:
    """One attempt at a task; implements `rlpipe.envs.base.Episode`."""

    def __init__(self, instance: Instance, workspace: Workspace, config: EnvConfig) -> None:
        self._instance, self._workspace, self._config = instance, workspace, config
        self._format_errors = 0

    def messages(self) -> list[dict[str, str]]:
        """Return the system prompt, if any, and the problem statement."""
        return opening(self._instance, self._config)

    def step(self, action: str) -> StepResult:
        """Run the command in `action`; if the command is `submit`, grade the repository.

        Raises InfrastructureError if the sandbox fails.
        """
        command, number = parse_action(action, self._config.action_mode)
        if command is None:
            self._format_errors += 1
            return StepResult(observation=_FORMAT_ERROR.format(count=number))

        # A submission ends the attempt: the tests decide, not the output of a command.
        if command.strip() in _SUBMISSIONS:
            grade = self._workspace.grade()
            return self._end(float(grade.solved), submitted=True, **grade.info())

        # Reject a command that is too long as a shell would. The sandbox could not start with it.
        if len(command.encode()) > _LONGEST_COMMAND:
            result = CommandResult(output="command too long", exit_code=126)
        else:
            result = self._workspace.run(command)

        return StepResult(observation=observation(result, self._config))

    def finish(self) -> StepResult:
        """End without a submission (turns or context used up), for reward 0."""
        return self._end(0.0, submitted=False)

    def _end(self, reward: float, **info: object) -> StepResult:
        info |= {"format_errors": self._format_errors} | self._instance.labels
        return StepResult(done=True, reward=reward, info=info)

    def close(self) -> None:
        """Delete the repository."""
        self._workspace.close()
