"""Selects training rows and held-out rows, after reading and checking every row once.

Flow: each row -> data.filter -> its example (checked) -> shuffled -> data.limit -> train and held-out rows.
Notes for the user (omitted rows, duplicates, leaks) are collected as sentences.
"""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlpipe.config.data import DataConfig
from rlpipe.config.user_code import load_function
from rlpipe.envs.contract import shown
from rlpipe.envs.function.examples import Reader, fingerprint
from rlpipe.envs.function.rows import Row, Rows
from rlpipe.envs.rehearsal import call

_DEFAULT_SHARE, _DEFAULT_MOST = 0.1, 1000
_FAULTS = 20  # number of invalid rows after which the check stops
_NAMED = 5  # maximum number of locations in a message


@dataclass(slots=True, kw_only=True)
class Checked:
    """The usable rows of one data set, as parallel sequences.

    indices: index of each usable row in `rows`. prints: fingerprint of each prompt. sizes: bytes of each
    prompt.
    """

    rows: Rows
    indices: array[int] = field(default_factory=lambda: array("Q"))
    prints: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("Q"))
    filtered: int = 0


def check_rows(data: DataConfig, rows: Rows, reader: Reader) -> Checked:
    """Read every row once; return the usable ones. Raises ValueError with the locations of invalid rows."""
    keep = load_function(data.filter, setting="data.filter", takes="row") if data.filter else None
    checked, faults = Checked(rows=rows), []
    kinds: dict[str, dict[str, list[int]]] = {"prompt": defaultdict(list), "answer": defaultdict(list)}

    for index in range(len(rows)):
        if keep is not None and not _keeps(keep, data.filter, rows[index], rows.place(index)):
            checked.filtered += 1
            continue

        # Collect all invalid rows for one message, up to a limit.
        try:
            example = reader[index]
        except ValueError as error:
            faults.append((rows.place(index), error))
            if len(faults) == _FAULTS:
                break
            continue

        kinds["prompt"]["text" if isinstance(example.prompt, str) else "messages"].append(index)
        if example.answer is not None:
            kinds["answer"][_kind(example.answer)].append(index)
        checked.indices.append(index)
        checked.prints.append(fingerprint(example))
        checked.sizes.append(sum(len(message["content"].encode()) for message in example.messages))

    if faults:
        others = (
            f" The same or other faults: {_listed([place for place, _ in faults[1:]])}." if faults[1:] else ""
        )
        raise ValueError(f"{faults[0][1]}{others}")
    for what, places in kinds.items():
        _check_kinds(what, rows, places)
    if not checked.indices:
        raise ValueError(
            f"data.filter={data.filter} leaves none of the {len(rows)} rows of {rows.name}: it must return "
            "True for the rows that are used."
        )
    return checked


def _keeps(keep: Callable[[Row], Any], name: str, row: Row, place: str) -> bool:
    """Return whether the user's filter keeps a row. Raises ValueError with file and line if it fails."""

    def check(kept: Any) -> bool:
        if not isinstance(kept, bool) and type(kept).__name__ not in ("bool_", "bool"):
            raise ValueError(f"data.filter returned {shown(kept)}: return True or False.")
        return bool(kept)

    try:
        return check(keep(dict(row)))
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        # Call the filter again to find the line of the error. If it succeeds this time, use its result.
        return call(f"data.filter={name}, {place}", check, keep, dict(row))


def _kind(value: object) -> str:
    """Return the name of a value's type, with one name for all numbers."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return "number" if is_number else {"str": "text"}.get(type(value).__name__, type(value).__name__)


def _check_kinds(what: str, rows: Rows, places: dict[str, list[int]]) -> None:
    """Raise ValueError if the prompts or answers have several types."""
    if len(places) < 2:
        return
    (most, _), *others = sorted(places.items(), key=lambda kind: -len(kind[1]))
    rare = "; ".join(f"{kind} in {_listed([rows.place(i) for i in each])}" for kind, each in others)
    raise ValueError(
        f"{rows.name}: the {what} is {most} in {len(places[most])} rows, but {rare}. A reward would treat "
        "them differently: store one type."
    )


@dataclass(slots=True, kw_only=True)
class Splits:
    """Training and held-out rows, as indices into the lists of `Checked`. notes: sentences for the user."""

    train: list[int]
    held_out: list[int]
    notes: list[str]


def make_splits(data: DataConfig, train: Checked, held_out: Checked | None) -> Splits:
    """Divide the rows into training and held-out ones. Raises ValueError if none is left to train on.

    held_out: rows of a separate held-out data set; None: hold out a share of `train`.
    """
    rng = random.Random(f"data/{data.seed}")
    order = list(range(len(train.indices)))
    if data.shuffle:
        rng.shuffle(order)
    if data.limit:
        order = order[: data.limit]
    notes = [
        f"{each.filtered} of {len(each.rows)} rows of {each.rows.name} are left out by data.filter"
        for each in (train, held_out)
        if each is not None and each.filtered
    ]

    if held_out is None:
        return _by_share(data, train, order, notes)

    others = list(range(len(held_out.indices)))
    if data.shuffle:
        rng.shuffle(others)
    notes += _leak(train, order, held_out)
    notes += _duplicates(train, order)
    return Splits(train=order, held_out=others, notes=notes)


def _by_share(data: DataConfig, rows: Checked, order: list[int], notes: list[str]) -> Splits:
    """Hold out a share of the rows, and remove training rows that have a held-out prompt."""
    share = data.share or _DEFAULT_SHARE
    number = max(1, round(share * len(order)))
    number = number if data.share else min(number, _DEFAULT_MOST)
    held_out, rest = order[:number], order[number:]

    prints = {rows.prints[position] for position in held_out}
    train = [position for position in rest if rows.prints[position] not in prints]
    if not train:
        raise ValueError(
            f"{rows.rows.name} has {len(order)} usable rows and {len(prints)} different held-out prompts, "
            "which leaves none to train on: give more rows, or a file as data.held_out."
        )

    if repeated := len(rest) - len(train):
        notes = [*notes, f"{repeated} rows repeat held-out prompts and are not trained on"]
    return Splits(train=train, held_out=held_out, notes=[*notes, *_duplicates(rows, train)])


def _leak(train: Checked, order: Sequence[int], held_out: Checked) -> list[str]:
    """Return a note on prompts that are in both data sets, or an empty list."""
    held = {each: position for position, each in enumerate(held_out.prints)}
    common = [position for position in order if train.prints[position] in held]
    if not common:
        return []

    pairs = [
        f"{_place(train, position)} = {_place(held_out, held[train.prints[position]])}"
        for position in sorted(common)[:_NAMED]
    ]
    return [
        f"LEAK: {len(common)} of {len(order)} rows to train on have a prompt that is held out too "
        f"({', '.join(pairs)}{', ...' if len(common) > _NAMED else ''}): validation measures what was "
        "trained on. Remove them from one of the two."
    ]


def _duplicates(rows: Checked, order: Sequence[int]) -> list[str]:
    """Return a note on prompts that several training rows share, or an empty list."""
    first: dict[int, int] = {}
    repeated = []
    for position in sorted(order):
        if first.setdefault(rows.prints[position], position) != position:
            repeated.append(f"{_place(rows, position)} = {_place(rows, first[rows.prints[position]])}")
    if not repeated:
        return []
    return [
        f"{len(repeated)} of {len(order)} rows to train on repeat an earlier prompt ({_listed(repeated)})"
    ]


def _place(rows: Checked, position: int) -> str:
    return rows.rows.place(rows.indices[position])


def _listed(places: Sequence[str]) -> str:
    """Return the first locations as text, and the number of further ones."""
    more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return f"{', '.join(places[:_NAMED])}{more}"
