"""Evaluates an arithmetic expression of the model from its syntax tree; the text is never executed.

Results are exact, because numbers are fractions. The length of the text and the size of every intermediate
result are limited.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from rlpipe.envs.tools.schema import ToolError

LONGEST = 200  # maximum number of characters
_ALPHABET = re.compile(r"[0-9.+\-*/() ]+")
LARGEST = 10**30  # maximum of a numerator or denominator
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Evaluate an expression of numbers, + - * / and parentheses.

    Raises ToolError if it is invalid or too large.

    >>> calculate("3 * (4 + 0.5)"), calculate("1 / 3"), calculate("7 - 9")
    ('13.5', '0.333333', '-2')
    """
    if len(expression) > LONGEST:
        raise ToolError(f"calculate: the expression has more than {LONGEST} characters")
    if not _ALPHABET.fullmatch(expression):  # with letters, Python's parser may print warnings
        raise ToolError("calculate: only numbers, + - * / and parentheses")

    try:
        return show(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, ToolError):
            raise
        raise ToolError("calculate: only numbers, + - * / and parentheses") from error
    except ZeroDivisionError as error:
        raise ToolError("calculate: division by zero") from error


def show(value: Fraction) -> str:
    """Format an integer exactly, and any other number with six significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def _value(node: ast.expr) -> Fraction:
    """Return the exact value of a node of the syntax tree. Raises ToolError if it has none."""
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _BINARY[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value = _UNARY[type(node.op)](_value(node.operand))
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        value = Fraction(node.value)
    elif isinstance(node, ast.Constant) and type(node.value) is float:
        value = Fraction(str(node.value)) if abs(node.value) < LARGEST else Fraction(LARGEST + 1)
    else:
        raise ToolError("calculate: only numbers, + - * / and parentheses")

    # Check at every step, so that no intermediate result is large enough to be slow.
    if max(abs(value.numerator), value.denominator) > LARGEST:
        raise ToolError("calculate: a number is too large")
    return value
