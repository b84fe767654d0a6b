"""Somebody wrote into a checkpoint: reading it executes nothing and names the file. Real Megatron."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch

from rlpipe.trainer.unpickling import nothing_executed
from tests.helpers.cli import ROOT
from tests.helpers.trainers import make_trainer

pytestmark = pytest.mark.integration


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return Path.touch, (self.proof,)


@pytest.fixture(scope="module")
def trainer():
    trainer = make_trainer(ROOT / "models" / "tiny")
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def saved(trainer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    trainer.save(folder)
    return folder


def test_what_the_trainer_wrote_is_read(trainer, saved):
    before = trainer.export_weights()
    trainer.load(saved)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.export_weights().items())


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_a_planted_pickle_is_not_executed(trainer, saved, tmp_path, name):
    proof, folder = tmp_path / "executed", tmp_path / "checkpoint"
    shutil.copytree(saved, folder)
    write = torch.save if name.endswith(".pt") else lambda it, at: at.write_bytes(pickle.dumps(it))
    write({"a": Planted(proof)}, folder / name)
    with pytest.raises((ValueError, pickle.UnpicklingError)):
        trainer.load(folder)
    assert not proof.exists()
    if name == ".metadata":
        pickle.loads((folder / name).read_bytes())
    else:
        torch.load(folder / name, weights_only=False)
    assert proof.exists(), "the planted file would have done something"


def test_an_object_among_the_tensors_is_read_as_weights_only(saved, tmp_path):
    proof = tmp_path / "executed"
    torch.save(Planted(proof), tmp_path / "object")
    with nothing_executed(saved), pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "object", weights_only=False)  # as torch's planner asks for
    assert not proof.exists()
    torch.load(tmp_path / "object", weights_only=False)
    assert proof.exists(), "outside of it torch does as it is told"
