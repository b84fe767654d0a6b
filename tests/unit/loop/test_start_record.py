"""What a run directory keeps of each start."""

import json
import subprocess
import sys

import pytest

from rlpipe.loop.start_record import STARTS, commit_of, record_start

pytestmark = pytest.mark.unit


def test_each_start_appends_command_host_versions_and_packages(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/rlpipe run", "+recipe=swe_rl", "run.steps=2", "a b"])
    record_start(tmp_path)
    record_start(tmp_path)
    first, second = (json.loads(line) for line in (tmp_path / STARTS).read_text().splitlines())
    assert first["command"] == second["command"] == "'rlpipe run' +recipe=swe_rl run.steps=2 'a b'"
    assert first["packages"]["numpy"] and first["host"] and first["pid"] and first["python"]


def test_the_commit_of_a_checkout_is_known_and_whether_files_were_changed(tmp_path):
    def git(*words):
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *name, *words], check=True, capture_output=True)

    assert commit_of(tmp_path) is None
    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "first")
    commit = commit_of(tmp_path)
    assert len(commit) == 40
    (tmp_path / "file").write_text("two")
    assert commit_of(tmp_path) == commit + "+"
