"""Whether and how a draft is trained: values, remedies, and YAML's bare `off`."""

import pytest
from omegaconf import OmegaConf

from rlpipe.config.draft import DraftConfig, DraftTrain
from rlpipe.config.draft_objectives import SUPERVISED, DraftObjective

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("earlier", "remedy"),
    [
        ("frozen", "draft.train=off"),
        ("ppow", "draft.train=online draft.objective=ppow"),
        ("x", "draft.train=online"),
    ],
)
def test_an_earlier_or_unknown_value_is_refused_with_what_replaces_it(earlier, remedy):
    with pytest.raises(ValueError, match=f"draft.train={earlier} .*{remedy}"):
        DraftConfig(train=earlier)


@pytest.mark.parametrize("written", ["off", "'off'"])
def test_off_is_understood_in_yaml_with_and_without_quotes(written):
    composed = OmegaConf.merge(OmegaConf.structured(DraftConfig), OmegaConf.create(f"train: {written}"))
    read = OmegaConf.to_object(composed)
    assert read.train is DraftTrain.OFF and not read.online


def test_what_is_written_is_read_again():
    text = OmegaConf.to_yaml(OmegaConf.structured(DraftConfig(train="online", objective="ppow")))
    again = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DraftConfig), OmegaConf.create(text)))
    assert again.online and again.windows and again.supervised is DraftObjective.E2E_TV


@pytest.mark.parametrize(
    "name", ["ppow", "ppow_exact", "ppow_measured", "exact_window", "exact_block", "own_kl"]
)
def test_objectives_on_windows_are_not_supervised(name):
    assert DraftObjective(name) not in SUPERVISED and DraftConfig(objective=name).windows
    assert len(SUPERVISED) + 6 == len(DraftObjective)
