import pickle

import pytest
import torch

from rlpipe.weights.payload import pack_weights, unpack_weights

pytestmark = pytest.mark.unit


def test_every_dtype_and_shape_survives_the_trip_bit_for_bit():
    weights = {
        "odd": torch.randn(3, 5),
        "half": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "strided": torch.randn(6, 4).t(),
        "ids": torch.arange(5),
    }
    payload = pickle.loads(pickle.dumps(pack_weights(weights, version=3)))
    assert payload.version == 3
    received = unpack_weights(payload)
    assert received.keys() == weights.keys()
    for name, tensor in weights.items():
        assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor)


def test_a_read_only_buffer_is_not_written_through():
    payload = pack_weights({"a": torch.zeros(4)}, version=1)
    payload.buffer.setflags(write=False)
    unpack_weights(payload)["a"].fill_(1)
    assert unpack_weights(payload)["a"].sum() == 0
