"""Classifies sampled tokens by the kind of text: tool call, code or prose.

Owns the rule, which needs only the text:

    tool_call   text that an agent's environment executes: text between <tool_call> or <function=...> tags, a
                fenced block with a shell's name, or the full turn if the environment executes all of it
    code        any other fenced block, and the body of a here-document within a tool call
    prose       everything else: reasoning, answers, and the token that ends the turn

Marks (tags, fences) belong to the text that they enclose. An unclosed mark extends to the end of the turn. A
token has the class of its first character.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any


class TokenClass(StrEnum):
    """Kind of text that a token belongs to."""

    TOOL_CALL = "tool_call"
    CODE = "code"
    PROSE = "prose"


_SHELLS = r"(?:bash|sh|shell|console|mswea_bash_command)"
_TOOL = re.compile(
    rf"<tool_call>.*?(?:</tool_call>|\Z)|<function=.*?(?:</function>|\Z)|```{_SHELLS}[ \t]*\n.*?(?:```|\Z)",
    re.DOTALL,
)
_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?[^\n]*\n(.*?)(?:^\s*\1\s*$|\Z)", re.DOTALL | re.MULTILINE)
_SPECIAL = re.compile(r"<\|[^|>\s]*\|>|</s>|<eos>|<end_of_turn>")


def text_classes(text: str, *, plain_commands: bool = False) -> list[TokenClass]:
    """Classify every character of a turn. plain_commands: whether the full turn is a command.

    >>> [c.value for c in text_classes("a```py```")][::4]
    ['prose', 'code', 'code']
    """
    classes = [TokenClass.TOOL_CALL if plain_commands else TokenClass.PROSE] * len(text)
    calls = [(0, len(text))] if plain_commands else [match.span() for match in _TOOL.finditer(text)]
    if not plain_commands:
        for match in _FENCE.finditer(text):
            _mark(classes, match.span(), TokenClass.CODE)
        for span in calls:
            _mark(classes, span, TokenClass.TOOL_CALL)

    # A file that a command writes is code, and the token that ends the turn is prose.
    for start, end in calls:
        for match in _HEREDOC.finditer(text, start, end):
            _mark(classes, match.span(2), TokenClass.CODE)
    for match in _SPECIAL.finditer(text):
        if match.end() == len(text):
            _mark(classes, match.span(), TokenClass.PROSE)
    return classes


def token_classes(record: Mapping[str, Any], *, plain_commands: bool = False) -> list[TokenClass | None]:
    """Classify every token of a recorded rollout (docs/run_directory.md).

    Returns:
        One class per token; None for tokens that were not sampled, and for all tokens of a record without
        `token_texts`.
    """
    texts = record.get("token_texts")
    by_token: list[TokenClass | None] = [None] * len(record["tokens"])
    if texts is None:
        return by_token

    for start, end in sampled_spans(record):
        turn_texts = texts[start:end]
        classes = text_classes("".join(turn_texts), plain_commands=plain_commands)
        offset = 0
        for index, token_text in enumerate(turn_texts, start):
            by_token[index] = classes[min(offset, len(classes) - 1)] if classes else TokenClass.PROSE
            offset += len(token_text)
    return by_token


def sampled_spans(record: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the token span [begin, end) of every generated turn of a record, in order."""
    spans: list[tuple[int, int]] = []
    start = 0
    for version, count in record["policy_versions"]:
        if version >= 0:
            if spans and spans[-1][1] == start:  # the version changed within a turn
                spans[-1] = (spans[-1][0], start + count)
            else:
                spans.append((start, start + count))
        start += count
    return spans


def _mark(classes: list[TokenClass], span: Sequence[int], kind: TokenClass) -> None:
    classes[span[0] : span[1]] = [kind] * (span[1] - span[0])
