"""The shipped SWE tasks, each with the code that is broken and the code that is repaired."""

from __future__ import annotations

from rlpipe.envs.sandbox.local import TreeRunner
from rlpipe.envs.sandbox.tree import tree_of
from rlpipe.envs.swe.grader.trees import code_to_grade, run_tests
from rlpipe.envs.swe.instances import Instance, load_instances
from tests.helpers.cli import ROOT

SETS = ("train", "held_instances", "held_families")


def shipped(name: str) -> list[Instance]:
    """The instances of one set."""
    return list(load_instances(str(ROOT / "data" / "swe" / f"{name}.jsonl"), name).values())


def graded_both(runner: TreeRunner, instance: Instance) -> list[int]:
    """How many tests pass over the broken and over the repaired file."""
    file = instance.metadata["file"]
    lines = instance.files[file].split("\n")
    lines[instance.metadata["line"] - 1] = instance.metadata["fixed_line"]
    return [
        run_tests(runner, instance, code_to_grade(instance, tree_of(files)), 60)
        for files in (instance.files, instance.files | {file: "\n".join(lines)})
    ]
