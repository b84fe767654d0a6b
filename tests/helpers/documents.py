"""The documents of the repository, and the shell commands in them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.cli import ROOT

SKIPPED = {"build", "dist", "runs", "outputs", "wandb", "__pycache__"}


def repository() -> Iterator[Path]:
    """Every file of the project, without what it ignores."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name not in SKIPPED and not name.endswith(".egg-info") and (name[0] != "." or name == ".ci")
        ]
        yield from (Path(folder, name) for name in files if name != ".git")


DOCUMENTS = sorted(path for path in repository() if path.suffix == ".md")
_SETTING = re.compile(r"""['"]?[+~]*[a-z_]+(\.[a-z_0-9]+)*=\S""")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(slots=True, kw_only=True, frozen=True)
class Command:
    """One command of a document. words: as a shell splits them, without comments and variables set before."""

    document: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """The words as one line."""
        return shlex.join(self.words)


def blocks(document: Path, language: str) -> list[str]:
    """Fenced blocks of a language."""
    return [body for name, body in _BLOCK.findall(document.read_text()) if name == language]


def commands(document: Path) -> Iterator[Command]:
    """Every command in the bash blocks of a document, in order."""
    for block in blocks(document, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in line.split(" && "):
                words = shlex.split(part, comments=True)
                words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
                if words:
                    yield Command(document=str(document.relative_to(ROOT)), words=tuple(words))


def settings_in(document: Path) -> Iterator[tuple[str, str]]:
    """Every `key=value ...` in the text of a document: its line, and the text itself."""
    for line in _BLOCK.sub("", document.read_text()).splitlines():
        for text in re.findall(r"`([^`]+)`", line):
            if _SETTING.match(text):
                yield line, text


def prose(document: Path) -> str:
    """A document without its bash and python blocks."""
    return _BLOCK.sub(lambda m: "" if m[1] in ("bash", "python") else m[2], document.read_text())
