"""Updates by element: a server that writes a delta holds the bits of a full update, in fused tensors too."""

import asyncio
import pickle
from base64 import b64decode

import pytest
import torch

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import has_mtp, read_config, read_weights
from rlpipe.weights import deltas
from rlpipe.weights.canary import DRAFT, rank_fingerprints, rank_parts
from rlpipe.weights.fingerprint import fingerprints
from rlpipe.weights.session import WeightSession
from rlpipe.weights.shared_memory import CHECK, PENDING
from rlpipe.weights.transports.base import WeightUpdate
from rlpipe.weights.transports.shared import SharedMemoryTransport
from tests.helpers.cli import ROOT
from tests.helpers.mapped import open_files, served
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module", params=["tiny", "qwen3_moe"])
def model(request, tmp_path_factory):
    """The shipped model, with its draft; and one whose experts a server keeps in one tensor."""
    if request.param == "tiny":
        return ROOT / "models" / "tiny"
    return write_random_checkpoint(tmp_path_factory.mktemp("model"), request.param)


def config_of(ranks):
    config = RolloutConfig(engine="sglang", device="cpu", dtype="bfloat16")
    config.sglang.tp, config.sglang.bucket_mb = ranks, 1
    return config


def in_bf16(model):
    return {name: tensor.bfloat16() for name, tensor in read_weights(model).items()}


def changed(weights, share, seed=0):
    """Weights of which so many elements differ, each in its lowest bit."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (t.view(torch.int16) ^ (torch.rand(t.shape, generator=generator) < share)).view(t.dtype)
        for name, t in weights.items()
    }


class Model:
    """Parameters of one role on one rank of a server."""

    def __init__(self, parts, *, draft):
        self.state = {
            name.removeprefix(DRAFT): torch.cat(list(found)).clone()
            for name, found in parts.items()
            if name.startswith(DRAFT) == draft
        }

    def named_parameters(self):
        return self.state.items()

    def named_buffers(self):
        return ()

    def load_weights(self, pairs):
        raise AssertionError("these are full weights")


class Server:
    """Ranks that each have a target and a draft, which share the tensors that SGLang has them share."""

    def __init__(self, ranks):
        self.ranks = [[Model(parts, draft=draft) for draft in (False, True)] for parts in ranks]
        for target, draft in self.ranks:
            draft.state |= {n: target.state[n] for n in draft.state if n in SHARED}
        self.versions, self.num_bytes = [], 0

    async def post(self, path, body, timeout=None):
        if path == "/update_weights_from_tensor":
            models = {"target": [0], "draft": [1], "all": [0, 1]}[body["selector"]]
            for rank, serialized in zip(self.ranks, body["serialized_named_tensors"], strict=True):
                for index in models:
                    served.load(rank[index], pickle.loads(b64decode(serialized)))
            self.versions.append(body["weight_version"])

    def fingerprints(self):
        tensors = [
            {
                prefix + name: [t]
                for prefix, m in zip(("", DRAFT), rank, strict=True)
                for name, t in m.state.items()
            }
            for rank in self.ranks
        ]
        return [fingerprints(parts, on_gpu=False) for parts in tensors]


SHARED = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_that_writes_a_delta_holds_the_bits_of_a_full_update(model, tmp_path, ranks):
    config, hf_config = config_of(ranks), read_config(model)
    session = WeightSession(config, SpecConfig(), model, folder=tmp_path)
    drafter = session.drafter if has_mtp(hf_config) else None
    transport = SharedMemoryTransport(session)
    held = in_bf16(model)
    server = Server(rank_parts(held, config, hf_config, drafter=session.drafter))

    for version, share in ((1, 0.02), (2, 0.01)):
        new = changed(held, share, seed=version)
        with transport.staged(new, held) as delta:
            whole = sum(tensor.nbytes for tensor in new.values())
            assert 0 < delta.num_bytes < 0.1 * whole * ranks
            update = WeightUpdate(weights=new, version=version, flush=False, staged=delta)
            asyncio.run(transport.send(server, update))
        assert server.fingerprints() == rank_fingerprints(
            new, config, hf_config, drafter=session.drafter, on_gpu=False
        )
        assert server.versions[-2:] == [None, str(version)]
        held = new
    assert drafter is None or server.ranks[0][1].state
    transport.close()
    assert open_files() == []


def test_every_change_of_bits_counts_and_nothing_else():
    """Zero changes its sign, a NaN its payload; a NaN that stays is no change."""
    held = torch.tensor([0.0, float("nan"), float("nan"), 1.0, 2.0]).bfloat16()
    new = held.clone()
    new[0] = -0.0
    new.view(torch.int16)[1] += 1
    new[3] = 1.5
    zeros = torch.zeros(100, dtype=torch.bfloat16)  # so that a few elements are few
    found = deltas.delta([{"a": [zeros, held]}], [{"a": [zeros, new]}])
    ((name, numel, positions, values),) = found.ranks[0]["target"]
    assert (name, numel, positions.tolist()) == ("a", 105, [100, 101, 103])
    assert (found.num_elements, found.num_bytes) == (3, 18)
    assert torch.equal(values.view(torch.int16), new.view(torch.int16)[[0, 1, 3]])


@pytest.mark.parametrize("share", [0.0, 0.05, 0.07, 0.1, 1.0])
def test_what_is_denser_than_pays_is_sent_in_full(share):
    """Six bytes an element instead of two: a quarter of the bytes at one element in twelve."""
    held = {"a": torch.zeros(120_000).bfloat16()}
    new = changed(held, share)
    found = deltas.delta([{"a": [held["a"]]}], [{"a": [new["a"]]}])
    assert (found is None) == (share > 1 / 12)


def test_a_delta_that_does_not_fit_the_server_is_left_for_the_check_to_find():
    """An error inside the loader would end the server."""
    state = {"turned": torch.zeros(4, 3).t(), "short": torch.zeros(2), "wide": torch.zeros(3).double()}
    model = Model({}, draft=False)
    model.state = state
    at = torch.tensor([1], dtype=torch.int32)
    for name, size in {"unknown": 12, "turned": 12, "short": 12, "wide": 3}.items():
        served.write_elements(model, iter([(name, at), (name, torch.ones(1))]), [size])
    assert all(not tensor.any() for tensor in state.values())


def test_weights_of_other_names_have_no_delta(tmp_path):
    model = ROOT / "models" / "tiny"
    session = WeightSession(config_of(1), SpecConfig(), model, folder=tmp_path)
    weights = in_bf16(model)
    fewer = {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
    assert session.delta(fewer, weights) is None and session.delta(weights, weights).num_elements == 0


def test_both_sides_have_the_same_names_for_a_check_and_its_missing_hashes():
    assert (served.PENDING, served.CHECK) == (PENDING, CHECK)
