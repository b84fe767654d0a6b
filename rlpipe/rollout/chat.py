"""Chat messages to token ids and back, for any Hugging Face chat template.

Owns the tokens between sampled turns. Sampled tokens are never decoded and encoded again. To get the tokens
after a turn, a conversation with a marker as the assistant's text is rendered, and the part after the marker
is encoded. Text from outside (tool output) can never become a special token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKER = "assistant-turn-marker"
_BEFORE = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _MARKER}]
Message = dict[str, str]
Tools = Sequence[dict[str, Any]]


def read_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a checkpoint directory.

    transformers selects a class by the model's type. It warns at each load of an unknown type, such as mimo,
    and then uses a config without a type. Here such a config is passed from the start.
    """
    from transformers import AutoTokenizer, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    file = Path(path) / "config.json"
    model = json.loads(file.read_text()) if file.is_file() else {}
    if not model or model.get("model_type") in CONFIG_MAPPING:
        return AutoTokenizer.from_pretrained(path)
    return AutoTokenizer.from_pretrained(path, config=PreTrainedConfig())


class ChatFormat:
    """The chat template of one tokenizer.

    stop_token_ids: tokens that end a turn (the template's, the tokenizer's, and `stop_token_ids`).
    observation_role: "tool" where the template knows it, else "user".
    Raises ValueError when the tokenizer has no chat template, or the template omits assistant turns.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Iterable[int] = ()) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template: use an instruction-tuned "
                "checkpoint, or add chat_template.jinja to its directory."
            )

        self._tokenizer = tokenizer
        self._token_texts: dict[int, str] = {}
        # Longest first, so that a token that contains a shorter one is broken up before it.
        self._special = sorted(
            {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
            | set(tokenizer.all_special_tokens),
            key=len,
            reverse=True,
        )

        # A turn ends with the first special token after an assistant's text, or with the end of text.
        special_ids = [tokenizer.convert_tokens_to_ids(token) for token in self._special]
        closing = self._encode(self._after_turn([], generate=False))
        ends = [token for token in closing if token in special_ids][:1]
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        stops: list[Any] = [*ends, *eos, *stop_token_ids]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))
        self._closing_length = len(closing)
        self._roles: dict[str, bool] = {}
        self.observation_role = "tool" if self._follows_a_turn("tool") else "user"

    @cached_property
    def vocab(self) -> int:
        """All token ids of the tokenizer are below this number."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ChatFormat:
        """Read a checkpoint directory's tokenizer, and further stop tokens from its generation_config."""
        file = Path(path) / "generation_config.json"
        eos = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        stops = [] if eos is None else eos if isinstance(eos, list) else [eos]
        return cls(read_tokenizer(path), stops)

    def initial(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """Return the prompt of a first turn, including the generation prompt. tools: see `check_tools`."""
        return self._encode(self._render(messages, generate=True, tools=tools))

    def harmless(self, value: object) -> Any:
        """Copy JSON values and break up the special tokens in their texts, so that they stay plain text."""
        if isinstance(value, str):
            return self._defuse(value)
        if isinstance(value, Mapping):
            return {key: self.harmless(each) for key, each in value.items()}
        return [self.harmless(each) for each in value] if isinstance(value, (list, tuple)) else value

    def rendered(self, messages: Sequence[Mapping[str, Any]], tools: Tools | None = None) -> str:
        """Return a conversation as the template writes it, including the generation prompt.

        A special token spelled out in a message would be recognised as one: call `harmless` first.
        """
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=True,
        )
        assert isinstance(text, str)  # tokenize=False
        return text

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a rendered text, with special tokens recognised."""
        return self._encode(text)

    def following(self, text: str, *, before: str, last_id: int) -> list[int] | None:
        """Return the tokens that extend a sampled turn to the tokens of a longer rendered text.

        text: the full conversation, from `rendered`. before: the text of all tokens up to the end of the
        turn, without its stop token. last_id: the turn's last token. Returns None if the template now writes
        the earlier text differently or ends the turn with another token, or if the tokens of the new text
        would not decode to this text after last_id.
        """
        if not text.startswith(before):
            return None
        rest = text[len(before) :]
        ids = self._encode(rest)
        if last_id in self.stop_token_ids:
            if ids[:1] != [last_id]:
                return None
            ids, rest = ids[1:], rest.removeprefix(self._text([last_id]))

        # Some tokenizers put a space at the beginning of a text.
        return ids if ids and self._text([last_id, *ids]) == self._text([last_id]) + rest else None

    def check_tools(self, tools: Tools) -> None:
        """Raise ValueError when the template omits a tool. tools: OpenAI schemas."""
        rendered = self._render([{"role": "user", "content": "question"}], generate=True, tools=tools)
        if missing := [t["function"]["name"] for t in tools if t["function"]["name"] not in rendered]:
            raise ValueError(
                f"the chat template of {self._tokenizer.name_or_path!r} does not show the tools {missing}: "
                "set env.tools.schema=system, or use a model whose template takes `tools`."
            )

    def continuation(self, messages: Sequence[Message], turn_ids: Sequence[int]) -> list[int]:
        """Return the tokens after a sampled turn, up to and including the next generation prompt.

        messages: the environment's answer. turn_ids: the sampled turn. If it does not end with a stop token,
        the result begins with the tokens that close the turn; else it begins after the stop token.
        """
        ids = self._encode(self._after_turn(messages, generate=True))
        if turn_ids and turn_ids[-1] in self.stop_token_ids:
            for index, token in enumerate(ids[: self._closing_length]):
                if token in self.stop_token_ids:
                    return ids[index + 1 :]
        return ids

    def observation(self, answer: str | Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return an environment's answer as messages that the template renders.

        A plain text and a message of role "tool" get `observation_role`. Raises ValueError for another role
        if the template refuses or omits it.
        """
        if isinstance(answer, str):
            return [{"role": self.observation_role, "content": answer}]

        messages = []
        for message in answer:
            role = self.observation_role if message["role"] == "tool" else message["role"]
            if not self._follows_a_turn(role):
                raise ValueError(
                    f"the chat template of {self._tokenizer.name_or_path!r} renders no message of the role "
                    f"{role!r} after an assistant's: use the role user or tool in observations."
                )
            messages.append({**message, "role": role})
        return messages

    def decode(self, turn_ids: Sequence[int]) -> str:
        """Return the text of a sampled turn, without its stop token."""
        ids = list(turn_ids)
        if ids and ids[-1] in self.stop_token_ids:
            ids.pop()
        return self._text(ids)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Decode each token separately; parts of a character become the replacement character."""
        for token in set(ids) - self._token_texts.keys():
            self._token_texts[token] = self._text([token])
        return [self._token_texts[token] for token in ids]

    def _text(self, ids: list[int]) -> str:
        """Decode ids; special tokens stay visible."""
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # a list is returned only for a batch
        return text

    def _after_turn(self, messages: Sequence[Message], *, generate: bool) -> str:
        """Return the template's text between an assistant's text and the end of the `messages` after it."""
        text = self._render([*_BEFORE, *messages], generate=generate)
        if _MARKER not in text:
            raise ValueError("the chat template does not render assistant turns: it cannot be used here.")
        return text.split(_MARKER, 1)[1]

    def _render(self, messages: Sequence[Message], *, generate: bool, tools: Tools | None = None) -> str:
        """Render messages with the chat template, with special tokens in their texts made harmless."""
        harmless = [
            {key: self._defuse(value) if isinstance(value, str) else value for key, value in message.items()}
            for message in messages
        ]
        text = self._tokenizer.apply_chat_template(
            harmless, tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=generate
        )
        assert isinstance(text, str)  # tokenize=False
        return text

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _defuse(self, text: str) -> str:
        """Break up every special token spelled out in a text, so that it stays plain text."""
        for token in self._special:
            if token in text:
                text = text.replace(token, f"{token[:1]} {token[1:]}")
        return text

    def _follows_a_turn(self, role: str) -> bool:
        """Return whether the template renders a message of a role after an assistant's message."""
        from jinja2.exceptions import TemplateError

        if role not in self._roles:
            marker = f"{role}-marker"
            try:
                text = self._after_turn([{"role": role, "content": marker}], generate=True)
            except TemplateError:  # how templates refuse a role
                text = ""
            self._roles[role] = marker in text
        return self._roles[role]
