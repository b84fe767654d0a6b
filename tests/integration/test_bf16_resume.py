"""A resumed bf16 run equals an uninterrupted one bit for bit: master weights come from the checkpoint."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlpipe.config.algo import AlgoConfig
from rlpipe.config.trainer import Precision, TrainerConfig
from rlpipe.trainer import checkpoint
from tests.helpers.parallel import run_ranks
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import Run, train
from tests.helpers.trajectories import make_groups

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_leftovers")]

# steps small against the 8 bits of bf16: most of what is learnt stands in the master weights alone
PLAIN = TrainerConfig(lr=3e-4, precision=Precision.BF16)
SHARDED = replace(PLAIN, distributed_optimizer=True)
BEFORE, AFTER = 2, 3  # steps on either side of the checkpoint


def resumed_and_not(folder, **configs):
    """Runs by name: whole, then interrupted after BEFORE steps, then continued from the checkpoint."""
    path, algo = write_random_checkpoint(folder / "model", "mimo"), AlgoConfig()
    work, runs = [make_groups(seed) for seed in range(BEFORE + AFTER)], {}
    for name, config in configs.items():
        saved = folder / name
        runs[f"{name} whole"] = Run(path=path, config=config, algo=algo, groups=work)
        runs[f"{name} begun"] = Run(path=path, config=config, algo=algo, groups=work[:BEFORE], save=saved)
        runs[f"{name} resumed"] = Run(path=path, config=config, algo=algo, groups=work[BEFORE:], load=saved)
    return runs


def differences(told, name):
    """What a resumed run has otherwise than an uninterrupted one: steps by number, weights by name."""
    whole, resumed = told[f"{name} whole"], told[f"{name} resumed"]
    steps = zip(whole["metrics"][BEFORE:], resumed["metrics"], strict=True)
    found = [n for n, (ours, theirs) in enumerate(steps, BEFORE) if ours != theirs]
    mine, others = whole["weights"] or {}, resumed["weights"] or {}  # of the first rank alone
    assert mine.keys() == others.keys()
    return found + [n for n in mine if not np.array_equal(mine[n], others[n])]


CONFIGS = {"plain": PLAIN, "sharded": SHARDED}


def test_one_rank_resumes_bit_for_bit(tmp_path):
    told = train(0, 1, tmp_path, resumed_and_not(tmp_path, **CONFIGS))
    assert {name: differences(told, name) for name in CONFIGS} == {"plain": [], "sharded": []}


def test_two_ranks_of_data_resume_bit_for_bit(tmp_path):
    configs = {name: replace(config, dp=2) for name, config in CONFIGS.items()}
    ranks = run_ranks(train, 2, tmp_path, resumed_and_not(tmp_path, **configs))
    for told in ranks:
        assert {name: differences(told, name) for name in configs} == {"plain": [], "sharded": []}
    assert ranks[0]["plain whole"]["weights"]


@pytest.mark.parametrize("name", CONFIGS)
def test_master_weights_rebuilt_from_bf16_are_seen(tmp_path, monkeypatch, name):
    """The planted bug: after loading, the optimizer goes on from the rounded weights of the model."""
    real = checkpoint._load_optimizer

    def rebuilt(optimizer, state):
        real(optimizer, state)
        optimizer.reload_model_params()

    monkeypatch.setattr(checkpoint, "_load_optimizer", rebuilt)
    told = train(0, 1, tmp_path, resumed_and_not(tmp_path, **{name: CONFIGS[name]}))
    assert differences(told, name)
