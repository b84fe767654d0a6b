"""Reads conversations from a JSONL file, as trajectories to train on and as prompts.

Owns the file format, one {"messages": [{"role": ..., "content": ...}, ...]} per line, and its checks. The
assistant's text counts as sampled: a turn is the tokens of the text, followed by the stop token. All tokens
between turns come from the chat template, as in a rollout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlpipe.envs.base import StepResult
from rlpipe.rollout.chat import ChatFormat, read_tokenizer
from rlpipe.types import FinishReason, GenerateResult, SpecCounts, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
ASSISTANT = "assistant"


def read_conversations(path: str | Path) -> list[list[Message]]:
    """Read the conversations of a file; empty lines are skipped.

    Raises:
        ValueError: if a line cannot be used (the message names file and line), or there is no conversation.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist: name a JSONL file of conversations.")

    lines = enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
    conversations = [_parse(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if not conversations:
        raise ValueError(f"{path} holds no conversation: one JSON object per line is expected.")
    return conversations


class ConversationFormat:
    """Converts conversations to trajectories with the chat template of a checkpoint."""

    def __init__(self, path: str | Path) -> None:
        self._chat = ChatFormat.from_pretrained(path)
        self._tokenizer: PreTrainedTokenizerBase = read_tokenizer(path)

    def trajectory(self, messages: list[Message], name: str, max_context: int) -> Trajectory:
        """Convert one conversation, cut to `max_context` tokens; the trajectory's reward has no meaning."""
        trajectory = Trajectory(trajectory_id=name, group_id=name, instance_id=name, reward=0.0)
        pending: list[Message] = []  # messages since the last assistant turn
        last_turn: list[int] | None = None  # tokens of the last assistant turn
        for message in messages:
            if message["role"] != ASSISTANT:
                pending.append(self._in_template_roles(message))
                continue

            if last_turn is None:
                context = self._chat.initial(pending)
                trajectory.prompt_length = len(context)
            else:
                context = self._chat.continuation(pending, last_turn)
            trajectory.append_context(context)

            last_turn = self._turn(message["content"])
            trajectory.append_sampled(_as_if_generated(name, last_turn))
            pending = []

        trajectory.truncated = len(trajectory.token_ids) > max_context
        for column in Trajectory.COLUMNS:
            setattr(trajectory, column, getattr(trajectory, column)[:max_context].copy())
        return trajectory

    def _turn(self, text: str) -> list[int]:
        """Tokenize the assistant's text; special tokens that are spelled out in it stay plain text."""
        ids = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return [*ids, *self._chat.stop_token_ids[:1]]

    def _in_template_roles(self, message: Message) -> Message:
        """Set the role of tool output to the template's role for it."""
        return message | {"role": self._chat.observation_role} if message["role"] == "tool" else message


class ConversationSuite:
    """A suite (`rlpipe.envs.base.Suite`) of conversations; the model generates the last assistant turn."""

    max_turns = 1

    def __init__(self, path: str | Path) -> None:
        self._split = Path(path).stem
        self._openings: dict[str, list[Message]] = {}
        for number, messages in enumerate(read_conversations(path)):
            last = max(i for i, message in enumerate(messages) if message["role"] == ASSISTANT)
            self._openings[f"{self._split}:{number}"] = messages[:last]

    def splits(self) -> list[str]:
        """Return the name of the file, the only split."""
        return [self._split]

    def instance_ids(self, split: str) -> list[str]:
        """Return an id for each conversation, in the order of the file."""
        return list(self._openings)

    def episode(self, instance_id: str) -> _Answer:
        """Begin an attempt."""
        return _Answer(self._openings[instance_id])


class _Answer:
    """An episode that ends with any answer, without a score."""

    def __init__(self, opening: list[Message]) -> None:
        self._opening = opening

    def messages(self) -> list[Message]:
        return self._opening

    def step(self, action: str) -> StepResult:
        return StepResult(done=True, reward=0.0)

    def finish(self) -> StepResult:
        return StepResult(done=True, reward=0.0)

    def close(self) -> None:
        """Do nothing, as an episode has no resources."""


def _parse(line: str, where: str) -> list[Message]:
    """Return the messages of a line. Raises ValueError with a message that begins with `where`."""
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}): one object per line is expected.") from None

    messages = item.get("messages") if isinstance(item, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f'{where} has no messages: {{"messages": [{{"role": ..., "content": ...}}]}} is expected.'
        )
    for n, message in enumerate(messages):
        if not _is_text(message):
            raise ValueError(
                f"{where}, message {n} is {str(message)[:80]!r}: an object with a role and a content, both "
                "text, is expected."
            )

    roles = [message["role"] for message in messages]
    if ASSISTANT not in roles or roles[0] == ASSISTANT:
        raise ValueError(
            f"{where} has the roles {roles}: an assistant turn after at least one other message is needed."
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _is_text(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))


def _as_if_generated(name: str, ids: list[int]) -> GenerateResult:
    """Return a turn without recorded probabilities, as adaptation computes them with the frozen model."""
    return GenerateResult(
        request_id=name,
        output_ids=np.array(ids),
        logprobs=np.zeros(len(ids)),
        entropies=np.zeros(len(ids)),
        versions=np.zeros(len(ids)),
        finish_reason=FinishReason.STOP,
        spec=SpecCounts(),
    )
