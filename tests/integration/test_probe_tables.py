"""What the trainer says of every context: against its own sums, against the engine, split over ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlpipe.actors.trainer_worker import TrainerWorker
from rlpipe.batching.packing import pack
from rlpipe.config.draft import DraftConfig
from rlpipe.config.draft_vocab import read_draft_vocab, write_table
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import ClusterConfig, Config, ModelConfig, RunSettings
from rlpipe.config.spec import SpecConfig
from rlpipe.config.trainer import TrainerConfig
from rlpipe.diagnosis.probe import COLUMNS
from rlpipe.types import Trajectory
from tests.helpers.driven_engine import driven_engine
from tests.helpers.eagle3_drafts import write_random_draft
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


def played_by(engine, temperature: float) -> list[Trajectory]:
    """Rollouts of repetitive prompts, with their verify steps."""
    asked = [
        request(i, [7, 3 + i, 5, 7, 3 + i], max_new_tokens=50, temperature=temperature, record_drafts=True)
        for i in range(4)
    ]
    played = []
    for one, result in zip(asked, engine.generate(*asked), strict=True):
        trajectory = Trajectory(
            trajectory_id=one.request_id, group_id="g", instance_id="i", reward=0.0, prompt_length=5
        )
        trajectory.append_context(one.prompt_ids)
        trajectory.append_sampled(result)
        played.append(trajectory)
    return played


def worker_for(path, spec, folder, temperature) -> TrainerWorker:
    """A trainer's worker that trains no draft."""
    worker = TrainerWorker(
        Config(
            model=ModelConfig(path=str(path)),
            spec=spec,
            rollout=RolloutConfig(device="cpu", max_context=64, temperature=temperature),
            trainer=TrainerConfig(micro_batch_tokens=128),
            cluster=ClusterConfig(mode="inline"),
            run=RunSettings(dir=str(folder / "run"), steps=4),
        )
    )
    worker.start()
    return worker


@pytest.mark.parametrize("drafter", ["eagle3 reduced", "eagle3", "suffix"])
def test_other_drafts_have_tables_that_are_what_the_engine_verified(tmp_path, drafter):
    """Acceptance of every verified draft, at every depth; of EAGLE-3 the engine's own p and q.

    The EAGLE-3 draft is not trained, and sees the policy after an update all the same. Few tokens, so that
    deep drafts are accepted too.
    """
    path = write_random_checkpoint(tmp_path / "small", "mimo", vocab=8, head_scale=0.5)
    temperature, options = 0.8, {"drafter": "suffix"}
    if drafter != "suffix":
        ids = [0, 1, 3, 4, 5, 7] if "reduced" in drafter else None
        draft = write_random_draft(tmp_path / "draft", path, ids=ids, scale=0.3)
        options = {"drafter": "eagle3", "draft_path": str(draft)}
    spec = SpecConfig(mode="rejection", gamma=3, **options)

    worker = worker_for(path, spec, tmp_path, temperature)
    worker.step(make_groups(3, common=9, vocab=8))
    with driven_engine(path, "rejection", gamma=3, **options) as driven:
        driven.update(worker._trainer.export_weights(), 1)
        played = played_by(driven, temperature)
    tables = worker.probe(played)
    worker.close()

    compared, reached = 0, set()
    for trajectory, table in zip(played, tables, strict=True):
        assert set(table.values) == set(COLUMNS)
        row = {int(position): i for i, position in enumerate(table.positions)}
        for step in trajectory.drafts:
            for depth in range(min(step.num_accepted + 1, 3)):
                if step.position not in row:
                    continue
                values = {name: column[row[step.position], depth] for name, column in table.values.items()}
                if np.isnan(values["rejection"]):
                    continue  # beyond the end of the turn
                p, q = step.target_probs[depth], step.draft_probs[depth]
                accepted = depth < step.num_accepted
                if drafter == "suffix":
                    assert values["rejection"] == values["target_only"] == pytest.approx(p, abs=1e-4)
                    assert values["accept"] == values["top"] == accepted
                elif accepted:
                    assert values["accept"] == pytest.approx(min(1.0, q / p), abs=1e-3)
                compared += 1
                reached.add((depth, accepted))
    assert compared > 60 and {(0, False), (0, True), (1, True), (2, True)} <= reached


@pytest.mark.parametrize("known", [None, KNOWN], ids=["all", "reduced"])
def test_contexts_of_an_eagle3_draft_add_up_to_its_statistics(path, tmp_path, known):
    draft = write_random_draft(tmp_path / "draft", path, ids=known, scale=0.3)
    spec = SpecConfig(drafter="eagle3", draft_path=str(draft))
    worker = worker_for(path, spec, tmp_path, 1.0)
    trainer, batch = worker._make_draft_trainer(), pack(trajectories(), None, 64, share_prefixes=False)
    stats, tables = trainer.mtp_stats(batch), trainer.draft_tables(batch)
    worker.close()
    for depth in range(3):
        for name, field in (("rejection", "alpha"), *((n, n) for n in SUMS)):
            total = sum(np.nansum(table[1][name][:, depth]) for table in tables if table)
            assert total == pytest.approx(getattr(stats, field)[depth].item(), rel=1e-4), name


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
