"""Weights gathered over the ranks that share them by buckets: bit for bit, and in bounded memory."""

import pytest

from rlpipe.config.trainer import TrainerConfig
from tests.helpers.buckets import streamed
from tests.helpers.parallel import run_ranks
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.integration
MEGABYTES = 1
LIMIT = MEGABYTES * 2**20
BUCKETS_OF_A_LAYER = (
    4  # of 8 experts with 288 KiB each: three fit; with expert parallelism they come in pairs
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """12 MB; 501 tokens: tensor parallelism has to pad the vocabulary."""
    folder = tmp_path_factory.mktemp("model")
    return write_random_checkpoint(folder, vocab=501, hidden=256, layers=6, intermediate=256)


@pytest.fixture(scope="module")
def told(checkpoint, tmp_path_factory):
    """What each rank streams: (config, rank) -> answer."""
    folder = tmp_path_factory.mktemp("addresses")
    split = {"tp": TrainerConfig(tp=2), "dp": TrainerConfig(dp=2), "pp": TrainerConfig(pp=2)}
    found = {}
    for ranks, configs in ((1, {"alone": TrainerConfig()}), (2, split)):
        for rank, answer in enumerate(run_ranks(streamed, ranks, folder, checkpoint, configs, MEGABYTES)):
            found |= {(name, rank): one for name, one in answer.items()}
    return found


@pytest.mark.parametrize("name", ["alone", "tp", "dp", "pp"])
def test_buckets_and_the_full_export_are_the_checkpoint_bit_for_bit(told, name):
    answer = told[name, 0]
    assert answer["different"] == {"export": [], "buckets": [], "bfloat16": []}
    names = [one for bucket in answer["buckets"] for one, *_ in bucket]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", ["alone", "tp", "dp", "pp"])
def test_the_plan_says_what_comes(told, name):
    answer = told[name, 0]
    assert answer["plan"] == answer["buckets"] and len(answer["plan"]) > 4
    assert len(answer["bfloat16"]) < len(answer["plan"])  # half the bytes of each tensor, so fewer buckets


def test_a_bucket_is_bounded_and_so_is_what_gathering_holds(told):
    """Rank 0: the bucket before, the parts of this one, and what is made of them; rank 1: its half of one."""
    sizes, held = told["tp", 0]["sizes"], [told["tp", rank]["most_held"] for rank in (0, 1)]
    print(f"{sum(sizes)} bytes in {len(sizes)} buckets of at most {LIMIT}; held {held}")
    assert max(sizes) <= LIMIT and sum(sizes) > 11 * LIMIT
    assert LIMIT < held[0] < 5 * LIMIT
    assert 0 < held[1] <= LIMIT


def test_pipeline_stages_hand_bounded_buckets_over(told):
    """Rank 0 holds what it received beside the bucket before; rank 1 no more than its own one, as it is."""
    sizes, held = told["pp", 0]["sizes"], [told["pp", rank]["most_held"] for rank in (0, 1)]
    assert max(sizes) <= LIMIT and LIMIT < held[0] < 5 * LIMIT
    assert held[1] <= LIMIT


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["tp", "dp", "pp", "experts_tp", "experts_ep"])
def test_every_rank_can_have_all_weights_for_the_server_of_its_gpu(told, experts, name, rank):
    """Without one rank that gathers for the others; its buckets are those of the plan."""
    answer = told[name, rank] if (name, rank) in told else experts[rank][name.removeprefix("experts_")]
    assert answer["everywhere"] == [] and answer["planned"]


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """What each rank streams of a mixture of experts, by config."""
    folder = tmp_path_factory.mktemp("experts")
    path = write_random_checkpoint(
        folder / "model", "qwen3_moe", hidden=512, layers=3, expert_intermediate=48
    )
    split = {"tp": TrainerConfig(tp=2), "ep": TrainerConfig(dp=2, ep=2)}
    return run_ranks(streamed, 2, folder, path, split, MEGABYTES)


@pytest.mark.parametrize(("name", "count"), [("tp", 3), ("ep", 4)])
def test_experts_come_in_buckets_of_their_layer_no_larger_than_others(experts, name, count):
    """Eight of 288 KiB in a layer: three fit, or one pair of two expert parallel ranks.

    A server keeps all of a layer in one tensor, of 22 GB in DeepSeek-V3.
    """
    answer = experts[0][name]
    assert answer["different"] == {"export": [], "buckets": [], "bfloat16": []}
    assert answer["plan"] == answer["buckets"]
    found = [{name.split(".experts.")[0] for name, *_ in b if ".experts." in name} for b in answer["buckets"]]
    assert max(size for size, has in zip(answer["sizes"], found, strict=True) if has) <= LIMIT
    layers = sorted(layer for bucket in found for layer in bucket)
    assert set(layers) == {f"model.layers.{index}.mlp" for index in range(3)}
    assert max(map(len, found)) == 1 and len(layers) == 3 * count


@pytest.mark.parametrize("name", ["tp", "dp", "pp"])
def test_only_rank_0_sees_weights(told, name):
    answer = told[name, 1]
    assert not answer["exports"] and answer["buckets"] == answer["bfloat16"] == []
