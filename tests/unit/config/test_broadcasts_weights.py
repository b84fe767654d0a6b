"""When the trainer sends weights to the servers itself, and when rollout workers do."""

import pytest

from rlpipe.config.run import Config

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("other", "value"),
    [
        ("rollout.engine", "embedded"),
        ("rollout.sglang.weight_transfer", "tensor"),
        ("cluster.mode", "inline"),
        ("run.half", "rollout"),
        ("injection.stale_steps", 2),  # the worker holds older weights back
        ("decoupled.path", "shipped:models/tiny"),  # and serves two models
    ],
)
def test_the_trainer_broadcasts_unless_a_worker_has_to_hold_weights(other, value):
    config = Config()
    settings = {"rollout.engine": "sglang", "rollout.sglang.weight_transfer": "collective"}

    def put(name, setting):
        *path, last = name.split(".")
        part = config
        for step in path:
            part = getattr(part, step)
        setattr(part, last, setting)
        if hasattr(part, "__post_init__"):
            part.__post_init__()

    for name, setting in settings.items():
        put(name, setting)
    assert config.broadcasts_weights
    put(other, value)
    assert not config.broadcasts_weights
