"""Griffe extension of the documentation site, which shows docstrings as plain text."""

from __future__ import annotations

import re
from typing import Any

import griffe

_CODE = re.compile(r"(`+[^`]*`+)")


class PlainDocstrings(griffe.Extension):
    """Turns doctests into code blocks; tables and diagrams keep their layout, tags and brackets stay text."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring:
            obj.docstring.value = readable(obj.docstring.value)


def readable(text: str) -> str:
    """Return Markdown that shows a docstring.

    >>> print(readable("Adds <one>.\\n\\n>>> add(1)\\n2"))
    Adds &lt;one>.
    <BLANKLINE>
    ```pycon
    >>> add(1)
    2
    ```
    """
    blocks = re.split(r"\n[ \t]*\n", text.strip("\n"))
    return "\n\n".join(_block(block) for block in blocks)


def _block(block: str) -> str:
    lines = block.splitlines()
    if lines and lines[0].lstrip().startswith(">>> "):
        return "\n".join(["```pycon", *lines, "```"])
    if lines and all(line.startswith("    ") for line in lines):
        return "\n".join(["```text", *(line[4:] for line in lines), "```"])
    return "\n".join(
        "".join(part if i % 2 else _plain(part) for i, part in enumerate(_CODE.split(line))) for line in lines
    )


def _plain(text: str) -> str:
    return re.sub(r"([\[\]*_|])", r"\\\1", text.replace("<", "&lt;")) if text.strip() else text
