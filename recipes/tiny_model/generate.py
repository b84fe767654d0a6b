"""Makes SWE instances: small repositories with one real bug each, and tests that determine the function.

    python -m recipes.tiny_model.generate --out data/swe --train 3000 --held 256 --seed 0

This module plants bugs, chooses test cases, and makes the three data sets. Flow: sample a function of a
family -> choose test cases by running them, until every mutant fails one (else reject the function) -> one
mutant becomes the bug -> add neighbouring functions and other modules -> a record with SWE-bench's field
names. Held-out sets are made first; training data that repeats them is refused (`dedup_keys`).
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import multiprocessing
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import track

from recipes.tiny_model.bugs import BugKind, Mutant, mutants, plantable
from recipes.tiny_model.families import (
    FUNCTION_NAMES,
    HELD_OUT_FAMILIES,
    MODULE_NAMES,
    TRAIN_FAMILIES,
    Family,
    Function,
    call,
    sample_args,
    sample_function,
)

VERSION = "1"
MAX_FILE_LINES = 10
KIND_WEIGHTS = {  # kinds that fit nearly every family would crowd out the others
    BugKind.MISSING_RETURN: 0.15,
    BugKind.VARIABLE: 0.4,
    BugKind.INVERTED: 0.4,
    BugKind.CONSTANT: 0.4,
}
STATEMENTS = (
    "Function {name} is broken. It should return {spec}.",
    "Bug in {name}: the result is wrong. Expected: {spec}.",
    "Please fix {name}. It must return {spec}.",
    "The function {name} gives a wrong answer. We want {spec}.",
    "The test of {name} fails. It has to return {spec}.",
    "Users say {name} is wrong. The right result is {spec}.",
)
Record = dict[str, Any]


def make_instance(rng: random.Random, families: dict[str, Family]) -> Record:
    """Make one instance; sample functions until one has tests that kill all its mutants.

    Returns a record with instance_id, repo, base_commit, version, problem_statement, patch, test_patch,
    FAIL_TO_PASS, PASS_TO_PASS, files {path: text} and the metadata function, family, bug_kind, file,
    line (1-based), fixed_line.
    """
    while True:
        names = rng.sample(FUNCTION_NAMES, 8)
        function = sample_function(rng, rng.choice(list(families.values())), names.pop())
        candidates = mutants(function.lines)
        cases = killing_cases(rng, function, candidates)
        if cases is None:
            continue
        record = _assemble(rng, function, _choose_bug(rng, candidates), cases, names)
        if record is not None:
            return record


def killing_cases(
    rng: random.Random, function: Function, candidates: list[Mutant], pool_size: int = 80, limit: int = 8
) -> list[tuple[object, ...]] | None:
    """Return arguments on which all mutants differ from the function, or None."""
    pool = [sample_args(rng, function) for _ in range(pool_size)]
    truth = call(function.lines, function.name, pool)
    if any(kind == "error" for kind, _ in truth):
        return None
    chosen = [0, 1]
    for mutant in candidates:
        outcomes = call(apply(function.lines, mutant), function.name, pool)
        kills = [i for i in range(pool_size) if outcomes[i] != truth[i]]
        if not kills or not (set(kills) & set(chosen) or len(chosen) < limit):
            return None
        if not set(kills) & set(chosen):
            chosen.append(kills[0])
    return [pool[i] for i in chosen]


def apply(lines: list[str], mutant: Mutant) -> list[str]:
    """Return the function's source with one line replaced."""
    return [*lines[: mutant.line], mutant.text, *lines[mutant.line + 1 :]]


def _choose_bug(rng: random.Random, candidates: list[Mutant]) -> Mutant:
    candidates = [m for m in candidates if plantable(m)]
    kinds = sorted({m.kind for m in candidates})
    kind = rng.choices(kinds, [KIND_WEIGHTS.get(k, 1.0) for k in kinds])[0]
    return rng.choice([m for m in candidates if m.kind == kind])


def _assemble(
    rng: random.Random, function: Function, bug: Mutant, cases: list[tuple[object, ...]], names: list[str]
) -> Record | None:
    modules = rng.sample(MODULE_NAMES, rng.choice([1, 1, 1, 2, 2, 3]))
    neighbours = {m: _neighbour(rng, names.pop()) for m in modules[1:]}
    here = [_neighbour(rng, names.pop())] if len(modules) == 1 or rng.random() < 0.6 else []
    position = rng.randint(0, len(here))

    def module_text(middle: list[str]) -> str:
        blocks = [n.lines for n in here]
        blocks.insert(position, middle)
        return "\n\n".join("\n".join(block) for block in blocks) + "\n"

    fixed, broken = module_text(function.lines), module_text(apply(function.lines, bug))
    if fixed.count("\n") > MAX_FILE_LINES:
        return None
    line = next(
        i for i, (a, b) in enumerate(zip(fixed.split("\n"), broken.split("\n"), strict=True)) if a != b
    )
    target = f"{modules[0]}.py"
    files = {target: broken}
    files |= {f"{m}.py": "\n".join(n.lines) + "\n" for m, n in neighbours.items()}
    tested: dict[str, list[tuple[Function, list[tuple[object, ...]]]]] = {}
    tested[modules[0]] = [(function, cases)] + [(n, _some_cases(rng, n)) for n in here]
    tested |= {m: [(n, _some_cases(rng, n))] for m, n in neighbours.items()}
    tests = {f"test_{m}.py": _test_text(m, group) for m, group in tested.items()}
    files |= tests
    ids = {f.name: f"test_{m}.Test.test_{f.name}" for m, group in tested.items() for f, _ in group}
    commit = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:40]
    return {
        "instance_id": f"{function.family.name}-{bug.kind}-{commit[:12]}".replace("_", "-"),
        "repo": f"tiny/{modules[0]}",
        "base_commit": commit,
        "version": VERSION,
        "problem_statement": rng.choice(STATEMENTS).format(name=function.name, spec=function.spec),
        "patch": _diff(target, broken, fixed),
        "test_patch": "".join(_diff(path, None, text) for path, text in tests.items()),
        "FAIL_TO_PASS": [ids.pop(function.name)],
        "PASS_TO_PASS": sorted(ids.values()),
        "files": files,
        "function": function.name,
        "family": function.family.name,
        "bug_kind": str(bug.kind),
        "file": target,
        "line": line + 1,
        "fixed_line": fixed.split("\n")[line],
    }


def _neighbour(rng: random.Random, name: str) -> Function:
    while True:
        function = sample_function(rng, rng.choice(list(TRAIN_FAMILIES.values())), name)
        if len(function.lines) <= 4:
            return function


def _some_cases(rng: random.Random, function: Function) -> list[tuple[object, ...]]:
    return [sample_args(rng, function) for _ in range(2)]


def _test_text(module: str, group: list[tuple[Function, list[tuple[object, ...]]]]) -> str:
    lines = ["import unittest", "", f"import {module}", "", "", "class Test(unittest.TestCase):"]
    for function, cases in group:
        lines.append(f"    def test_{function.name}(self):")
        for args, (_, value) in zip(cases, call(function.lines, function.name, cases), strict=True):
            arguments = ", ".join(map(repr, args))
            lines.append(f"        self.assertEqual({module}.{function.name}({arguments}), {value!r})")
        lines.append("")
    return "\n".join(lines)


def _diff(path: str, before: str | None, after: str) -> str:
    old = "/dev/null" if before is None else f"a/{path}"
    return "".join(
        difflib.unified_diff(
            (before or "").splitlines(keepends=True), after.splitlines(keepends=True), old, f"b/{path}"
        )
    )


def function_block(record: Record) -> list[str]:
    """Return the source lines of the function to fix, as they are in the broken file."""
    lines = record["files"][record["file"]].split("\n")
    start = next(i for i, text in enumerate(lines) if text.startswith(f"def {record['function']}("))
    return lines[start : lines.index("", start)]


def dedup_keys(record: Record) -> tuple[str, str]:
    """Return keys that no two records may share: (source with its bug, statement), without names."""
    name = record["function"]
    source = "\n".join(" ".join(line.split()) for line in function_block(record))
    return source.replace(f"def {name}(", "def f("), record["problem_statement"].replace(name, "f")


def _batch(families: str, size: int, seed: int) -> list[Record]:
    rng = random.Random(f"{families}-{seed}")
    table = HELD_OUT_FAMILIES if families == "held_out" else TRAIN_FAMILIES
    return [make_instance(rng, table) for _ in range(size)]


def stream(
    families: str, seed: int, *, refuse: set[str] | None = None, workers: int = 2, batch: int = 100
) -> Iterator[Record]:
    """Yield instances of "train" or "held_out" families without end; their order depends only on `seed`.

    refuse: keys (see `dedup_keys`) of instances never to yield; repeated instances are dropped too.
    """
    refused = set(refuse or ())
    seen: set[str] = set()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        start = 0
        while True:
            seeds = [(seed << 20) + start + i for i in range(4 * workers)]
            start += len(seeds)
            for records in pool.imap(partial(_batch, families, batch), seeds):
                for record in records:
                    if record["instance_id"] in seen or refused.intersection(dedup_keys(record)):
                        continue
                    seen.add(record["instance_id"])
                    yield record


def take(source: Iterator[Record], count: int, title: str, *, distinct: bool = False) -> list[Record]:
    """Take the first `count` records, with a progress bar; distinct: only one per deduplication key."""
    records: list[Record] = []
    keys: set[str] = set()
    for _ in track(range(count), description=f"{title:<22}"):
        for record in source:
            if not (distinct and keys.intersection(dedup_keys(record))):
                break
        keys.update(dedup_keys(record))
        records.append(record)
    return records


def write_jsonl(path: Path, records: list[Record]) -> None:
    """Write one JSON object per line, with keys in the order of `make_instance`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in records))


def generate(out: Path, *, train: int, held: int, seed: int, workers: int = 2) -> None:
    """Write train.jsonl, held_instances.jsonl (known families) and held_families.jsonl (new families).

    Raises ValueError when a size is not positive.
    """
    if train < 1 or held < 1:
        raise ValueError(f"--train and --held must be at least 1, got {train} and {held}.")
    held_sets = held_out_sets(held, seed, workers=workers)
    refuse = {key for records in held_sets.values() for record in records for key in dedup_keys(record)}
    for name, records in held_sets.items():
        write_jsonl(out / f"{name}.jsonl", records)
    write_jsonl(
        out / "train.jsonl", take(stream("train", 2 * seed, refuse=refuse, workers=workers), train, "train")
    )


def held_out_sets(count: int, seed: int, workers: int = 2) -> dict[str, list[Record]]:
    """Make the held-out sets of a seed: `held_instances` of known families, `held_families` of new ones."""
    return {
        name: take(stream(families, 2 * seed + 1, workers=workers), count, name, distinct=True)
        for name, families in (("held_instances", "train"), ("held_families", "held_out"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the three .jsonl files")
    parser.add_argument("--train", type=int, default=3000, help="training instances")
    parser.add_argument("--held", type=int, default=256, help="instances of each held-out set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    args = parser.parse_args()
    generate(args.out, train=args.train, held=args.held, seed=args.seed, workers=args.workers)


if __name__ == "__main__":
    main()
