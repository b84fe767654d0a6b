"""What a server says of its experts, and what it must not be asked for."""

import base64

import numpy as np
import pytest

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.sglang import SglangConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.models import read_architecture
from rlpipe.models.checkpoint import read_config
from rlpipe.rollout.sglang.routes import check_routes, read_routes
from rlpipe.weights.protocols import ServerError
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def arch(tmp_path_factory):
    """Three layers, the first without experts; 2 of 8 for a token."""
    path = write_random_checkpoint(tmp_path_factory.mktemp("model"), "glm4_moe", layers=3)
    return read_architecture(read_config(path))


def sent(experts):
    return {"routed_experts": base64.b64encode(np.asarray(experts, np.int32).tobytes()).decode()}


def test_layers_without_experts_are_left_out_and_the_last_token_has_no_record(arch):
    experts = [[[0, 0], [1, 2], [3, 4]], [[0, 0], [5, 6], [7, 0]]]
    routes = read_routes(arch, sent(experts), tokens=3)
    assert routes.dtype == np.uint8
    assert routes.tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 0]], [[255, 255], [255, 255]]]
    assert read_routes(arch, {}, tokens=3) is None


@pytest.mark.parametrize(
    "experts",
    [
        [[[0, 0], [1, 2], [3, 8]]],  # there are eight
        [[[0, 0], [1, 2], [3, -1]]],
        [[[0, 0], [0, 0], [0, 0]]],  # a buffer that nothing has written
        [[[0, 0], [1, 2]]],  # two layers
        [[[0, 0], [1, 2], [3, 4]]] * 3,  # as many as there are tokens
    ],
)
def test_experts_of_another_model_or_text_are_refused(arch, experts):
    with pytest.raises(ServerError, match=r"experts|routes"):
        read_routes(arch, sent(experts), tokens=3)


def test_a_verify_step_that_is_larger_than_the_servers_buffer_is_refused():
    fits = RolloutConfig(replay_routes=True, max_running=64, prefill_tokens=256)
    check_routes(fits, SpecConfig(gamma=3), on_gpu=False)
    check_routes(fits, SpecConfig(mode="none", gamma=9), on_gpu=False)
    with pytest.raises(ValueError, match=r"max_running=64 and spec.gamma=4: .* 320 .*=256. Set .*tokens=320"):
        check_routes(fits, SpecConfig(gamma=4), on_gpu=False)
    check_routes(RolloutConfig(max_running=64, prefill_tokens=256), SpecConfig(gamma=4), on_gpu=False)
    bare = RolloutConfig(replay_routes=True, sglang=SglangConfig(plugin=False))
    check_routes(bare, SpecConfig(), on_gpu=True)
    with pytest.raises(ValueError, match=r"plugin=false on a CPU.*Set rollout.sglang.plugin=true"):
        check_routes(bare, SpecConfig(), on_gpu=False)
