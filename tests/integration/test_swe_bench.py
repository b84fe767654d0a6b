"""Rows in SWE-bench's format: twenty instances made here are read unchanged and graded by their own lists."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from rlpipe.config.env import EnvConfig, SandboxConfig
from rlpipe.envs.swe.instances import load_instances
from rlpipe.envs.swe.suite import SweSuite
from rlpipe.envs.swe.workspace import CheckoutWorkspace
from tests.helpers.cli import ROOT
from tests.helpers.documents import blocks, commands

pytestmark = pytest.mark.integration
PAGE = ROOT / "docs" / "swe_bench.md"
PATIENT = ["env.test_timeout_s=60", "env.sandbox.timeout_s=60"]  # this machine may be busy
OTHER = "--- /dev/null\n+++ b/notes.txt\n@@ -0,0 +1 @@\n+nothing of the issue\n"


@pytest.fixture(scope="module")
def followed(tmp_path_factory):
    """The folder in which the page's scripts were run as written, and what each printed."""
    folder, printed = tmp_path_factory.mktemp("checkout"), []
    (folder / "recipes").symlink_to(ROOT / "recipes")
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for words in (command.words for command in commands(PAGE) if command.words[0] == "python"):
        more = PATIENT if words[1].endswith("gold.py") else []
        done = subprocess.run(
            [sys.executable, *words[1:], *more],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout)
    return folder, printed


@pytest.fixture(scope="module")
def mirror(followed):
    return followed[0] / "runs" / "mirror"


@pytest.fixture(scope="module")
def config(mirror):
    return EnvConfig(
        train_file=str(mirror / "verified.jsonl"),
        held_out_files=["shipped:data/swe/held_instances.jsonl"],
        repos=str(mirror / "repos"),
        test_timeout_s=60,
        sandbox=SandboxConfig(timeout_s=60),
    )


def test_gold_patches_resolve_and_others_do_not_as_the_page_says(followed):
    (said,) = blocks(PAGE, "text")
    assert said.startswith("20 of 20 gold patches resolve, 0 of 20 empty ones")
    assert len(followed[1]) == 2 and followed[1][1] == said


def test_the_tests_see_the_repair_and_nothing_else(config):
    for instance in list(load_instances(config.train_file, "train").values())[::5]:  # one of each repository
        workspace = CheckoutWorkspace(instance, config)
        try:
            assert not workspace.run("git apply -", stdin=OTHER.encode()).exit_code
            grade = workspace.grade()
        finally:
            workspace.close()
        assert grade.changed and grade.in_process and not grade.solved
        assert grade.passed == len(instance.pass_to_pass)


def test_rows_are_read_unchanged_from_parquet_with_the_columns_of_each_data_set(tmp_path, mirror):
    import pyarrow
    from pyarrow import parquet

    rows = [json.loads(line) for line in (mirror / "verified.jsonl").read_text().splitlines()]
    # SWE-bench has no difficulty; SWE-Gym has lists, no set-up commit and images of its own.
    bench = [{k: v for k, v in row.items() if k != "difficulty"} for row in rows]
    gym = [
        {k: v for k, v in row.items() if k not in ("difficulty", "environment_setup_commit")}
        | {"FAIL_TO_PASS": json.loads(row["FAIL_TO_PASS"]), "PASS_TO_PASS": json.loads(row["PASS_TO_PASS"])}
        | {"repo": "dask/dask", "instance_id": f"dask__dask-{number}", "hints_text": None}
        for number, row in enumerate(rows)
    ]
    read = {}
    for name, table in (("verified", rows), ("bench", bench), ("gym", gym)):
        parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / f"{name}.parquet")
        read[name] = list(load_instances(str(tmp_path / f"{name}.parquet"), "env.train_file").values())
    one = read["verified"][0]
    assert one == load_instances(str(mirror / "verified.jsonl"), "env.train_file")[one.instance_id]
    assert (
        [i.tests for i in read["gym"]]
        == [i.tests for i in read["verified"]]
        == [i.tests for i in read["bench"]]
    )
    assert one.image_name == "swebench/sweb.eval.x86_64.tiny_1776_classes-1:latest"
    assert read["gym"][7].image_name == "xingyaoww/sweb.eval.x86_64.dask_s_dask-7:latest"


def test_what_cannot_be_checked_out_is_refused_at_launch(config, mirror, tmp_path):
    row = json.loads((mirror / "verified.jsonl").read_text().splitlines()[0])
    for change, says in (
        ({"base_commit": "0" * 40}, "no commit 0000"),
        ({"repo": "tiny/none"}, "no repository of tiny/none"),
    ):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row | change))
        with pytest.raises(ValueError, match=says):
            SweSuite(replace(config, train_file=str(tmp_path / "rows.jsonl")))


def test_the_future_of_a_repository_is_not_in_its_checkout(config):
    instance = load_instances(config.train_file, "train")["tiny__classes-1"]
    workspace = CheckoutWorkspace(instance, config)
    try:
        history = workspace.run(
            "git log --oneline --all | wc -l; git rev-parse HEAD; git cat-file -t origin/main"
        )
    finally:
        workspace.close()
    assert history.output.splitlines()[0] == "1" and instance.base_commit not in history.output
    assert "commit" not in history.output.splitlines()[2:]
