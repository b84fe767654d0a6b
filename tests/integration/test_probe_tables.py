"""What the trainer says of every context: against its own sums, against the engine, split over ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlpipe.batching.packing import pack
from rlpipe.config.draft import DraftConfig
from rlpipe.config.draft_vocab import read_draft_vocab, write_table
from rlpipe.config.spec import SpecConfig
from rlpipe.config.trainer import TrainerConfig
from rlpipe.diagnosis.probe import COLUMNS
from rlpipe.types import Trajectory
from tests.helpers.engines import generate, request, running_engine
from tests.helpers.parallel import run_ranks
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import make_trainer, meet
from tests.helpers.trajectories import make_groups

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_leftovers")]
KNOWN = [0, *range(3, 50), 60]  # tokens of a reduced draft vocabulary
SUMS = ("target_entropy", "draft_entropy", "kl", "reverse_kl", "target_above", "draft_above")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return write_random_checkpoint(folder / "model", "mimo", vocab=61, head_scale=0.5)


def trajectories(common=9):
    return [t for group in make_groups(3, common=common, vocab=61) for t in group.trajectories]


@pytest.mark.parametrize("budget", [64, 4096])
def test_contexts_add_up_to_the_statistics_of_the_draft(path, budget):
    some = trajectories()
    trainer = make_trainer(path)
    batch = pack(some, None, budget, dp_size=1)
    stats, tables = trainer.mtp_stats(batch), trainer.draft_tables(batch)
    trainer.close()
    seen = [values for table in tables if table for values in [table[1]]]
    for depth in range(3):
        for name, field in (("rejection", "alpha"), *((n, n) for n in SUMS)):
            total = sum(np.nansum(values[name][:, depth]) for values in seen)
            assert total == pytest.approx(getattr(stats, field)[depth].item(), rel=1e-4), name
        count = sum((~np.isnan(values["rejection"][:, depth])).sum() for values in seen)
        assert count == stats.count[depth].item()
    for table in filter(None, tables):
        assert set(table[1]) == set(COLUMNS)


@pytest.fixture(params=[None, KNOWN], ids=["all", "reduced"])
def vocabulary(request, path):
    """The draft's tokens, and the setting of the engine that names them."""
    file = path.parent / "table.json"
    write_table(file, KNOWN)
    return request.param, str(file) if request.param else ""


def test_the_engines_verify_steps_are_the_tables_contexts(path, vocabulary):
    """p and q of every kept first draft, as the engine recorded them, give the table's own probability.

    Deeper drafts attend to keys of depth 1 in the engine and to those of their own depth in the trainer.
    """
    asked = [request(i, [2, 3 + i, 5, 7], max_new_tokens=40, record_drafts=True) for i in range(4)]
    with running_engine(path, "rejection", gamma=3, draft_vocab=vocabulary[1]) as engine:
        results = generate(engine, *asked)
    played = []
    for one, result in zip(asked, results, strict=True):
        trajectory = Trajectory(
            trajectory_id=one.request_id, group_id="g", instance_id="i", reward=0.0, prompt_length=4
        )
        trajectory.append_context(one.prompt_ids)
        trajectory.append_sampled(result)
        played.append(trajectory)
    trainer = make_trainer(path, draft_vocab=vocabulary[0])
    tables = trainer.draft_tables(pack(played, None, 4096, dp_size=1))
    trainer.close()
    compared = 0
    for trajectory, (positions, values) in zip(played, tables, strict=True):
        row = {int(position): i for i, position in enumerate(positions)}
        for step in trajectory.drafts:
            if step.num_accepted and step.position in row:
                p, q = step.target_probs[0], step.draft_probs[0]
                expected = values["accept"][row[step.position], 0]
                assert min(1.0, q / p) == pytest.approx(expected, abs=1e-4)
                compared += 1
    assert compared > 10


def test_a_checkpoint_has_the_table_of_its_draft(path, tmp_path):
    trainer = make_trainer(path, draft_vocab=KNOWN)
    trainer.save_hf(tmp_path / "hf")
    trainer.close()
    assert read_draft_vocab(SpecConfig(draft_vocab="checkpoint"), tmp_path / "hf", 61) == KNOWN


def test_target_only_is_the_targets_probability_of_what_the_engine_drafts(path, vocabulary):
    asked = [request(i, [2, 3 + i, 5, 7], max_new_tokens=30, record_drafts=True) for i in range(4)]
    with running_engine(path, "target_only", gamma=3, draft_vocab=vocabulary[1]) as engine:
        results = generate(engine, *asked)
    trainer = make_trainer(path, draft_vocab=vocabulary[0])
    for one, result in zip(asked, results, strict=True):
        trajectory = Trajectory(trajectory_id="t", group_id="g", instance_id="i", reward=0.0, prompt_length=4)
        trajectory.append_context(one.prompt_ids)
        trajectory.append_sampled(result)
        [(positions, values)] = trainer.draft_tables(pack([trajectory], None, 4096, dp_size=1))
        row = {int(position): i for i, position in enumerate(positions)}
        for step in trajectory.drafts:
            if step.position in row:
                found = values["target_only"][row[step.position], 0]
                assert found == pytest.approx(step.target_probs[0], abs=1e-4)
    trainer.close()


@pytest.mark.parametrize(("split", "known"), [({"tp": 2}, KNOWN), ({"dp": 2}, None)])
def test_ranks_together_say_what_one_says(path, tmp_path, split, known):
    [alone] = run_ranks(read, 1, path, tmp_path, {}, known)
    for told in run_ranks(read, 2, path, tmp_path, split, known):
        for mine, theirs in zip(told, alone, strict=True):
            np.testing.assert_array_equal(mine[0], theirs[0])
            for name in COLUMNS:
                np.testing.assert_allclose(mine[1][name], theirs[1][name], atol=2e-4, err_msg=name)


def read(rank, world_size, path, folder, split, known):
    """In a rank: the tables of the same trajectories."""
    torch.set_num_threads(1)
    file = folder / f"address_{'_'.join(split)}"
    trainer = make_trainer(
        path,
        TrainerConfig(**split),
        mtp=DraftConfig(),
        draft_vocab=known,
        rank=rank,
        world_size=world_size,
        master=meet(rank, world_size, file) if world_size > 1 else None,
    )
    tables = trainer.draft_tables(pack(trajectories(), None, 4096, dp_size=split.get("dp", 1)))
    trainer.close()
    return tables
