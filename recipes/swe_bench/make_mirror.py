"""Makes twenty small instances in SWE-bench's exact format, and the git repositories they belong to.

    python recipes/swe_bench/make_mirror.py OUT [--parquet]

Writes OUT/repos/OWNER/NAME.git and OUT/verified.jsonl (with --parquet: verified.parquet), with the columns of
SWE-bench Verified. The bugs and repairs are those of the shipped instances. Each of four repositories holds
five commits. Tests are named in the way of pytest, as bare functions (sympy), or in the way of unittest
(django).
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from rlpipe.config.paths import shipped

REPOS = ("tiny/classes", "tiny/functions", "sympy/sympy", "django/django")
EACH = 5
_DATE = "2024-01-01T00:00:00Z"
_METHOD = re.compile(r"^    def (test_\w+)\(self\):$", re.MULTILINE)
# Django's runner takes labels of modules below tests/, and reports each test that it runs in unittest's form.
_RUNTESTS = """\
import argparse
import sys
import unittest
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--verbosity", type=int, default=1)
parser.add_argument("--settings")
parser.add_argument("--parallel", type=int, default=1)
parser.add_argument("labels", nargs="*")
options = parser.parse_args()
here = Path(__file__).resolve().parent
sys.path[:0] = [str(here), str(here.parent)]
suite = unittest.defaultTestLoader.loadTestsFromNames(options.labels)
result = unittest.TextTestRunner(verbosity=options.verbosity).run(suite)
sys.exit(not result.wasSuccessful())
"""


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder; return what it prints."""
    who = {f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER") for what, value in _WHO.items()}
    command = ["git", "-c", "init.defaultBranch=main", "-c", "core.hooksPath=/dev/null", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | who, check=True, capture_output=True, text=True
    )
    return done.stdout


_WHO = {"NAME": "mirror", "EMAIL": "mirror@localhost", "DATE": _DATE}


def write(folder: Path, files: dict[str, str]) -> None:
    """Make a work tree contain exactly these files."""
    for path in folder.iterdir():
        if path.name != ".git":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def as_functions(text: str) -> str:
    """Convert a unittest module to functions with assert statements, as pytest runs them."""
    tree = ast.parse(text)
    functions = []
    for node in tree.body:
        for method in node.body if isinstance(node, ast.ClassDef) else ():
            assert isinstance(method, ast.FunctionDef), "shipped tests hold methods alone"
            calls = [one.value for one in method.body if isinstance(one, ast.Expr)]
            pairs = [call.args for call in calls if isinstance(call, ast.Call)]
            lines = [f"    assert {ast.unparse(got)} == {ast.unparse(wanted)}" for got, wanted in pairs]
            functions.append("\n".join([f"def {method.name}():", *lines]))
    imports = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import)]
    imports.remove("import unittest")
    return "\n\n\n".join(["\n".join(imports), *functions]) + "\n"


def layout(repo: str, record: dict[str, Any]) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return the sources, the tests and the new name of each test of a shipped instance in a repository."""
    files = record["files"]
    sources = {name: text for name, text in files.items() if not name.startswith("test_")}
    tests, names = {}, {}
    for name, text in files.items():
        if not name.startswith("test_"):
            continue
        module = name.removesuffix(".py")
        path = {"django/django": f"tests/{module}/tests.py"}.get(repo, f"tests/{name}")
        for method in _METHOD.findall(text):
            names[f"{module}.Test.{method}"] = {
                "tiny/classes": f"{path}::Test::{method}",
                "tiny/functions": f"{path}::{method}",
                "sympy/sympy": method,
                "django/django": f"{method} ({module}.tests.Test)",
            }[repo]
        tests[path] = text if repo in ("tiny/classes", "django/django") else as_functions(text)
        if repo == "django/django":
            tests[f"tests/{module}/__init__.py"] = ""
    if repo == "django/django":
        sources["tests/runtests.py"] = _RUNTESTS
    return sources, tests, names


def instance(work: Path, repo: str, number: int, record: dict[str, Any]) -> dict[str, Any]:
    """Commit the broken sources, and return the instance's row."""
    sources, tests, names = layout(repo, record)
    write(work, sources)
    git(work, "add", "-A")
    git(work, "commit", "-q", "--allow-empty", "-m", f"state {number}")
    base = git(work, "rev-parse", "HEAD").strip()

    # The patches are git's diff of the repair and of the new tests.
    (work / "repair.diff").write_text(record["patch"])
    git(work, "apply", "repair.diff")
    (work / "repair.diff").unlink()
    git(work, "add", "-A")
    patch = git(work, "diff", "--cached")
    git(work, "commit", "-q", "-m", f"repair {number}")
    for name, text in tests.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    git(work, "add", "-A", "-N")
    test_patch = git(work, "diff")
    owner, name = repo.split("/")
    return {
        "repo": repo,
        "instance_id": f"{owner}__{name}-{number}",
        "base_commit": base,
        "patch": patch,
        "test_patch": test_patch,
        "problem_statement": record["problem_statement"],
        "hints_text": "",
        "created_at": _DATE,
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps([names[test] for test in record["FAIL_TO_PASS"]]),
        "PASS_TO_PASS": json.dumps([names[test] for test in record["PASS_TO_PASS"]]),
        "environment_setup_commit": base,
        "difficulty": "<15 min fix",
    }


def make(out: Path, *, parquet: bool = False) -> Path:
    """Write repositories and rows below `out`; return the file with the rows."""
    with (shipped("data/swe") / "train.jsonl").open() as file:
        records = [json.loads(next(file)) for _ in range(EACH * len(REPOS))]

    rows = []
    for repo in REPOS:
        # git runs in the folder of the work tree.
        mirror = out.resolve() / "repos" / f"{repo}.git"
        mirror.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            git(work, "init", "-q")
            rows += [instance(work, repo, 1 + len(rows) + n, records.pop()) for n in range(EACH)]
            git(work, "clone", "-q", "--mirror", ".", str(mirror))

    path = out / ("verified.parquet" if parquet else "verified.jsonl")
    if parquet:
        import pyarrow
        from pyarrow import parquet as files

        files.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--parquet", action="store_true")
    chosen = parser.parse_args()
    print(make(chosen.out, parquet=chosen.parquet))
