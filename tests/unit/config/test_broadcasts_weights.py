"""When the trainer sends weights to the servers itself, and when rollout workers do."""

import pytest

from rlpipe.config.run import Config, with_weight_transfer

pytestmark = pytest.mark.unit


def put(config, name, setting):
    *path, last = name.split(".")
    part = config
    for step in path:
        part = getattr(part, step)
    setattr(part, last, setting)
    if hasattr(part, "__post_init__"):
        part.__post_init__()


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

    for name, setting in settings.items():
        put(config, name, setting)
    assert config.broadcasts_weights
    put(config, other, value)
    assert not config.broadcasts_weights


@pytest.mark.parametrize(
    ("hosts", "gpus", "settings", "transfer"),
    [
        (1, False, {}, "shared"),
        (2, False, {}, "collective"),
        (1, True, {}, "collective"),  # servers on GPUs of their own
        (1, True, {"rollout.device": "cpu"}, "shared"),
        (1, False, {"rollout.device": "cuda:1"}, "collective"),
        (1, True, {"cluster.share_gpus": True}, "shared"),
        (2, True, {"decoupled.path": "shipped:models/tiny"}, "shared"),  # from its worker
        (2, True, {"cluster.mode": "inline"}, "shared"),
        (2, True, {"rollout.sglang.weight_transfer": "disk"}, "disk"),
        (2, True, {"rollout.engine": "embedded"}, "auto"),
    ],
)
def test_auto_takes_shared_memory_on_one_host_and_says_so(hosts, gpus, settings, transfer):
    config = Config()
    for name, value in ({"rollout.engine": "sglang"} | settings).items():
        put(config, name, value)
    chosen, line = with_weight_transfer(config, hosts=hosts, gpus=gpus)
    assert chosen.rollout.sglang.weight_transfer == transfer
    assert bool(line) == (transfer in ("shared", "collective"))
    assert chosen.broadcasts_weights == ("broadcast" in line)
    assert config.rollout.sglang.weight_transfer == settings.get("rollout.sglang.weight_transfer", "auto")
