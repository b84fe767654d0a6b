"""Weights through shared memory: bit for bit, two buckets at a time, and nothing left behind."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.spec import SpecConfig
from rlpipe.models.checkpoint import read_weights
from rlpipe.weights.fingerprint import cpu_hash
from rlpipe.weights.protocols import ServerError
from rlpipe.weights.shared_memory import LOADER, SERVED, SharedBuckets
from rlpipe.weights.sync import WeightSync
from rlpipe.weights.transports.base import WeightUpdate
from tests.helpers.cli import ROOT
from tests.helpers.mapped import Server, open_files, served
from tests.helpers.sglang import perturbed

pytestmark = pytest.mark.unit
TINY = ROOT / "models" / "tiny"


def piece(seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        ("odd", torch.randn(3, 5, generator=generator)),
        ("half", torch.randn(7, generator=generator).bfloat16()),
        ("turned", torch.randn(4, 6, generator=generator).t()[1:]),
        ("ids", torch.arange(9)),
        ("scalar", torch.tensor(0.5)),
    ]


def assert_same(found, sent, dtype):
    assert [name for name, _ in found] == [name for name, _ in sent]
    for (_, tensor), (_, weight) in zip(found, sent, strict=True):
        expected = weight.to(dtype) if weight.is_floating_point() else weight
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_piece_is_read_as_it_was_laid_in_the_servers_type(dtype):
    with SharedBuckets(dtype) as memory:
        assert_same(list(served.tensors(memory.write(piece(0)))), piece(0), dtype)


def test_another_process_reads_it_through_the_servers_module():
    weights = {name: tensor.float() for name, tensor in piece(3)}
    code = (
        "import sys, torch, rlpipe_shared_weights as shared\n"
        "class Model:\n"
        "    def load_weights(self, pairs):\n"
        "        print({name: tensor.double().sum().item() for name, tensor in pairs})\n"
        "said = torch.tensor(list(sys.stdin.buffer.read()), dtype=torch.uint8)\n"
        "shared.load(Model(), [('bucket', said)])\n"
    )
    with SharedBuckets(torch.float32) as memory:
        said = memory.write(list(weights.items()))
        run = subprocess.run(
            [sys.executable, "-c", code],
            input=bytes(said.tolist()),
            env={"PYTHONPATH": str(SERVED), "PATH": os.environ["PATH"]},
            capture_output=True,
            check=True,
        )
    sums = {name: tensor.double().sum().item() for name, tensor in weights.items()}
    assert run.stdout.decode().strip() == str(sums)


def test_a_piece_stays_while_the_next_is_laid_and_gives_way_to_the_one_after():
    with SharedBuckets(torch.float32) as memory:
        first = memory.write(piece(1))
        second = memory.write(piece(2))
        assert_same(list(served.tensors(first)), piece(1), torch.float32)
        memory.write(piece(3))
        assert_same(list(served.tensors(first)), piece(3), torch.float32)
        assert_same(list(served.tensors(second)), piece(2), torch.float32)


def test_the_host_holds_two_buckets_of_the_largest_piece_without_a_name():
    sizes = [3_000, 50_000, 200, 40_000, 50_000]
    with SharedBuckets(torch.float32) as memory:
        for size in sizes:
            memory.write([("weight", torch.zeros(size))])
        files = [one._file for one in memory._memory]
        assert sorted(os.fstat(file).st_size for file in files) == [4 * 50_000] * 2
        assert open_files() == ["/memfd:rlpipe-weights (deleted)"] * 2
        assert not list(Path("/dev/shm").glob("*rlpipe-weights*"))
    assert open_files() == []
    with pytest.raises(RuntimeError, match="are freed"):
        memory.write(piece(0))


@pytest.fixture
def checker(monkeypatch):
    """SGLang's module as far as hashing in threads knows it; a check has a derived tensor, too."""
    module = ModuleType("sglang.srt.utils.weight_checker")
    module.hashed = []
    state = {"small": torch.ones(3), "large": torch.arange(90.0), "alike": torch.ones(3)}

    def hash_tensor(tensor):
        module.hashed.append(tensor.numel())
        return cpu_hash([tensor])

    class WeightChecker:
        def _model_state(self):
            return state.items()

        def _parallelism_info(self, *, role):
            return SimpleNamespace(model_dump=lambda: {"role": role})

        def _compute_checksum(self, skip, *, role):
            skip = skip or ()
            kept = {name: tensor for name, tensor in state.items() if name not in skip}
            found = {name: module._hash_tensor(tensor) for name, tensor in kept.items()}
            return found | {role: module._hash_tensor(state["small"] * 2)}

    module._hash_tensor, module.WeightChecker, module.state = hash_tensor, WeightChecker, state
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def checked(one, *skip, check="1"):
    """The answer of a server that is asked for one check until its hashes are there."""
    while True:
        answer = one._compute_checksum([served.CHECK + check, *skip], role="draft")
        if "checksums" not in answer:
            return answer
        assert answer["checksums"] == {served.PENDING: ""} and answer["parallelism_info"]["role"] == "draft"


def test_a_server_that_hashes_in_threads_answers_as_before(checker):
    one = checker.WeightChecker()
    stock = one._compute_checksum([], role="draft")
    checker.hashed.clear()
    served._hash_in_threads.__wrapped__()
    assert checked(one) == stock
    assert checker.hashed[0] == 90 and sorted(checker.hashed) == [3, 3, 3, 90]  # each once, the largest first
    assert checked(one, "alike", check="2").keys() == stock.keys() - {"alike"}
    assert one._compute_checksum(role="draft") == stock, "a check without an id waits"


def test_a_server_answers_at_once_while_it_hashes(checker, monkeypatch):
    """So it can serve requests. Two models are done at different times, and are answered for together."""
    may_hash, hash_tensor = threading.Event(), checker._hash_tensor

    def slowly(tensor):
        may_hash.wait(10)
        return hash_tensor(tensor)

    monkeypatch.setattr(checker, "_hash_tensor", slowly)
    served._hash_in_threads.__wrapped__()
    one, other = checker.WeightChecker(), checker.WeightChecker()
    answers = [one._compute_checksum([served.CHECK + "1"], role="draft") for _ in range(3)]
    assert [answer["checksums"] for answer in answers] == [{served.PENDING: ""}] * 3
    may_hash.set()
    assert checked(one).keys() == {*checker.state, "draft"} and checker.hashed.count(90) == 1
    assert checked(other) == checked(one) and checker.hashed.count(90) == 2, "kept until the other is done"


@pytest.mark.parametrize("name", ["small", "large", "alike"])
def test_each_check_hashes_what_the_server_holds_then(checker, name):
    served._hash_in_threads.__wrapped__()
    one = checker.WeightChecker()
    before = checked(one)
    checker.state[name].view(torch.int32)[0] ^= 1
    after = checked(one, check="2")
    derived = {"draft"} if name == "small" else set()
    assert {key for key in before if before[key] != after[key]} == {name} | derived


def test_loading_leaves_the_servers_threads_as_they_were():
    class Failing:
        def load_weights(self, pairs):
            seen.append(torch.get_num_threads())
            raise ValueError("refused")

    seen, threads = [], torch.get_num_threads()
    with SharedBuckets(torch.float32) as memory, pytest.raises(ValueError, match="refused"):
        served.load(Failing(), [("bucket", memory.write(piece(0)))])
    assert seen == [1] and torch.get_num_threads() == threads


@pytest.fixture
def sync(tmp_path):
    config = RolloutConfig(engine="sglang", device="cpu")
    config.sglang.weight_transfer, config.sglang.bucket_mb = "shared", 1
    config.sglang.__post_init__()
    return WeightSync(config, SpecConfig(), TINY, on_gpu=False, folder=tmp_path)


def test_an_update_brings_every_tensor_and_the_version_last(sync):
    server, weights = Server(), perturbed(read_weights(TINY), 0.02)
    asyncio.run(sync.send(server, WeightUpdate(weights=weights, version=7, flush=True)))
    assert server.weights.keys() == weights.keys()
    assert all(torch.equal(server.weights[name], tensor) for name, tensor in weights.items())
    (begin, *pieces, end) = server.asked
    assert begin[0] == "/begin_weight_update" and end[0] == "/end_weight_update" and len(pieces) > 5
    assert {path for path, _, _ in pieces} == {"/update_weights_from_tensor"}
    assert {kind for _, _, kind in pieces} == {LOADER}
    assert [version for _, version, _ in pieces] == [None] * (len(pieces) - 1) + ["7"]
    sync.close()
    assert open_files() == []


def test_both_sides_keep_their_buckets_from_one_update_to_the_next(sync):
    for version in (7, 8, 9):  # either bucket has held the largest piece after two
        server, weights = Server(), perturbed(read_weights(TINY), 0.02, seed=version)
        asyncio.run(sync.send(server, WeightUpdate(weights=weights, version=version, flush=True)))
        assert all(torch.equal(server.weights[name], tensor) for name, tensor in weights.items())
        memory = [memory.bytes.data_ptr() for memory in sync.transport._memory._memory]
        mapped = {inode: tensor.data_ptr() for inode, tensor in served._mapped.items()}
        if version == 8:
            before = set(memory), mapped
    assert (set(memory), mapped) == before and len(mapped) == 2
    sync.close()
    assert open_files() == []


def test_an_update_that_is_refused_ends_its_session_and_frees_the_memory(sync):
    server = Server(fails=4)
    with pytest.raises(ServerError, match="refused"):
        asyncio.run(sync.send(server, WeightUpdate(weights=read_weights(TINY), version=7, flush=True)))
    assert server.asked[-1][0] == "/end_weight_update" and open_files() == []


def test_nothing_but_names_and_places_passes_through_the_request():
    with SharedBuckets(torch.float32) as memory:
        said = memory.write([("weight", torch.zeros(1_000_000))])
    assert json.loads(bytes(said.tolist())).keys() == {"path", "bytes", "tensors"} and len(said) < 300
