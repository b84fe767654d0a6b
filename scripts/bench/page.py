"""Writes docs/benchmarks.md, and the figures in other documents, from the committed results.

Every figure is computed from a JSON under scripts/bench/results or recipes/; `figures.toml` says per question
which file, command and date, and how its answer reads. Other documents hold blocks between
`<!-- figure NAME -->` and `<!-- end -->`, which are filled with the answer of that name. A test fails when a
page is not what this script writes, or when a result has no entry.

    python scripts/bench/page.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import answers  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks.md"
BLOCK = re.compile(r"(<!-- figure (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = """# Benchmarks

The latest figure per question, with the command that makes it and the date it was taken.
`scripts/bench/page.py` writes this page from the JSON files that the commands leave: to change it, edit
[figures.toml](../scripts/bench/figures.toml). Each JSON names the commit, the versions and the load of the
machine. "Two cores" are two cores of a virtual machine, on which the same run can differ by a tenth. A goal
that was missed says so.
"""


@dataclass(slots=True, kw_only=True, frozen=True)
class Figure:
    """One question and where its answer comes from; the fields are explained in `figures.toml`."""

    group: str
    question: str
    file: str
    command: str
    date: str = ""
    machine: str = "two cores"
    text: str = ""
    answer: str = ""
    name: str = ""

    @property
    def result(self) -> Any:
        """Contents of its file."""
        return json.loads((ROOT / self.file).read_text())

    @property
    def markdown(self) -> str:
        """The answer, computed from the file."""
        return self.text.format(r=self.result) if self.text else getattr(answers, self.answer)(self.result)

    @property
    def section(self) -> str:
        """Question, answer, source and command."""
        result = self.result
        date = result.get("date", self.date) if isinstance(result, dict) else self.date
        source = f"{date}, {self.machine}: [{Path(self.file).name}](../{self.file})"
        return f"### {self.question}\n\n{self.markdown}\n\n{source}\n\n```bash\n{self.command}\n```\n"


FIGURES = [Figure(**entry) for entry in tomllib.loads((HERE / "figures.toml").read_text())["figure"]]


def results() -> list[str]:
    """Every committed result, by its path in the repository."""
    patterns = ("scripts/bench/results/*.json", "recipes/*/*.json", "recipes/*/results/*.json")
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))


def page() -> str:
    """The whole page of benchmarks."""
    parts = [HEAD]
    for group, figures in groupby(FIGURES, key=lambda figure: figure.group):
        parts += [f"## {group}\n", *(figure.section for figure in figures)]
    return "\n".join(parts)


def filled(text: str) -> str:
    """A document with its blocks of figures filled in. Raises KeyError for a name that no figure has."""
    named = {figure.name: figure for figure in FIGURES if figure.name}
    return BLOCK.sub(lambda block: f"{block[1]}{named[block[2]].markdown}\n{block[3]}", text)


def documents() -> dict[Path, str]:
    """Every document that this script writes or fills in, with what it should say."""
    recipes = (ROOT / "recipes").glob("*/README.md")
    sources = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(recipes)]
    texts = {path: path.read_text() for path in sources if path != PAGE}
    return {path: filled(text) for path, text in texts.items() if BLOCK.search(text)} | {PAGE: page()}


def main() -> None:
    """Write what is not current; with --check name it and fail instead."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    wanted = {path: text for path, text in documents().items() if path.read_text() != text}
    for path, text in wanted.items():
        if not args.check:
            path.write_text(text)
        print(f"{'not current' if args.check else 'wrote'}: {path.relative_to(ROOT)}")
    if args.check and wanted:
        raise SystemExit("Run python scripts/bench/page.py.")


if __name__ == "__main__":
    main()
