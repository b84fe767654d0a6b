"""Writes the benchmark pages, and the figures in other documents, from the committed results.

Every figure is computed from a JSON under scripts/bench/results or recipes/. `figures.toml` states for each
question the file, command and date, and the wording of its answer. docs/developer/benchmark_log.md has all
questions, docs/benchmarks.md those marked `summary`. Other documents have blocks between `<!-- figure NAME
-->` and `<!-- end -->`, which are filled with the answer of that name; within a line, between `<!-- brief
NAME -->` and `<!-- end -->`, with its brief answer. A test fails when a page differs from what this script
writes, or when a result has no entry.

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
from operator import attrgetter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import answers  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks.md"
LOG = ROOT / "docs" / "developer" / "benchmark_log.md"
BLOCK = re.compile(r"(<!-- figure (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
BRIEF = re.compile(r"(<!-- brief (\w+) -->).*?(<!-- end -->)")
_MET = r"Goal: [^*]*\*\*met\*\*\."
MET_GOAL = re.compile(rf"(?:{_MET} )+(?=Goal:)|\s*{_MET}(?: {_MET})*(?! Goal:)")
HEAD = """# Benchmarks

Measurements and their conditions. "Two cores" are two cores of a virtual machine, on which the same run
can differ by a tenth. Goals are named only where they were missed. Each answer links to its command and
result file in the [full log](developer/benchmark_log.md), which also has the smaller questions and all goals.
"""
LOG_HEAD = """# Benchmark log

The latest figure per question, with its command and date. `scripts/bench/page.py` writes this page and its
[summary](../benchmarks.md) from the JSON files that the commands leave: to change it, edit
[figures.toml](../../scripts/bench/figures.toml). Each JSON names the commit, the versions and the load of the
machine. "Two cores" are two cores of a virtual machine, on which the same run can differ by a tenth. A goal
that was missed is marked.
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
    brief: str = ""
    name: str = ""
    summary: bool = False

    @property
    def result(self) -> Any:
        """The contents of the result file."""
        return json.loads((ROOT / self.file).read_text())

    @property
    def markdown(self) -> str:
        """The answer as Markdown, computed from the file."""
        return self.text.format(r=self.result) if self.text else attrgetter(self.answer)(answers)(self.result)

    @property
    def excerpt(self) -> str:
        """The answer for other documents, without goals that were met (these are for developers)."""
        return MET_GOAL.sub("", self.markdown).strip()

    @property
    def brief_answer(self) -> str:
        """The answer in a few words, as Markdown that fits into a table's cell."""
        return attrgetter(self.brief)(answers)(self.result)

    @property
    def conditions(self) -> str:
        """Return date and machine of the result."""
        result = self.result
        date = result.get("date", self.date) if isinstance(result, dict) else self.date
        return f"{date}, {self.machine}"

    @property
    def section(self) -> str:
        """Return the full section: question, answer, source and command."""
        source = f"{self.conditions}: [{Path(self.file).name}](../../{self.file})"
        return f"### {self.question}\n\n{self.markdown}\n\n{source}\n\n```bash\n{self.command}\n```\n"

    @property
    def short_section(self) -> str:
        """Return the short section: question, answer, and a link to the full section in the log."""
        anchor = re.sub(r"[^\w\- ]", "", self.question.lower()).replace(" ", "-")
        source = f"{self.conditions} ([command](developer/benchmark_log.md#{anchor}))"
        return f"### {self.question}\n\n{self.excerpt}\n\n{source}\n"


FIGURES = [Figure(**entry) for entry in tomllib.loads((HERE / "figures.toml").read_text())["figure"]]


def results() -> list[str]:
    """Return every committed result, by its path in the repository."""
    patterns = ("scripts/bench/results/*.json", "recipes/*/*.json", "recipes/*/*/*.json")
    return sorted(path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern))


def page() -> str:
    """Return the full log of benchmarks."""
    parts = [LOG_HEAD]
    for group, figures in groupby(FIGURES, key=lambda figure: figure.group):
        parts += [f"## {group}\n", *(figure.section for figure in figures)]
    return "\n".join(parts)


def summary() -> str:
    """Return the page of the main figures."""
    parts = [HEAD]
    chosen = [figure for figure in FIGURES if figure.summary]
    for group, figures in groupby(chosen, key=lambda figure: figure.group):
        parts += [f"## {group}\n", *(figure.short_section for figure in figures)]
    return "\n".join(parts)


def filled(text: str) -> str:
    """Return a document with its figures filled in. Raises KeyError for a name without a figure."""
    named = {figure.name: figure for figure in FIGURES if figure.name}
    text = BLOCK.sub(lambda block: f"{block[1]}{named[block[2]].excerpt}\n{block[3]}", text)
    return BRIEF.sub(lambda cell: f"{cell[1]}{named[cell[2]].brief_answer}{cell[3]}", text)


def documents() -> dict[Path, str]:
    """Return every document that this script writes or fills in, with its text."""
    recipes = (ROOT / "recipes").glob("*/*.md")
    sources = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted(recipes)]
    texts = {path: path.read_text() for path in sources if path not in (PAGE, LOG)}
    blocks = {path: filled(text) for path, text in texts.items() if BLOCK.search(text) or BRIEF.search(text)}
    return blocks | {PAGE: summary(), LOG: page()}


def main() -> None:
    """Write every document that is not current; with --check, print its name and fail instead."""
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
