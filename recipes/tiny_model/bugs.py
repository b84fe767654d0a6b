"""Lists every single-token mutant of a small function, by kind of bug.

Mutants are enumerated from the text only. The generator plants one of them as the bug and demands
tests that kill all of them; demonstrators sample wrong edits from the same list. In addition to replaced
tokens the list has four other slips: a missing return, an inverted condition, swapped operands, a slice
that takes the wrong side.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from recipes.tiny_model.families import (
    AFFIXES,
    AGGREGATES,
    CASES,
    COMPARISONS,
    CONNECTIVES,
    INDICES,
    OPERATORS,
    QUANTIFIERS,
    STRINGS,
)


class BugKind(StrEnum):
    """The kind of mistake in the faulty line."""

    OPERATOR = "operator"  # + - *
    COMPARISON = "comparison"  # > < >= <= == !=
    CONNECTIVE = "connective"  # and, or
    QUANTIFIER = "quantifier"  # any, all
    AGGREGATE = "aggregate"  # max min sum len
    METHOD = "method"  # of a string: upper, lower, strip, title; startswith, endswith
    LIST_METHOD = "list_method"  # append called by another name
    INDEX = "index"  # [0], [-1], [1]
    SLICE_SIDE = "slice_side"  # [k:] for [:k]
    CONSTANT = "constant"  # another digit
    STRING = "string"  # another literal
    VARIABLE = "variable"  # another name in scope
    SWAPPED = "swapped"  # b - a for a - b
    ACCUMULATOR = "accumulator"  # = or -= for +=
    MISSING_RETURN = "missing_return"
    INVERTED = "inverted"  # if not for if, and back


@dataclass(slots=True, frozen=True)
class Mutant:
    """`text` replaces line `line` (0-based in the function)."""

    line: int
    text: str
    kind: BugKind


_WORDS: tuple[tuple[BugKind, tuple[str, ...]], ...] = (
    (BugKind.CONNECTIVE, tuple(CONNECTIVES)),
    (BugKind.QUANTIFIER, tuple(QUANTIFIERS)),
    (BugKind.AGGREGATE, tuple(AGGREGATES)),
    (BugKind.METHOD, tuple(CASES)),
    (BugKind.METHOD, tuple(AFFIXES)),
)
_SYMBOLS: tuple[tuple[BugKind, tuple[str, ...]], ...] = (
    (BugKind.OPERATOR, tuple(OPERATORS)),
    (BugKind.COMPARISON, tuple(COMPARISONS)),
)
_OPERAND = r'(\w+|"[^"]*")'


def mutants(lines: list[str]) -> list[Mutant]:
    """Return all mutants of a function, given as its source lines; the `def` line is not changed.

    >>> [m.text.strip() for m in mutants(["def f(a, b):", "    return a - b"]) if m.kind == "swapped"]
    ['return b - a']
    """
    scope = _names_in_scope(lines)
    found: dict[tuple[int, str], Mutant] = {}
    for number, line in enumerate(lines[1:], start=1):
        for text, kind in [*_token_mutants(line, scope), *_shape_mutants(line)]:
            if text != line:
                found.setdefault((number, text), Mutant(number, text, kind))
    return list(found.values())


def plantable(mutant: Mutant) -> bool:
    """Return whether the mutant is sure to end; appending to the list of the loop does not end."""
    receiver = re.search(r"(\w+)\.append\(", mutant.text)
    return receiver is None or receiver[1] == "out"


def _names_in_scope(lines: list[str]) -> list[str]:
    names = re.findall(r"\w+", lines[0].split("(", 1)[1])
    for line in lines[1:]:
        names += re.findall(r"^ +(\w+) =(?!=)", line) + re.findall(r"for (\w+) in", line)
    return list(dict.fromkeys(names))


def _token_mutants(line: str, scope: list[str]) -> Iterator[tuple[str, BugKind]]:
    tokens = [t for t in _tokens(line) if t.string.strip()]
    for before, token, after in zip([None, *tokens], tokens, [*tokens[1:], None], strict=False):
        for replacement, kind in _alternatives(before, token, after, scope):
            yield line[: token.start[1]] + replacement + line[token.end[1] :], kind


def _tokens(line: str) -> list[tokenize.TokenInfo]:
    indent = len(line) - len(line.lstrip())
    body = line.strip()
    closed = body + " pass\n" if body.endswith(":") else body + "\n"
    tokens = []
    for token in tokenize.generate_tokens(io.StringIO(closed).readline):
        start, end = (token.start[0], token.start[1] + indent), (token.end[0], token.end[1] + indent)
        if token.start[0] == 1 and end[1] <= len(line):
            tokens.append(token._replace(start=start, end=end))
    return tokens


def _alternatives(
    before: tokenize.TokenInfo | None,
    token: tokenize.TokenInfo,
    after: tokenize.TokenInfo | None,
    scope: list[str],
) -> Iterator[tuple[str, BugKind]]:
    text = token.string
    if token.type == tokenize.NUMBER:
        if not (before and before.string in ("[", "-") and after and after.string == "]"):  # not an index
            yield from ((str(digit), BugKind.CONSTANT) for digit in range(10))
    elif token.type == tokenize.STRING:
        yield from ((f'"{string}"', BugKind.STRING) for string in STRINGS)
    elif text == "+=":
        yield from ((symbol, BugKind.ACCUMULATOR) for symbol in ("-=", "="))
    elif text == "append":
        yield from ((name, BugKind.LIST_METHOD) for name in ("add", "push", "extend"))
    elif text == "-" and before is not None and before.string == "[":
        return  # the sign of an index
    elif text in scope:
        yield from ((name, BugKind.VARIABLE) for name in scope)
    for kind, group in _WORDS if token.type == tokenize.NAME else _SYMBOLS:
        if text in group:
            yield from ((member, kind) for member in group)


def _shape_mutants(line: str) -> Iterator[tuple[str, BugKind]]:
    for match in re.finditer(r"\[(-?\d)\]", line):
        for index in INDICES:
            yield line[: match.start()] + f"[{index}]" + line[match.end() :], BugKind.INDEX
    yield re.sub(r"\[(\d):\]", r"[:\1]", line), BugKind.SLICE_SIDE
    yield re.sub(r"\[:(\d)\]", r"[\1:]", line), BugKind.SLICE_SIDE
    yield re.sub(r"^( +)return ", r"\1", line), BugKind.MISSING_RETURN
    yield re.sub(r"\bif (not )?", lambda m: "if " if m.group(1) else "if not ", line), BugKind.INVERTED
    for match in re.finditer(rf"{_OPERAND} - {_OPERAND}", line):
        yield line[: match.start()] + f"{match[2]} - {match[1]}" + line[match.end() :], BugKind.SWAPPED
    for match in re.finditer(r'(?:("[^"]*") \+ (\w+)|(\w+) \+ ("[^"]*"))$', line):
        left, right = match[1] or match[3], match[2] or match[4]
        yield line[: match.start()] + f"{right} + {left}" + line[match.end() :], BugKind.SWAPPED
