"""Choices go by value through OmegaConf: in, out, and in its errors."""

import pickle
from dataclasses import dataclass

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from rlpipe.config.choice import Choice

pytestmark = pytest.mark.unit


class Agg(Choice):
    NONE = "none"
    TOKEN_MEAN = "token-mean"


@dataclass(slots=True, kw_only=True)
class Settings:
    agg: Agg = Agg.NONE


@pytest.mark.parametrize("value", ["none", "token-mean"])
def test_a_value_survives_the_way_in_and_out(value):
    config = OmegaConf.merge(OmegaConf.structured(Settings), OmegaConf.from_dotlist([f"agg={value}"]))
    assert OmegaConf.to_yaml(config) == f"agg: {value}\n"
    settings = OmegaConf.to_object(config)
    assert settings.agg is Agg(value)
    assert (
        OmegaConf.to_object(OmegaConf.merge(config, OmegaConf.create(OmegaConf.to_yaml(config)))) == settings
    )


def test_an_unknown_value_is_refused():
    with pytest.raises(ValidationError, match="Invalid value 'mean'"):
        OmegaConf.merge(OmegaConf.structured(Settings), {"agg": "mean"})


def test_choices_compare_iterate_and_pickle_like_enums():
    assert list(Agg) == [Agg.NONE, Agg.TOKEN_MEAN]
    assert Agg.TOKEN_MEAN == "token-mean" and isinstance(Agg.NONE, str)
    assert pickle.loads(pickle.dumps(Agg.TOKEN_MEAN)) is Agg.TOKEN_MEAN
