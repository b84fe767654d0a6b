"""Converts a row of a data set to the prompt of an episode and the values for its reward.

Owns the names of columns, the templates and the checks of single rows. It recognises the layouts of two other
libraries: TRL's (`prompt` as text or messages, any other columns) and verl's (`data_source`, `prompt` as
messages, `reward_model.ground_truth`, `extra_info`).
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlpipe.config.data import DataConfig
from rlpipe.config.limits import did_you_mean
from rlpipe.config.paths import resolve
from rlpipe.config.user_code import load_function
from rlpipe.envs.contract import recordable, shown
from rlpipe.envs.function.rows import Row, Rows
from rlpipe.envs.rehearsal import call

PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "messages")
ANSWERS = ("answer", "ground_truth", "solution", "target", "label", "expected")
ROLES = ("system", "user", "assistant", "tool")
Message = dict[str, str]


@dataclass(slots=True, frozen=True, kw_only=True)
class Example:
    """One row, converted for an episode and a reward.

    place: file and line or row number. prompt: the prompt in the data set, text or messages. messages: the
    chat messages that the model reads. answer: the right answer; None if the row has none.
    """

    place: str
    row: Row
    prompt: str | list[Message]
    messages: list[Message]
    answer: Any

    @property
    def text(self) -> str:
        """Return the prompt as one text."""
        return self.prompt if isinstance(self.prompt, str) else "\n".join(m["content"] for m in self.prompt)


class Reader:
    """Converts the rows of one data set to examples. Raises ValueError for columns that do not exist.

    prompt_column: name of the prompt's column; empty if `data.template` makes the prompt. answer_column: name
    of the answer's column; empty if there is none.
    """

    def __init__(self, data: DataConfig, rows: Rows) -> None:
        self._data, self._rows = data, rows
        self._make = _template_function(data.template)
        self._template = "" if self._make else _template_text(data.template)

        self.prompt_column = ""
        if self._template:
            _check_template(self._template, rows)
        elif not self._make:
            self.prompt_column = self._column("prompt", data.prompt, PROMPTS)

        self.answer_column = ""
        if data.answer or not _is_verl(rows):
            self.answer_column = self._column("answer", data.answer, ANSWERS, optional=True)

    @property
    def has_answers(self) -> bool:
        """Return whether rows may have a right answer."""
        return bool(self.answer_column) or _is_verl(self._rows)

    @property
    def columns(self) -> str:
        """Return a text that names the columns of prompts and answers."""
        answers = self.answer_column or ("reward_model.ground_truth" if _is_verl(self._rows) else "none")
        return f"prompt: {self.prompt_column or 'from data.template'}, answer: {answers}"

    def __getitem__(self, index: int) -> Example:
        """Return the example of a row. Raises ValueError with the row's location if it is invalid."""
        row, place = self._rows[index], self._rows.place(index)
        prompt = self._prompt(row, place)

        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._data.system:
            messages = [{"role": "system", "content": self._data.system}, *messages]
        return Example(
            place=place, row=row, prompt=prompt, messages=messages, answer=self._answer(row, place)
        )

    def _column(self, what: str, named: str, usual: tuple[str, ...], *, optional: bool = False) -> str:
        """Return the column that the setting names, else the first usual name; "" if optional and absent.

        Raises ValueError for a column that does not exist.
        """
        columns = self._rows.columns
        if named and named not in columns:
            raise ValueError(
                f"data.{what}={named}: {self._rows.name} has no column "
                f"{named!r}.{did_you_mean(named, columns)} It has {', '.join(columns)}."
            )
        found = named or next((name for name in usual if name in columns), "")
        if not found and not optional:
            raise ValueError(
                f"{self._rows.name} has no column of a usual name ({', '.join(usual)}): it has "
                f"{', '.join(columns)}. Set data.{what}=COLUMN, or data.template='... {{COLUMN}}'."
            )
        return found

    def _prompt(self, row: Row, place: str) -> str | list[Message]:
        """Return the prompt of a row, as text or as messages. Raises ValueError if it is invalid."""
        if self._make:
            where = f"data.template={self._data.template}, {place}"
            return call(where, lambda made: prompt_of("its template returned", made), self._make, dict(row))
        if self._template:
            return prompt_of(f"{place}: the prompt of data.template", _filled(self._template, row, place))

        if self.prompt_column not in row:
            raise ValueError(
                f"{place} has no column {self.prompt_column!r}: it has {', '.join(row)}. Add it, or leave "
                "such rows out with data.filter."
            )
        return prompt_of(f"{place}: {self.prompt_column}", row[self.prompt_column])

    def _answer(self, row: Row, place: str) -> Any:
        """Return the right answer of a row. Raises ValueError for NaN."""
        if self.answer_column:
            answer = row.get(self.answer_column)
        else:
            model = row.get("reward_model")
            answer = model.get("ground_truth") if isinstance(model, Mapping) else None

        if isinstance(answer, float) and not math.isfinite(answer):
            raise ValueError(
                f"{place}: {self.answer_column or 'ground_truth'} is {answer}, which equals no answer. "
                "Correct the row, or leave it out with data.filter."
            )
        return answer


def prompt_of(what: str, value: object) -> str | list[Message]:
    """Check and return a prompt: a text or a list of chat messages. Raises ValueError if it is invalid."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{what} is empty. Write a prompt, or leave such rows out with data.filter.")
        return recordable(what, value)

    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(
            f"{what} is {shown(value)}: give a text, or a list like [{{'role': 'user', 'content': TEXT}}]."
        )
    messages = [_message(f"{what}[{number}]", message) for number, message in enumerate(value)]

    if messages[-1]["role"] == "assistant":
        raise ValueError(
            f"{what} ends with a message of the assistant, so that there is nothing to answer: keep the "
            "messages before it, and store the answer in a column of its own."
        )
    if not any(message["content"].strip() for message in messages):
        raise ValueError(f"{what} is empty: none of its messages has a text.")
    return messages


def _message(what: str, message: object) -> Message:
    """Return a chat message with its content as text. Raises ValueError if it is invalid."""
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        hint = (
            "rename from/value to role/content" if isinstance(message, Mapping) and "value" in message else ""
        )
        raise ValueError(
            f"{what} is {shown(message)}: {hint or 'give role and content'}, as in "
            "{'role': 'user', 'content': TEXT}."
        )

    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise ValueError(f"{what} has the role {role!r}, which is none of {', '.join(ROLES)}.")

    # Multimodal formats store the content as a list of blocks. Join blocks of text.
    if isinstance(content, list) and all(isinstance(b, Mapping) and b.get("type") == "text" for b in content):
        content = "".join(str(block.get("text", "")) for block in content)
    if not isinstance(content, str):
        raise ValueError(f"{what} has the content {shown(content)}: give text; images are not supported.")
    return {"role": role, "content": recordable(what, content)}


# --- templates --------------------------------------------------------------------------------------------


def _template_function(template: str) -> Callable[[Row], Any] | None:
    """Return the function that `data.template` names, or None. Raises ValueError if it cannot be loaded."""
    if "{" in template or ":" not in template:
        return None
    return load_function(template, setting="data.template", takes="row")


def _template_text(template: str) -> str:
    """Return the text of a template, read from a file if it names one. Raises ValueError if it is invalid."""
    if not template or "{" in template:
        return template

    if not template.endswith((".txt", ".md")):
        raise ValueError(
            f"data.template={template!r} has no {{column}}: name one, or a file (.txt, .md), or a function "
            "as file.py:NAME."
        )
    path = resolve(template)
    if not path.is_file():
        raise ValueError(f"data.template={template}: there is no file {path}.")
    return path.read_text(encoding="utf-8-sig")


def _check_template(template: str, rows: Rows) -> None:
    """Raise ValueError if a template names no column or one that the data set lacks."""
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(
            f"data.template={template!r:.80}: {error}. Write {{{{ and }}}} for braces that are text."
        ) from None

    for field in fields:
        column = field.partition("[")[0].partition(".")[0]
        if column not in rows.columns:
            raise ValueError(
                f"data.template: {rows.name} has no column {column!r}.{did_you_mean(column, rows.columns)} "
                f"It has {', '.join(rows.columns)}. Write {{{{ and }}}} for braces that are text."
            )
    if not fields:
        raise ValueError(f"data.template={template!r:.80} has no {{column}}: every prompt would be the same.")


def _filled(template: str, row: Row, place: str) -> str:
    """Fill a template with the columns of a row. Raises ValueError if it cannot be filled."""
    try:
        return template.format_map(row)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{place}: data.template cannot be filled ({type(error).__name__}: {error}); the row has "
            f"{', '.join(row)}."
        ) from None


# --- data sets and prompts --------------------------------------------------------------------------------


def _is_verl(rows: Rows) -> bool:
    """Return whether a data set has verl's columns."""
    return {"reward_model", "data_source"} <= set(rows.columns)


def fingerprint(example: Example) -> int:
    """Return a hash of a prompt that ignores differences in white space."""
    return hash(" ".join(" ".join(f"{m['role']} {m['content']}" for m in example.messages).split()))
