"""Injection settings: off by default, refused where they would do nothing."""

from __future__ import annotations

import pytest

from rlpipe.config.injection import InjectionConfig
from rlpipe.config.run import Config, Task
from rlpipe.preflight.settings import check

pytestmark = pytest.mark.unit


def test_an_ordinary_run_injects_nothing():
    assert InjectionConfig().active() == {} and not InjectionConfig().changes_weights


def test_what_is_on_is_told_by_name():
    config = InjectionConfig(stale_steps=16, slow_env_share=0.1, slow_env_seconds=2.0)
    assert config.active() == {"stale_steps": 16, "slow_env_share": 0.1, "slow_env_seconds": 2.0}
    assert config.changes_weights


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stale_steps": -1}, r"injection\.stale_steps=-1 must be at least 0: 0 is off"),
        (
            {"long_turn_share": 1.5, "long_turn_tokens": 9},
            r"long_turn_share=1\.5 must be a share from 0 to 1",
        ),
        ({"slow_env_seconds": 1.0}, r"slow_env_share=0\.0 and injection\.slow_env_seconds=1\.0 do nothing"),
        ({"long_turn_share": 0.5}, r"long_turn_tokens=0 do nothing without each other: set both"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        InjectionConfig(**settings)


def test_a_task_without_training_rollouts_refuses_injection(tmp_path):
    config = Config(task=Task.MTP_ADAPT, injection=InjectionConfig(stale_steps=2))
    config.run.dir = str(tmp_path / "run")
    with pytest.raises(ValueError, match=r"'stale_steps': 2.* not of task=mtp_adapt: remove it"):
        check(config)
