"""Greedy rollouts are refused in the same words by everything that needs a distribution."""

import pytest

from rlpipe.config.algo import AlgoConfig, Correction
from rlpipe.config.checks import check, check_adapt
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import Config, RunSettings

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("checked", [check, check_adapt])
def test_what_needs_a_distribution_refuses_greedy_rollouts_and_names_the_remedy(tmp_path, checked):
    config = Config(
        run=RunSettings(dir=str(tmp_path)),
        algo=AlgoConfig(correction=Correction.OBRS),
        rollout=RolloutConfig(temperature=0.0),
    )
    with pytest.raises(
        ValueError, match=r"distribution.* rollout\.temperature=0 leaves none: set rollout\.temperature=1"
    ):
        checked(config)
