"""When the trainer sends weights to the servers itself, and when rollout workers do."""

import pytest

from rlpipe.config.run import Config, with_weight_transfer
from rlpipe.config.spec import SpecConfig

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
        ("rollout.sglang.weight_transfer", "shared"),
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


DRAFT_OF_RANK_0 = {
    "cluster.share_gpus": True,
    "spec": SpecConfig(mode="rejection", drafter="eagle3", draft_path="draft"),
    "draft.train": "online",
}


@pytest.mark.parametrize(
    ("hosts", "gpus", "settings", "transfer"),
    [
        (1, False, {}, "shared"),
        (2, False, {}, "collective"),
        (1, True, {}, "collective"),  # servers on GPUs of their own
        (1, True, {"rollout.device": "cpu"}, "shared"),
        (1, False, {"rollout.device": "cuda:1"}, "collective"),
        (1, True, {"cluster.share_gpus": True}, "ipc"),
        (1, True, {"cluster.share_gpus": True, "trainer.dp": 2}, "ipc"),  # each rank for its GPU
        (2, True, {"cluster.share_gpus": True, "trainer.tp": 2}, "ipc"),  # NCCL allows one rank per GPU
        (1, True, DRAFT_OF_RANK_0 | {"trainer.dp": 2}, "shared"),
        (1, True, DRAFT_OF_RANK_0, "ipc"),
        (1, True, {"cluster.share_gpus": True, "injection.stale_steps": 2}, "shared"),  # from its worker
        (1, False, {"rollout.sglang.weight_transfer": "ipc"}, "ipc"),
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
    assert config.rollout.sglang.weight_transfer == settings.get("rollout.sglang.weight_transfer", "auto")
    assert bool(line) == (config.rollout.sglang.weight_transfer == "auto" and transfer != "auto")
    assert chosen.broadcasts_weights == (transfer in ("collective", "ipc"))


@pytest.mark.parametrize(
    ("hosts", "gpus", "said"),
    [(2, False, "with 2 hosts"), (1, True, "with servers with GPUs of their own")],
)
def test_memory_that_no_server_can_map_is_refused(hosts, gpus, said):
    config = Config()
    put(config, "rollout.engine", "sglang")
    put(config, "rollout.sglang.weight_transfer", "ipc")
    with pytest.raises(ValueError, match=rf"weight_transfer=ipc {said}.*weight_transfer=auto"):
        with_weight_transfer(config, hosts=hosts, gpus=gpus)
