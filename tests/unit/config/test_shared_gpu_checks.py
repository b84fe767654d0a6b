"""cluster.share_gpus: what cannot work is refused at launch, with the remedy."""

import pytest

from rlpipe.config.draft import DraftTrain
from rlpipe.config.drafters import Drafter
from rlpipe.config.rollout import EngineKind, RolloutConfig
from rlpipe.config.run import ClusterConfig, ClusterMode, Config, RunSettings
from rlpipe.config.run_mode import RunMode
from rlpipe.config.sglang import SglangConfig, WeightTransfer
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.config.trainer import TrainerConfig
from rlpipe.preflight.settings import check_shared_gpus

pytestmark = pytest.mark.unit


def config(workers=4, engine=EngineKind.SGLANG, mode=ClusterMode.RAY, half=RunMode.BOTH, **sglang):
    sglang = {"memory_fraction": 0.4, **sglang}
    return Config(
        run=RunSettings(half=half, dump="dump" if half is RunMode.TRAIN else ""),
        cluster=ClusterConfig(mode=mode, share_gpus=True),
        rollout=RolloutConfig(workers=workers, engine=engine, sglang=SglangConfig(**sglang)),
        trainer=TrainerConfig(tp=2, dp=2),
    )


@pytest.mark.parametrize("engine", EngineKind)
def test_a_worker_and_a_rank_for_every_gpu_may_share(engine):
    check_shared_gpus(config(engine=engine))


def test_the_embedded_engine_needs_no_share_of_memory():
    check_shared_gpus(config(engine=EngineKind.EMBEDDED, memory_fraction=0.0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"workers": 3},
            "rollout.workers=3 and trainer.tp * trainer.cp * trainer.pp * trainer.dp = 4: make them equal",
        ),
        ({"mode": ClusterMode.INLINE}, "set it to false"),
        ({"half": RunMode.TRAIN}, "run.half=train"),
        ({"tp": 2}, "tp=2"),
        ({"memory_fraction": 0.0}, "memory_fraction=0.4"),
        ({"weight_transfer": WeightTransfer.COLLECTIVE}, "Set weight_transfer=auto, ipc, shared or disk"),
    ],
)
def test_what_cannot_share_is_refused(options, words):
    with pytest.raises(ValueError, match=r"cluster\.share_gpus=true") as caught:
        check_shared_gpus(config(**options))
    assert words in str(caught.value)


def test_every_rank_may_send_what_it_has_but_not_a_draft_that_only_the_first_one_trains():
    several = config(weight_transfer=WeightTransfer.IPC)
    check_shared_gpus(several)
    several.spec = SpecConfig(mode=SpecMode.REJECTION, drafter=Drafter.EAGLE3, draft_path="draft")
    several.draft.train = DraftTrain.ONLINE
    with pytest.raises(ValueError, match=r"ipc, 4 trainer ranks .* only the first has the draft .*eagle3"):
        check_shared_gpus(several)
