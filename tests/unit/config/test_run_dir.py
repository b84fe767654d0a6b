"""What is known of a run directory before anything starts."""

import resource
from pathlib import Path

import pytest

from rlpipe.config.run import RunSettings
from rlpipe.preflight.settings import check_run_dir

pytestmark = pytest.mark.unit


def test_a_disk_of_twenty_kilobytes_is_one_sentence_and_left_empty(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (20_000, before[1])
    )  # a write beyond it fails as on a full disk
    try:
        with pytest.raises(
            ValueError, match=r"checkpoint directory .* is not writable \(File too large\): set"
        ):
            check_run_dir(RunSettings(dir=str(tmp_path)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_two_runs_that_start_in_a_new_folder_at_once_do_not_refuse_one_another(tmp_path, monkeypatch):
    unlink = Path.unlink

    def unlink_while_another_run_starts(path, **options):
        (tmp_path / "runs" / "other").mkdir()
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", unlink_while_another_run_starts)
    check_run_dir(RunSettings(dir=str(tmp_path / "runs" / "mine")))
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]
