"""Checksums of a version whose experts come in several buckets are those of the version at once."""

import pytest

from rlpipe.config.rollout import RolloutConfig
from rlpipe.models.checkpoint import read_config, read_weights
from rlpipe.weights.canary import rank_fingerprints, rank_parts
from rlpipe.weights.checksums import BucketChecksums, layer_of
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit


def in_buckets(weights, turn):
    """Experts in buckets of two, `turn` apart as expert parallel ranks export them; the others in one."""
    layers = sorted({layer_of(name) for name in weights} - {""})
    yield [pair for pair in weights.items() if not layer_of(pair[0])]
    for layer in layers:
        for first in range(turn):
            chosen = {f"{layer}.experts.{first + turn * n}." for n in range(8 // turn)}
            yield [(n, w) for n, w in weights.items() if any(n.startswith(c) for c in chosen)]


@pytest.mark.parametrize("turn", [1, 4])
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(
    ("ranks", "channels"), [(1, 64), (2, 64), (1, 12)], ids=["tiles", "half tiles", "uneven"]
)
def test_experts_in_several_buckets_have_the_checksums_of_all_at_once(
    tmp_path, ranks, channels, on_gpu, turn
):
    path = write_random_checkpoint(tmp_path, "qwen3_moe", hidden=128, expert_intermediate=channels)
    weights, model = read_weights(path), read_config(path)
    config = RolloutConfig(engine="sglang")
    config.sglang.tp = ranks
    buckets = list(in_buckets(weights, turn))
    plan = [[(name, tensor.to("meta")) for name, tensor in bucket] for bucket in buckets]

    def parts_of(given):
        return rank_parts(given, config, model, drafter=None)

    copied = {}
    found = BucketChecksums(plan, parts_of, ranks=ranks, on_gpu=on_gpu, copied=lambda: copied)
    for bucket in buckets:
        copied |= dict(bucket)
        found.add(bucket)
    assert found.result().ranks == rank_fingerprints(weights, config, model, drafter=None, on_gpu=on_gpu)


def test_of_experts_that_end_with_a_tile_nothing_is_read_back_from_the_copy(tmp_path):
    """On a GPU the copy would have to be waited for, and be hashed by a CPU."""
    path = write_random_checkpoint(tmp_path, "qwen3_moe", hidden=128, expert_intermediate=64)
    weights, model, config = read_weights(path), read_config(path), RolloutConfig(engine="sglang")
    buckets = list(in_buckets(weights, 4))
    plan = [[(name, tensor.to("meta")) for name, tensor in bucket] for bucket in buckets]

    def parts_of(given):
        return rank_parts(given, config, model, drafter=None)

    found = BucketChecksums(plan, parts_of, ranks=1, on_gpu=True, copied=lambda: {}["read back"])
    for bucket in buckets:
        found.add(bucket)
    changed = [
        [(name, tensor + (number == 2)) for name, tensor in bucket] for number, bucket in enumerate(buckets)
    ]
    other = BucketChecksums(plan, parts_of, ranks=1, on_gpu=True, copied=lambda: {}["read back"])
    for bucket in changed:
        other.add(bucket)
    differing = {n for n, sum_ in found.result().ranks[0].items() if other.result().ranks[0][n] != sum_}
    layer = layer_of(buckets[2][0][0])
    assert differing == {f"{layer}.experts.w13_weight", f"{layer}.experts.w2_weight"}
