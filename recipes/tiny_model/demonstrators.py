"""Traces of demonstrators of mixed quality: the commands that each writes, and their output.

This module defines the action format that the shipped model learns, one shell command a turn:

    grep -l 'def band' *.py -> grep -n '' core.py -> sed -i '2c\\    return ...' core.py
    -> python3 -m unittest 2>&1 | tail -1 -> submit

Observations are computed here without a sandbox; a test checks that they equal what a real shell prints.
"""

from __future__ import annotations

import io
import random
import sys
import types
import unittest
from enum import StrEnum
from typing import Any

from recipes.tiny_model.bugs import BugKind, mutants, plantable
from recipes.tiny_model.generate import function_block

TEST_COMMAND = "python3 -m unittest 2>&1 | tail -1"
SUBMIT = "submit"
Record = dict[str, Any]
Messages = list[dict[str, str]]


class Demonstrator(StrEnum):
    """A way to work on an instance."""

    CAREFUL = "careful"  # locate, view, fix, test, submit
    RETRY = "retry"  # a wrong fix first, detected by the test, then like CAREFUL
    AT_ONCE = "at_once"  # submits without looking
    LOCATED = "located"  # submits after locating
    VIEWED = "viewed"  # submits after viewing
    UNTESTED = "untested"  # a wrong fix, submitted untested


def demonstrate(rng: random.Random, record: Record, who: Demonstrator) -> Messages:
    """Return the conversation of one demonstrator with an instance, from the statement to `submit`.

    The demonstrator is CAREFUL if the line to fix has no wrong alternative.
    """
    wrong = wrong_fixes(record) if who in (Demonstrator.RETRY, Demonstrator.UNTESTED) else []
    if who in (Demonstrator.RETRY, Demonstrator.UNTESTED) and not wrong:
        who = Demonstrator.CAREFUL
    file, text = record["file"], record["files"][record["file"]]
    fix = [(edit_command(record, record["fixed_line"]), ""), (TEST_COMMAND, "OK")]
    locate = (f"grep -l 'def {record['function']}' *.py", file)
    view = (f"grep -n '' {file}", numbered(text))
    turns = [locate, view]
    if who is Demonstrator.CAREFUL:
        turns += fix
    elif who is Demonstrator.RETRY:
        bad = rng.choice(wrong)
        seen = last_test_line(edited(record, bad))
        turns += [(edit_command(record, bad), ""), (TEST_COMMAND, seen), *fix]
    elif who is Demonstrator.UNTESTED:
        turns += [(edit_command(record, rng.choice(wrong)), "")]
    else:
        turns = turns[: {Demonstrator.AT_ONCE: 0, Demonstrator.LOCATED: 1, Demonstrator.VIEWED: 2}[who]]
    messages = [{"role": "user", "content": record["problem_statement"]}]
    for action, observation in turns:
        messages.append({"role": "assistant", "content": action})
        messages.append({"role": "tool", "content": observation})
    return [*messages, {"role": "assistant", "content": SUBMIT}]


def edit_command(record: Record, line: str) -> str:
    """Return the sed command that replaces the faulty line. Its backslash preserves the leading spaces."""
    return f"sed -i '{record['line']}c\\{line}' {record['file']}"


def numbered(text: str) -> str:
    """Return the output of `grep -n '' FILE`, without the last newline."""
    return "\n".join(f"{i}:{line}" for i, line in enumerate(text.rstrip("\n").split("\n"), start=1))


def edited(record: Record, line: str) -> dict[str, str]:
    """Return the files after `edit_command`."""
    lines = record["files"][record["file"]].split("\n")
    lines[record["line"] - 1] = line
    return {**record["files"], record["file"]: "\n".join(lines)}


def wrong_fixes(record: Record) -> list[str]:
    """Return mutants of the fixed line other than the bug itself: plausible slips of a hasty programmer."""
    block = function_block(record)
    file_lines = record["files"][record["file"]].split("\n")
    start = next(i for i, text in enumerate(file_lines) if text.startswith(f"def {record['function']}("))
    index = record["line"] - 1 - start
    broken, block[index] = block[index], record["fixed_line"]
    return [
        m.text
        for m in mutants(block)
        if m.line == index and m.text != broken and plantable(m) and m.kind != BugKind.MISSING_RETURN
    ]


def last_test_line(files: dict[str, str]) -> str:
    """Run a repository's tests in this process; return the last line that unittest prints."""
    modules = {path.removesuffix(".py"): text for path, text in files.items()}
    saved = {name: sys.modules.get(name) for name in modules}
    suite = unittest.TestSuite()
    try:
        for name in sorted(modules, key=lambda name: (name.startswith("test_"), name)):
            module = sys.modules[name] = types.ModuleType(name)
            exec(modules[name], module.__dict__)
            if name.startswith("test_"):
                suite.addTests(unittest.defaultTestLoader.loadTestsFromModule(module))
        stream = io.StringIO()
        unittest.TextTestRunner(stream=stream).run(suite)
    finally:
        for name, module in saved.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
    return stream.getvalue().rstrip("\n").split("\n")[-1]
