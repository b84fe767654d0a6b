"""Writes the generated reference pages: docs/reference/settings.md and docs/reference/commands.md.

    python scripts/reference.py [--check]

Settings come from the dataclasses of rlpipe/config (name, type, default, values, and the text under each
field), commands from the table of `rlpipe`, alarm rules from their defaults. docs/metrics.md is written by
`python -m rlpipe.metrics.names`. A test fails if a page is not current.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rlpipe.cli.main import COMMANDS  # noqa: E402
from rlpipe.config.alarms import AlarmsConfig  # noqa: E402
from rlpipe.config.choice import Choice  # noqa: E402
from rlpipe.config.run import Config  # noqa: E402

SETTINGS = ROOT / "docs" / "reference" / "settings.md"
COMMANDS_PAGE = ROOT / "docs" / "reference" / "commands.md"
SETTINGS_HEAD = """# Settings

Every setting with its type, default, allowed values and meaning, written by `scripts/reference.py` from the
dataclasses of [rlpipe/config](../../rlpipe/config). Recipes and cluster files change defaults: add
`--cfg job` to a run to see its values. How a run is composed: [configuration](../configuration.md).
"""
FAILS = {
    "above": "above {limit}",
    "below": "below {limit}",
    "spike": "above {limit} times its recent median",
    "rise": "above {limit} times its first values",
    "drop": "below {limit} times its first values",
    "decline": "more than {limit} below its first values",
    "fall": "below {limit} times its highest value",
    "diverge": "more than {limit} above its value when `{against}` was at its best",
}
RULES = "The default alarm rules. A field of one is set as `metrics.alarms.rules.NAME.threshold=VALUE`."
COMMANDS_HEAD = """# Commands

Written by `scripts/reference.py`. `rlpipe COMMAND --help` describes one command. Exit status: 0 success, 1 a
failure while it ran, 2 refused before it started ([details](faults.md#exit-status)).

| command | what it does |
|---|---|
"""


def field_texts(cls: type) -> dict[str, str]:
    """Return the text under each field of a dataclass."""
    (body,) = ast.parse(inspect.getsource(cls)).body
    texts = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
            texts[node.target.id] = " ".join(ast.literal_eval(after.value).split())
    return texts


def choice_texts(cls: type[Choice]) -> dict[str, str]:
    """Return the comment after each member of a Choice."""
    lines = inspect.getsource(cls).splitlines()
    found = (re.match(r'\s+\w+ = "([^"]*)"\s*(?:#\s*(.*))?$', line) for line in lines)
    return {match[1]: match[2] or "" for match in found if match}


def type_name(kind: Any) -> str:
    """Return a type's name in the way that a user would describe its values."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(type_name(part) for part in typing.get_args(kind) if part is not type(None))
    if origin := typing.get_origin(kind):
        return f"{origin.__name__} of {' to '.join(map(type_name, typing.get_args(kind)))}"
    if isinstance(kind, type) and issubclass(kind, Choice):
        return "choice"
    return {"str": "text", "Any": "any"}.get(getattr(kind, "__name__", str(kind)), kind.__name__)


def shown(value: Any) -> str:
    """Return a default as YAML writes it."""
    if isinstance(value, Choice):
        value = value.value
    if isinstance(value, list):
        value = f"[{', '.join(map(str, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "empty" if value == "" else f"`{value}`"


def meaning(text: str, kind: Any) -> str:
    """Return the text of a field, followed by the values of a choice."""
    if isinstance(kind, type) and issubclass(kind, Choice):
        values = [f"`{v}`" + (f": {why}" if why else "") for v, why in choice_texts(kind).items()]
        text = re.sub(r"See `\w+`\.", "", text).strip()
        text = " ".join([text, "One of " + "; ".join(values) + "."]).strip()
    return text.replace("|", "\\|")


def sections(value: Any, path: str = "") -> Iterator[tuple[str, str, list[str]]]:
    """Yield name, description and table rows of a dataclass and of the dataclasses nested in it."""
    cls = type(value)
    texts, kinds = field_texts(cls), typing.get_type_hints(cls)
    rows, below = [], []
    for field in dataclasses.fields(value):
        name, default = f"{path}{field.name}", getattr(value, field.name)
        if dataclasses.is_dataclass(default):
            if path == "env.function.":  # a copy of the section `data`
                continue
            below.append((default, f"{name}."))
            continue
        kind = kinds[field.name]
        if isinstance(value, AlarmsConfig) and field.name == "rules":
            default = {}
            texts[field.name] += " The table below lists the defaults."
        text = meaning(texts.get(field.name, ""), kind)
        rows.append(f"| `{name}` | {type_name(kind)} | {shown(default)} | {text} |")
    if rows:
        yield path.rstrip(".") or "top level", inspect.getdoc(cls) or "", rows
    if isinstance(value, AlarmsConfig):
        yield "metrics.alarms.rules", RULES, list(alarm_rows(value))
    for default, prefix in below:
        yield from sections(default, prefix)


def alarm_rows(alarms: AlarmsConfig) -> Iterator[str]:
    """Yield a row for each alarm rule: name, metric, test with threshold, and patience."""
    for name, rule in alarms.rules.items():
        test = FAILS[rule.test].format(limit=f"{rule.threshold:g}", against=rule.against)
        yield f"| [`{name}`](../alarms.md#{name}) | `{rule.metric}` | {test} | {rule.patience} in a row |"


def settings_page() -> str:
    """Return the text of the settings page."""
    parts = [SETTINGS_HEAD]
    for name, text, rows in sections(Config()):
        summary = " ".join(text.split("\n\n")[0].split())
        head = (
            "| alarm | metric | fails when | patience |"
            if text == RULES
            else "| setting | type | default | meaning |"
        )
        parts += [f"## {name}\n\n{summary}\n\n{head}\n|---|---|---|---|"]
        parts += ["\n".join(rows) + "\n"]
    return "\n".join(parts)


def commands_page() -> str:
    """Return the text of the page of commands."""
    usages = ((f"rlpipe {command.name} {command.arguments}", command.summary) for command in COMMANDS)
    rows = ("| `{}` | {} |".format(usage.replace("|", "\\|"), summary) for usage, summary in usages)
    return COMMANDS_HEAD + "\n".join(rows) + "\n"


def main() -> int:
    """Write the pages that are not current; with --check, print their names and return 1 instead."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check

    stale = {
        path: text
        for path, text in {SETTINGS: settings_page(), COMMANDS_PAGE: commands_page()}.items()
        if not path.exists() or path.read_text() != text
    }
    for path, text in stale.items():
        print(f"{'not current' if check else 'wrote'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(text)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
