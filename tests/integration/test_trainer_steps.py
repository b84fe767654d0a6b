"""Training: resume, the frozen draft, refused gradients, skipped work, checkpoints."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from rlpipe.config.algo import AlgoConfig
from rlpipe.config.trainer import LrSchedule, Precision, TrainerConfig
from rlpipe.models.checkpoint import is_mtp_weight, read_config, read_weights
from rlpipe.types import TrajectoryStatus
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import make_batch, make_trainer
from tests.helpers.trajectories import make_groups

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_leftovers")]


CONFIG = TrainerConfig(lr=1e-2, warmup_steps=2, lr_schedule=LrSchedule.COSINE, weight_decay=0.01)
ALGO = AlgoConfig()


@pytest.fixture
def path(tmp_path):
    return write_random_checkpoint(tmp_path / "model", "mimo")


def batches(algo=ALGO, count=6):
    return [make_batch(make_groups(seed), algo) for seed in range(count)]


def run(trainer, work):
    """What each step reports, without its timing."""
    steps = [{k: v.value() for k, v in trainer.train_step(batch).items()} for batch in work]
    return [{k: v for k, v in step.items() if not k.startswith("timing_s")} for step in steps]


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "distributed optimizer"])
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("done", [0, 2])
def test_a_resumed_run_equals_an_uninterrupted_one_at_every_step(path, tmp_path, sharded, precision, done):
    """Every step is compared: a shared optimizer `step` tensor shows from the second one on only."""
    config = replace(CONFIG, distributed_optimizer=sharded, precision=precision)
    algo = AlgoConfig(kl_coef=0.1)
    work = batches(algo, count=5)
    trainer = make_trainer(path, config, algo)
    run(trainer, work[:done])
    trainer.save(tmp_path / "checkpoint")
    uninterrupted, weights = run(trainer, work[done:]), trainer.export_weights()
    trainer.close()

    trainer = make_trainer(path, config, algo)
    trainer.load(tmp_path / "checkpoint")
    assert trainer.policy_version == done
    resumed, resumed_weights = run(trainer, work[done:]), trainer.export_weights()
    trainer.close()
    assert resumed == uninterrupted
    for name, weight in weights.items():
        assert torch.equal(resumed_weights[name], weight), name


def test_the_draft_stays_bit_identical_while_the_target_moves(path):
    before, trainer = read_weights(path), make_trainer(path, CONFIG)
    run(trainer, batches())
    after = trainer.export_weights()
    trainer.close()
    for name, weight in before.items():
        assert torch.equal(after[name], weight) == is_mtp_weight(name), name


def test_the_draft_is_never_run_in_a_policy_step(path):
    trainer = make_trainer(path, CONFIG)
    calls = []
    trainer.model.mtp.register_forward_hook(lambda *_: calls.append(1))
    trainer.model.mtp.layers[0].register_forward_hook(lambda *_: calls.append(1))
    run(trainer, batches(count=1))
    trainer.close()
    assert calls == []


def test_a_gradient_that_is_not_finite_is_never_applied_and_is_counted(path):
    trainer, work = make_trainer(path, CONFIG), batches(count=3)
    run(trainer, work[:1])
    before = trainer.export_weights()
    poisoned = batches(count=1)[0]
    micro = poisoned.minibatches[0].shards[0][0]
    micro.advantages[micro.mask > 0] = float("nan")
    metrics = run(trainer, [poisoned])[0]
    assert metrics["actor/skipped_steps"] == 1 and "actor/grad_norm" not in metrics
    assert trainer.policy_version == 1
    for name, weight in trainer.export_weights().items():
        assert torch.equal(weight, before[name]), name
    healthy = run(trainer, work[1:])
    trainer.close()

    trainer = make_trainer(path, CONFIG)
    assert run(trainer, work)[1:] == healthy  # the refused step left no trace in the optimizer either
    trainer.close()


def test_a_batch_without_trainable_tokens_changes_nothing(path):
    groups = make_groups()
    for t in (t for g in groups for t in g.trajectories):
        t.status, t.reward = TrajectoryStatus.MASKED, None
    trainer = make_trainer(path, CONFIG)
    metrics = run(trainer, [make_batch(groups, ALGO)])[0]
    weights = trainer.export_weights()
    trainer.close()
    assert metrics["actor/skipped_steps"] == 1
    assert all(torch.equal(weight, weights[name]) for name, weight in read_weights(path).items())


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "distributed optimizer"])
@pytest.mark.parametrize("skip", [True, False])
def test_a_batch_without_a_signal_leaves_the_policy_and_its_optimizer_alone(path, sharded, skip):
    """Its gradient is 0, but AdamW would go on with the momentum of the steps before, and decay."""
    groups = make_groups()
    for t in (t for g in groups for t in g.trajectories):
        t.reward = 1.0
    algo = AlgoConfig(skip_zero_advantage=skip)
    work, idle = batches(algo, count=3), make_batch(groups, algo)
    config = replace(CONFIG, distributed_optimizer=sharded)
    trainer = make_trainer(path, config, algo)
    run(trainer, work[:2])
    before = trainer.export_weights()
    metrics = run(trainer, [idle])[0]
    assert (metrics["actor/idle_steps"], metrics["actor/skipped_steps"]) == (1, 0)
    assert trainer.policy_version == 3 and "actor/grad_norm" not in metrics
    for name, weight in trainer.export_weights().items():
        assert torch.equal(weight, before[name]), name
    after = run(trainer, work[2:])
    trainer.close()

    trainer = make_trainer(path, config, algo)
    assert run(trainer, work)[2:] == after  # moments, step count and learning rate are as they were
    trainer.close()


def test_leaving_out_zero_advantages_changes_no_gradient(path):
    groups = make_groups(groups=3)
    for t in groups[1].trajectories:
        t.reward = 1.0
    norms = {}
    for skip in (True, False):
        algo = AlgoConfig(skip_zero_advantage=skip)
        trainer, batch = make_trainer(path, CONFIG, algo), make_batch(groups, algo)
        assert batch.skipped == (4 if skip else 0)
        metrics = run(trainer, [batch])[0]
        norms[skip] = metrics["actor/grad_norm"], metrics["actor/pg_loss"]
        trainer.close()
    assert norms[True] == pytest.approx(norms[False], rel=1e-5)


def test_the_micro_batch_size_does_not_change_the_step(path):
    outcomes = []
    for budget in (64, 4096):
        trainer = make_trainer(path, CONFIG)
        outcomes.append(run(trainer, [make_batch(make_groups(common=9), ALGO, budget=budget)])[0])
        trainer.close()
    assert outcomes[0] == {k: pytest.approx(v, rel=1e-4, abs=1e-6) for k, v in outcomes[1].items()}


def test_several_steps_per_batch_compare_with_the_policy_at_its_start(path):
    algo = AlgoConfig(ppo_epochs=2, minibatches=2)
    trainer = make_trainer(path, CONFIG, algo)
    metrics = run(trainer, batches(algo, count=1))[0]
    trainer.close()
    assert trainer.policy_version == 4
    assert metrics["actor/ppo_kl"] != 0  # later steps are off the starting policy


def test_the_reference_stays_at_the_start_weights(path):
    algo = AlgoConfig(kl_coef=0.01)
    trainer = make_trainer(path, CONFIG, algo)
    kl = [step["actor/kl_loss"] for step in run(trainer, batches(algo))]
    trainer.close()
    assert kl[0] == pytest.approx(0.0, abs=1e-9) and 0 < kl[1] < kl[-1]


def test_the_learning_rate_warms_up_and_ends_at_its_minimum(path):
    trainer = make_trainer(path, replace(CONFIG, min_lr=1e-3), total_steps=6)
    rates = [step["actor/lr"] for step in run(trainer, batches())]
    trainer.close()
    assert rates[:2] == pytest.approx([5e-3, 1e-2])
    assert rates[-1] == pytest.approx(1e-3) and rates[1:] == sorted(rates[1:], reverse=True)


def test_clipping_bounds_the_gradient_of_the_step(path):
    """With AdamW the first step does not depend on the gradient's size, so momentum shows the clipping."""
    moments = {}
    for clip in (0.0, 1e-3):
        trainer = make_trainer(path, replace(CONFIG, clip_grad=clip))
        norm = run(trainer, batches(count=1))[0]["actor/grad_norm"]
        states = trainer.optimizer.inner.chained_optimizers[0].optimizer.state.values()
        moment = torch.cat([state["exp_avg"].flatten() for state in states]).norm().item()
        moments[clip] = moment / (1 - CONFIG.beta1)
        trainer.close()
    assert moments[0.0] == pytest.approx(norm, rel=1e-4) and moments[1e-3] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hugging_face_checkpoint_keeps_types_and_survives_a_round_trip(tmp_path, dtype):
    source = write_random_checkpoint(tmp_path / "source", "mimo", dtype=dtype)
    trainer = make_trainer(source)
    trainer.save_hf(tmp_path / "out")
    trainer.close()
    before, after = read_weights(source), read_weights(tmp_path / "out")
    assert before.keys() == after.keys() and read_config(source) == read_config(tmp_path / "out")
    assert all(torch.equal(before[k], after[k]) and after[k].dtype is dtype for k in before)


def test_a_trained_hugging_face_checkpoint_starts_a_trainer_with_the_same_weights(path, tmp_path):
    trainer = make_trainer(path, CONFIG)
    run(trainer, batches(count=2))
    trained = trainer.export_weights()
    trainer.save_hf(tmp_path / "out")
    trainer.close()
    trainer = make_trainer(tmp_path / "out")
    assert all(torch.equal(w, trained[k]) for k, w in trainer.export_weights().items())
    trainer.close()


def test_a_checkpoint_appears_complete_or_not_at_all(path, tmp_path, monkeypatch):
    from rlpipe.trainer import checkpoint

    trainer = make_trainer(path, CONFIG)

    def fail(*args, **options):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "_write", fail)
    with pytest.raises(OSError, match="disk full"):
        trainer.save(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()
    monkeypatch.undo()
    trainer.save(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="never overwritten"):
        trainer.save(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="holds no trainer checkpoint"):
        trainer.load(tmp_path)
    trainer.load(tmp_path / "checkpoint")
    trainer.close()


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "distributed optimizer"])
def test_a_copied_state_is_written_as_it_was_while_training_goes_on(path, tmp_path, sharded):
    """Byte for byte what a checkpoint at that moment holds, after steps that changed everything."""
    trainer = make_trainer(path, replace(CONFIG, distributed_optimizer=sharded))
    work = batches()
    run(trainer, work[:2])
    trainer.save(tmp_path / "at_once")
    then = trainer.export_weights()
    parts = trainer.begin_save(tmp_path / "later", tmp_path / "hf")
    run(trainer, work[2:4])
    writer = threading.Thread(target=lambda: [part.write() for part in parts])
    writer.start()
    run(trainer, work[4:])
    writer.join()
    assert not (tmp_path / "later").exists(), "it has its name before it is complete"
    for part in parts:
        part.finish()
    now = trainer.export_weights()
    trainer.close()
    files = {f.name for f in (tmp_path / "at_once").iterdir()} - {".metadata"}  # which holds paths
    assert {"__0_0.distcp", "common.pt"} <= files
    for name in files:
        assert (tmp_path / "later" / name).read_bytes() == (tmp_path / "at_once" / name).read_bytes(), name
    written = read_weights(tmp_path / "hf")
    assert all(torch.equal(written[name], then[name].to(weight.dtype)) for name, weight in written.items())
    moved = [name for name in written if not torch.equal(now[name], then[name])]
    assert len(moved) > 5, "nothing was learnt meanwhile: anything would be equal"


def test_unknown_algorithm_names_are_refused_at_launch(path):
    with pytest.raises(ValueError, match=r"algo.policy_loss='grpo' is not registered"):
        make_trainer(path, algo=AlgoConfig(policy_loss="grpo"))


def test_a_process_runs_one_trainer_at_a_time(path):
    trainer = make_trainer(path)
    with pytest.raises(ValueError, match="already runs a trainer"):
        make_trainer(path)
    trainer.close()


def test_every_metric_of_a_step_is_declared_with_its_kind(path):
    from rlpipe.metrics.names import declared

    algo = AlgoConfig(kl_coef=0.1, entropy_coef=0.1)
    trainer = make_trainer(path, CONFIG, algo)
    for name, value in trainer.train_step(batches(algo, count=1)[0]).items():
        assert declared(name).kind.accepts(value), name
    trainer.close()
