"""One attempt at a question with tools: the model calls tools until it writes a turn without a call.

Owns the protocol. After a turn with calls, the observation has one line with the result of each call; a
malformed or rejected call gives `error: ...`. The first turn without a call is the answer. Its reward is 1.0
if it is right, else 0.0. Works with any tools (see `schema.Tool`), so a user's suite can use it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from rlpipe.config.env import EnvConfig, ToolSchema
from rlpipe.envs.base import StepResult
from rlpipe.envs.sandbox import Sandbox
from rlpipe.envs.swe.episode import shorten
from rlpipe.envs.tools.parsers import INSTRUCTIONS, MalformedCall, parse_turn
from rlpipe.envs.tools.schema import Tool, ToolError, call_tool

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
SYSTEM_PROMPT = """\
Answer the question with the help of these tools, one JSON schema each:

{schemas}

To call a tool, {how}. You then get its result. When you know the answer, write it alone.
"""


def final_answer(text: str) -> str:
    """Return the last line of an answer without reasoning block, label and full stop.

    >>> final_answer("<think>3 times 4</think>\\nAnswer: 12.")
    '12'
    """
    lines = text.rpartition("</think>")[2].strip().splitlines()
    last = lines[-1].strip() if lines else ""

    label, colon, remaining = last.partition(":")
    if colon and label.strip().lower() in ("answer", "the answer is", "final answer"):
        last = remaining

    return last.strip().rstrip(".").lower()


def same_answer(answer: str, expected: str) -> bool:
    """Return whether two answers are equal, compared as numbers if both are numbers, else as texts.

    >>> same_answer("12.0", "12"), same_answer("1e9999999", "12"), same_answer("twelve", "12")
    (True, False, False)
    >>> same_answer("1_2", "12"), same_answer("\u0661\u0662", "12")
    (False, False)
    """
    if not (_NUMBER.fullmatch(answer) and _NUMBER.fullmatch(expected)):
        return answer == expected.lower()

    try:
        return Decimal(answer) == Decimal(expected)
    except InvalidOperation:  # an exponent that Decimal does not support
        return answer == expected.lower()


def opening(question: str, config: EnvConfig, schemas: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the opening chat messages; with `schema=system`, the system message describes the tools."""
    system = config.system_prompt
    if config.tools.schema is ToolSchema.SYSTEM:
        described = "\n".join(json.dumps(schema) for schema in schemas)
        prompt = SYSTEM_PROMPT.format(schemas=described, how=INSTRUCTIONS[config.tools.parser])
        system = f"{system}\n\n{prompt}" if system else prompt

    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": question}]


class ToolEpisode:
    """One attempt at a task; implements `rlpipe.envs.base.Episode`.

    score: function that returns the reward of a final answer. extra: values to add to the trajectory's info.
    """

    def __init__(
        self,
        *,
        question: str,
        tools: Sequence[Tool],
        score: Callable[[str], float],
        config: EnvConfig,
        sandbox: Sandbox | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self._question, self._tools, self._score = question, tools, score
        self._config, self._sandbox, self._extra = config, sandbox, extra or {}
        self._calls = self._refused = self._malformed = 0

    def messages(self) -> list[dict[str, str]]:
        """Return the system prompt, if any, and the question."""
        return opening(self._question, self._config, [tool.schema() for tool in self._tools])

    def step(self, action: str) -> StepResult:
        """Run the calls of a turn; if there are none, score the turn as the answer.

        Raises InfrastructureError if the sandbox fails.
        """
        settings = self._config.tools
        try:
            turn = parse_turn(action, settings.parser)
        except MalformedCall as error:
            self._malformed += 1
            return StepResult(observation=self._shown([f"error: {error}"]))

        # A turn without calls is the final answer.
        if not turn.calls:
            answer = final_answer(turn.content)
            return self._end(self._score(answer), submitted=True, answer=answer[:200])

        results = []
        for call in turn.calls[: settings.max_calls]:
            self._calls += 1
            try:
                results.append(call_tool(self._tools, call))
            except ToolError as error:
                self._refused += 1
                results.append(f"error: {error}")

        if len(turn.calls) > settings.max_calls:
            results.append(f"error: at most {settings.max_calls} calls a turn, the others were not made")

        return StepResult(observation=self._shown(results))

    def finish(self) -> StepResult:
        """End without an answer (turns or context used up), for reward 0."""
        return self._end(0.0, submitted=False)

    def close(self) -> None:
        """Free the sandbox."""
        if self._sandbox is not None:
            self._sandbox.close()

    def _shown(self, results: Sequence[str]) -> str:
        return shorten("\n".join(results), self._config.max_observation_chars)

    def _end(self, reward: float, **info: object) -> StepResult:
        counts = {"tool_calls": self._calls, "tool_errors": self._refused, "format_errors": self._malformed}
        return StepResult(done=True, reward=reward, info=info | counts | self._extra)
