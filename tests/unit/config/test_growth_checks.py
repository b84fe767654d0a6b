"""cluster.max_workers: what cannot grow is refused at launch, with the remedy."""

import pytest

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import ClusterConfig, ClusterMode, Config, RunSettings, Task
from rlpipe.config.run_mode import RunMode
from rlpipe.preflight.settings import check

pytestmark = pytest.mark.unit


def test_a_pool_may_grow_to_any_size_from_that_of_the_start():
    for most in (0, 2, 5):
        check(Config(rollout=RolloutConfig(workers=2), cluster=ClusterConfig(max_workers=most)))


def test_fewer_workers_than_the_run_starts_with_are_refused():
    config = Config(rollout=RolloutConfig(workers=3), cluster=ClusterConfig(max_workers=2))
    with pytest.raises(ValueError, match=r"max_workers=2 is below rollout\.workers=3.*raise it, or set 0"):
        check(config)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": ClusterMode.INLINE}, "cluster.mode=inline"),
        ({"half": RunMode.ROLLOUT}, "run.half=rollout"),
        ({"task": Task.MTP_ADAPT}, "task=mtp_adapt"),
        ({"share_gpus": True}, "share_gpus=true"),
    ],
)
def test_workers_that_cannot_join_are_refused(options, words):
    cluster = ClusterConfig(
        mode=options.get("mode", ClusterMode.RAY), share_gpus=options.get("share_gpus", False), max_workers=2
    )
    config = Config(
        task=options.get("task", Task.RL),
        run=RunSettings(half=options.get("half", RunMode.BOTH)),
        cluster=cluster,
    )
    with pytest.raises(ValueError, match=r"cluster\.max_workers=2 with") as caught:
        check(config)
    assert words in str(caught.value) and "Set cluster.max_workers=0" in str(caught.value)


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match=r"cluster\.max_workers"):
        ClusterConfig(max_workers=-1)
