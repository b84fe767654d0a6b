"""Checks before a run that the chat template can render an environment's messages.

It is used by `rlpipe.envs.rehearsal`, which has no chat template of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpipe.config.user_code import described
from rlpipe.rollout.chat import ChatFormat, Message, Tools


class PromptCheck:
    """Renders messages in the same way as a rollout.

    max_context: limit of a trajectory in tokens. template: `model.chat_template`, named in error messages;
    empty for the model's own.
    """

    def __init__(
        self, path: str | Path, max_context: int, tools: Tools | None = None, *, template: str = ""
    ) -> None:
        self.max_context = max_context
        self._tools = tools
        self._template = f"chat template {template!r}" if template else f"chat template of {str(path)!r}"
        self._chat = ChatFormat.from_pretrained(path)

    def opening(self, messages: list[Message]) -> int:
        """Return the number of tokens of opening messages. Raises ValueError if the template refuses them."""
        from jinja2.exceptions import TemplateError

        try:
            return len(self._chat.initial(messages, self._tools))
        except TemplateError as error:
            roles = [message["role"] for message in messages]
            raise ValueError(
                f"messages() has the roles {roles}, which the {self._template} refuses "
                f"({described(error)}): use roles that it takes, or another order; a system prompt can begin "
                "the user's message."
            ) from None

    def observation(self, observation: str | Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError when the template refuses an observation."""
        from jinja2.exceptions import TemplateError

        try:
            self._chat.continuation(self._chat.observation(observation), [])
        except TemplateError as error:
            raise ValueError(
                f"step() returned an observation that the {self._template} refuses "
                f"({described(error)}): give a text, or one message."
            ) from None
