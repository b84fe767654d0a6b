"""The generator: tests that pin functions down, real test ids, sets that do not overlap."""

import json
import random
import subprocess
from pathlib import Path

import pytest

from recipes.tiny_model.bugs import BugKind, mutants, plantable
from recipes.tiny_model.demonstrators import edited, last_test_line
from recipes.tiny_model.families import HELD_OUT_FAMILIES, TRAIN_FAMILIES, Family, sample_function
from recipes.tiny_model.generate import apply, dedup_keys, function_block, killing_cases, make_instance

pytestmark = pytest.mark.unit
DATA = Path(__file__).parents[4] / "data" / "swe"


def _instances(count: int, seed: int = 5) -> list[dict]:
    rng = random.Random(seed)
    return [make_instance(rng, TRAIN_FAMILIES | HELD_OUT_FAMILIES) for _ in range(count)]


def _shipped(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def test_the_tests_of_an_instance_kill_every_mutant_of_its_function():
    for record in _instances(8):
        broken = function_block(record)
        text = record["files"][record["file"]]
        fixed = edited(record, record["fixed_line"])
        start = text.split("\n").index(broken[0])
        function = fixed[record["file"]].split("\n")[start : start + len(broken)]
        for mutant in mutants(function):
            if not plantable(mutant):
                continue  # never ends; killed by the clock of the sandbox
            changed = fixed[record["file"]].replace("\n".join(function), "\n".join(apply(function, mutant)))
            assert last_test_line({**fixed, record["file"]: changed}) != "OK", mutant


def test_the_gold_fix_passes_and_the_broken_repository_fails_only_its_own_test():
    for record in _instances(20):
        assert last_test_line(edited(record, record["fixed_line"])) == "OK"
        assert last_test_line(record["files"]) in ("FAILED (failures=1)", "FAILED (errors=1)")
        assert record["FAIL_TO_PASS"] == [f"test_{Path(record['file']).stem}.Test.test_{record['function']}"]
        assert record["PASS_TO_PASS"]


def test_the_gold_patch_applies(tmp_path):
    record = _instances(1)[0]
    for path, text in record["files"].items():
        (tmp_path / path).write_text(text)
    subprocess.run(["git", "apply", "-"], input=record["patch"], text=True, cwd=tmp_path, check=True)
    assert (tmp_path / record["file"]).read_text() == edited(record, record["fixed_line"])[record["file"]]


def test_a_function_with_an_equivalent_mutant_is_rejected():
    identity = Family(name="identity", params=("a",), body="return {a} + 0", spec="{a}")
    rng = random.Random(0)
    function = sample_function(rng, identity, "band")
    assert killing_cases(rng, function, mutants(function.lines)) is None
    function.lines[1] = function.lines[1].replace("+ 0", "+ 3")
    assert killing_cases(rng, function, mutants(function.lines)) is not None


def test_mutants_are_single_line_changes_of_every_token_class():
    lines = ["def f(xs, a):", "    n = 2", "    for v in xs:", "        if v > a and v < 9:"]
    lines += ["            n += v", "    return n - a"]
    texts = {(m.line, m.text.strip()) for m in mutants(lines)}
    assert {
        (3, "if v >= a and v < 9:"),
        (3, "if v > a or v < 9:"),
        (3, "if not v > a and v < 9:"),
        (3, "if v > a and v < 8:"),
        (3, "if v > n and v < 9:"),
        (4, "n -= v"),
        (5, "return a - n"),
        (5, "n - a"),
        (5, "return n * a"),
    } <= texts


def test_equal_seeds_give_equal_instances():
    assert _instances(3, seed=9) == _instances(3, seed=9) != _instances(3, seed=10)


def test_shipped_sets_cover_kinds_and_families_and_do_not_overlap():
    train, held, families = map(_shipped, ("train", "held_instances", "held_families"))
    assert {r["bug_kind"] for r in train} == set(BugKind) and len(BugKind) >= 12
    assert {r["family"] for r in train} == set(TRAIN_FAMILIES) and len(TRAIN_FAMILIES) >= 30
    assert {r["family"] for r in families} == set(HELD_OUT_FAMILIES) and len(HELD_OUT_FAMILIES) >= 8
    assert {r["family"] for r in held} <= set(TRAIN_FAMILIES)
    seen = {key for record in train for key in dedup_keys(record)}
    for records in (held, families):
        assert len(records) >= 256
        assert not any(seen.intersection(dedup_keys(r)) for r in records)
    assert any(sum(not p.startswith("test_") for p in r["files"]) > 1 for r in train)
