"""The families of small functions that instances are made of: code, specification, inputs.

This module is the grammar; bugs and repositories are made by `bugs` and `generate`. A family is a body and a
one-sentence specification with the same slots. Filling the slots gives a `Function`; its specification states
everything that its code does, with literal names and constants. Training families and held-out families share
slots and phrases, but never a body.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

OPERATORS = {"+": "plus", "-": "minus", "*": "times"}
COMPARISONS = {
    ">": "more than",
    "<": "less than",
    ">=": "at least",
    "<=": "at most",
    "==": "equal to",
    "!=": "different from",
}
CASES = {"upper": "upper case", "lower": "lower case", "strip": "stripped", "title": "title case"}
AFFIXES = {"startswith": "starts", "endswith": "ends"}
AGGREGATES = {"max": "largest", "min": "smallest", "sum": "sum", "len": "number"}
QUANTIFIERS = {"any": "any", "all": "every"}
CONNECTIVES = {"and": "and", "or": "or"}
INDICES = {"0": "first", "-1": "last", "1": "second"}
STRINGS = ("-", ",", ";", ":", "/", "ok", "no", "yes", "hi", "low", "high", "big", "odd", "x", "red", "top")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NUMBER_NAMES = _words(
    "price cost width height age score level speed count size rate depth weight rank left right base"
)
LIST_NAMES = _words("items values nums rows marks prices scores sizes data cells")
STRING_NAMES = _words("text name word label tag user city line")
FUNCTION_NAMES = _words(
    "get find make calc read pick check build load show scan run take give form tax stock order cart bill "
    "note page book game team road tree fish farm ship coin card bank desk lamp shop door wall plan trip "
    "seat ring band song ball"
)
MODULE_NAMES = _words("utils core tools store helper model parts logic basic common")

CHOICES = {
    "op": OPERATORS,
    "op2": OPERATORS,
    "cmp": COMPARISONS,
    "cmp2": COMPARISONS,
    "case": CASES,
    "affix": AFFIXES,
    "agg": AGGREGATES,
    "quant": QUANTIFIERS,
    "conn": CONNECTIVES,
    "i": INDICES,
}


@dataclass(slots=True, kw_only=True, frozen=True)
class Family:
    """A template of functions.

    params: slots that become parameters: a b c numbers, xs a list of numbers, s a string, ss strings.
    body: code with slots, unindented. spec: describes the return value, with the same slots (`op_` is op as
    text).
    """

    name: str
    params: tuple[str, ...]
    body: str
    spec: str


@dataclass(slots=True, kw_only=True)
class Function:
    """A filled family: `lines` is its source, `slots` what was filled in."""

    name: str
    family: Family
    lines: list[str]
    spec: str
    slots: dict[str, str]


def _indent(line: str) -> str:
    depth = len(line) - len(line.lstrip(">"))
    return "    " * depth + line[depth:]


def _table(text: str) -> dict[str, Family]:
    families = {}
    for row in text.strip().replace("\n    @", " @").splitlines():
        name, params, body, spec = (cell.strip() for cell in row.split("@"))
        body = "\n".join(_indent(line) for line in body.split("; "))
        families[name] = Family(name=name, params=tuple(params.split()), body=body, spec=spec)
    return families


# name @ parameters @ body ("; " ends a line, each leading ">" indents it) @ specification
TRAIN_FAMILIES = _table("""
two_numbers @ a b @ return {a} {op} {b}
    @ {a} {op_} {b}
number_const @ a @ return {a} {op} {k}
    @ {a} {op_} {k}
two_steps @ a b @ r = {a} {op} {b}; return r {op2} {k}
    @ {a} {op_} {b}, then {op2_} {k}
compare @ a b @ return {a} {cmp} {b}
    @ whether {a} is {cmp_} {b}
compare_const @ a @ return {a} {cmp} {k}
    @ whether {a} is {cmp_} {k}
choose @ a b c @ if {a} {cmp} {b}:; >return {c}; return {a}
    @ {c} if {a} is {cmp_} {b}, else {a}
choose_const @ a b @ if {a} {cmp} {k}:; >return {a}; return {b}
    @ {a} if {a} is {cmp_} {k}, else {b}
replace @ a @ if {a} {cmp} {k}:; >return {m}; return {a}
    @ {m} if {a} is {cmp_} {k}, else {a}
combine_if @ a b @ if {a} {cmp} {k}:; >return {a} {op} {b}; return {b}
    @ {a} {op_} {b} if {a} is {cmp_} {k}, else {b}
label @ a @ if {a} {cmp} {k}:; >return "{q}"; return "{w}"
    @ "{q}" if {a} is {cmp_} {k}, else "{w}"
both @ a b @ return {a} {cmp} {k} {conn} {b} {cmp2} {m}
    @ whether {a} is {cmp_} {k} {conn_} {b} is {cmp2_} {m}
count @ xs @ n = 0; for v in {xs}:; >if v {cmp} {k}:; >>n += 1; return n
    @ the count of {xs} that are {cmp_} {k}
sum_if @ xs @ n = 0; for v in {xs}:; >if v {cmp} {k}:; >>n += v; return n
    @ the sum of {xs} that are {cmp_} {k}
sum_from @ xs @ n = {k}; for v in {xs}:; >n += v; return n
    @ {k} plus the sum of {xs}
keep @ xs @ out = []; for v in {xs}:; >if v {cmp} {k}:; >>out.append(v); return out
    @ a list of {xs} that are {cmp_} {k}
keep_short @ xs @ return [v for v in {xs} if v {cmp} {k}]
    @ a list of {xs} that are {cmp_} {k}
index @ xs @ return {xs}[{i}]
    @ the {i_} of {xs}
index_op @ xs @ return {xs}[{i}] {op} {k}
    @ the {i_} of {xs} {op_} {k}
index_compare @ xs @ return {xs}[{i}] {cmp} {k}
    @ whether the {i_} of {xs} is {cmp_} {k}
drop @ xs @ return {xs}[{d}:]
    @ {xs} from index {d}
upto @ xs @ return {xs}[:{d}]
    @ {xs} before index {d}
case @ s @ return {s}.{case}()
    @ {s} in {case_}
case_prefix @ s @ return "{q}" + {s}.{case}()
    @ "{q}", then {s} in {case_}
case_each @ ss @ return [v.{case}() for v in {ss}]
    @ each of {ss} in {case_}
prefix @ s @ return "{q}" + {s}
    @ "{q}", then {s}
suffix @ s @ return {s} + "{q}"
    @ {s}, then "{q}"
join @ ss @ return "{q}".join({ss})
    @ {ss} joined by "{q}"
affix @ s @ return {s}.{affix}("{q}")
    @ whether {s} {affix_} with "{q}"
affix_if @ s @ if {s}.{affix}("{q}"):; >return {k}; return {m}
    @ {k} if {s} {affix_} with "{q}", else {m}
each @ xs @ return [v {op} {k} for v in {xs}]
    @ each of {xs} {op_} {k}
each_loop @ xs @ out = []; for v in {xs}:; >out.append(v {op} {k}); return out
    @ each of {xs} {op_} {k}
aggregate @ xs @ return {agg}({xs})
    @ the {agg_} of {xs}
aggregate_op @ xs @ return {agg}({xs}) {op} {k}
    @ the {agg_} of {xs} {op_} {k}
aggregate_arg @ xs a @ r = {agg}({xs}); return r {op} {a}
    @ the {agg_} of {xs} {op_} {a}
quantify @ xs @ return {quant}(v {cmp} {k} for v in {xs})
    @ whether {quant_} of {xs} is {cmp_} {k}
empty @ xs @ if not {xs}:; >return {k}; return {xs}[{i}]
    @ {k} if {xs} is empty, else the {i_} of {xs}
""")

HELD_OUT_FAMILIES = _table("""
two_constants @ a @ r = {a} {op} {k}; return r {op2} {m}
    @ {a} {op_} {k}, then {op2_} {m}
combine_cmp @ a b @ return {a} {op} {b} {cmp} {k}
    @ whether {a} {op_} {b} is {cmp_} {k}
aggregate_cmp @ xs @ return {agg}({xs}) {cmp} {k}
    @ whether the {agg_} of {xs} is {cmp_} {k}
index_arg @ xs a @ return {xs}[{i}] {op} {a}
    @ the {i_} of {xs} {op_} {a}
case_suffix @ s @ return {s}.{case}() + "{q}"
    @ {s} in {case_}, then "{q}"
wrap @ s @ return "{q}" + {s} + "{w}"
    @ "{q}", then {s}, then "{w}"
each_arg @ xs a @ return [v {op} {a} for v in {xs}]
    @ each of {xs} {op_} {a}
quantify_arg @ xs a @ return {quant}(v {cmp} {a} for v in {xs})
    @ whether {quant_} of {xs} is {cmp_} {a}
keep_arg @ xs a @ out = []; for v in {xs}:; >if v {cmp} {a}:; >>out.append(v); return out
    @ a list of {xs} that are {cmp_} {a}
empty_arg @ xs a @ if not {xs}:; >return {a}; return {agg}({xs})
    @ {a} if {xs} is empty, else the {agg_} of {xs}
replace_other @ a b @ if {a} {cmp} {k}:; >return {m}; return {b}
    @ {m} if {a} is {cmp_} {k}, else {b}
""")

FAMILIES = TRAIN_FAMILIES | HELD_OUT_FAMILIES


class BoundedList(list):
    """A list that refuses to grow without end, so that a mutant such as `xs.append(v)` in a loop over
    `xs` fails instead of running forever."""

    def append(self, value: object) -> None:
        if len(self) > 64:
            raise MemoryError("a mutant grows its own input")
        super().append(value)


def sample_function(rng: random.Random, family: Family, name: str) -> Function:
    """Fill the slots of a family. Constants are 2..9, so that none is an identity of + or *."""
    slots: dict[str, str] = dict(zip("abc", rng.sample(NUMBER_NAMES, 3), strict=True))
    slots["xs"], slots["ss"] = rng.choice(LIST_NAMES), rng.choice(LIST_NAMES)
    slots["s"] = rng.choice(STRING_NAMES)
    slots["k"], slots["m"] = map(str, rng.sample(range(2, 10), 2))
    slots["d"] = str(rng.randint(1, 4))
    slots["q"], slots["w"] = rng.sample(STRINGS, 2)
    for slot, table in CHOICES.items():
        slots[slot], slots[slot + "_"] = rng.choice(list(table.items()))
    params = ", ".join(slots[p] for p in family.params)
    lines = [f"def {name}({params}):", *("    " + line for line in family.body.format(**slots).split("\n"))]
    return Function(name=name, family=family, lines=lines, spec=family.spec.format(**slots), slots=slots)


def sample_args(rng: random.Random, function: Function) -> tuple[object, ...]:
    """Sample arguments, most of them near the constants of the function, where mutants differ from it."""
    near = [int(function.slots[slot]) + delta for slot in "km" for delta in (-1, 0, 1)]

    def number() -> int:
        return rng.choice(near) if rng.random() < 0.5 else rng.randint(0, 12)

    def string() -> str:
        q, w = function.slots["q"], function.slots["w"]
        head, tail = rng.choice(["", "a", "Ab ", " b", q]), rng.choice(["", "Cd", " e", q, w])
        return head + rng.choice([q, w, "xy", "a B"]) + tail

    can_be_empty = any("if not" in line for line in function.lines)
    args: list[object] = []
    for param in function.family.params:
        if param == "xs":
            size = 0 if can_be_empty and rng.random() < 0.3 else rng.randint(3, 6)
            args.append([number() for _ in range(size)])
        elif param == "ss":
            args.append([string() for _ in range(rng.randint(2, 3))])
        elif param == "s":
            args.append(string())
        else:
            args.append(number())
    return tuple(args)


def call(lines: list[str], name: str, cases: list[tuple[object, ...]]) -> list[tuple[str, object]]:
    """Return the outcome of a function on each of `cases`: ("value", v) or ("error", exception name)."""
    namespace: dict[str, object] = {}
    exec("\n".join(lines), namespace)
    function = namespace[name]
    outcomes: list[tuple[str, object]] = []
    for args in cases:
        copies = [BoundedList(a) if isinstance(a, list) else a for a in args]
        try:
            outcomes.append(("value", function(*copies)))  # type: ignore[operator]
        except Exception as error:  # any failure of generated code is an outcome
            outcomes.append(("error", type(error).__name__))
    return outcomes
