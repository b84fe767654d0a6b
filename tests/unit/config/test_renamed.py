"""Names of earlier versions: their successors exist, are named by the refusal, and old records are read."""

import pytest

from rlpipe.cli.suggestions import settings, unknown_setting
from rlpipe.config.renamed import REMOVED, RENAMED, with_current_names

pytestmark = pytest.mark.unit


def test_no_old_name_is_a_setting_and_every_new_one_is():
    known = dict(settings())
    assert not known.keys() & (RENAMED.keys() | REMOVED.keys())
    assert set(RENAMED.values()) <= known.keys()


def test_an_old_name_is_answered_by_the_new_one():
    refusal = str(unknown_setting("mtp.train", "online"))
    assert refusal == "mtp.train is now draft.train: write draft.train=online."


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_name_is_answered_by_the_reason(name):
    assert str(unknown_setting(name, "1")).startswith(f"{name}=1: ") and REMOVED[name]


def test_settings_of_an_earlier_version_are_read_under_the_new_names():
    old = {"mtp": {"train": "online", "lr": 0.1}, "run": {"steps": 3}, "env": {}}
    assert with_current_names(old) == {
        "draft": {"train": "online", "lr": 0.1},
        "run": {"steps": 3},
        "env": {},
    }
