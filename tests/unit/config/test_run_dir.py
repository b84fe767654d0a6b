"""What is known of a run directory before anything starts."""

import resource

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
