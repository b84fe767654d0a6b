"""Training the draft: its gradient, its own clip and schedule, adaptation, resume, what it leaves alone."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from rlpipe.batching.packing import pack
from rlpipe.config.algo import AlgoConfig
from rlpipe.config.draft import DraftConfig, DraftTrain
from rlpipe.config.draft_objectives import AnchorWeighting, DraftObjective
from rlpipe.config.trainer import LrSchedule, Precision, Recompute, TrainerConfig
from rlpipe.drafts.loss import MtpStats
from rlpipe.models.checkpoint import read_weights
from tests.helpers.draft_oracle import draft_loss, read_layers
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import make_batch, make_trainer
from tests.helpers.trajectories import make_groups

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_leftovers")]

ALGO = AlgoConfig()
CONFIG = TrainerConfig(lr=1e-2, eps=1e-3)
ONLINE = DraftConfig(train=DraftTrain.ONLINE, lr=1e-2, clip_grad=0.0)
VISIT = replace(ONLINE, anchors=AnchorWeighting.VISIT)
FROZEN = DraftConfig()


@pytest.fixture
def path(tmp_path):
    return write_random_checkpoint(tmp_path / "model", "mimo", head_scale=0.5)


def batches(count=4, algo=ALGO, **options):
    return [make_batch(make_groups(seed, common=9), algo, **options) for seed in range(count)]


def adaptation(seed=0, common=9, budget=4096, **options):
    trajectories = [t for g in make_groups(seed, common=common) for t in g.trajectories]
    return pack(trajectories, None, budget, dp_size=1, **options)


def values(metrics):
    return {k: v.value() for k, v in metrics.items() if not k.startswith("timing_s")}


def gradients(trainer, draft):
    """Accumulated gradients of the draft, or of everything else, by name; copies."""
    return {
        name: parameter.main_grad.clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad and name.startswith("mtp.") is draft
    }


def weights_of(trainer, draft):
    return {k: w for k, w in trainer.export_weights().items() if (".mtp_layers." in k) is draft}


def assert_equal(found, expected):
    assert found.keys() == expected.keys() and found
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("mimo", 1),
        ("mimo", 3),
        ("glm4_moe", 1),
        ("deepseek_v3", 1),
        ("qwen3_next", 1),
        ("qwen3_5", 1),
        ("qwen3_5_moe", 1),
    ],
    ids=[
        *("one layer", "a layer per depth", "a layer with experts", "latent attention"),
        *("qwen3 next", "qwen3.5", "qwen3.5 moe"),
    ],
)
@pytest.mark.parametrize("common", [0, 9], ids=["own prompts", "shared prompts"])
@pytest.mark.parametrize(
    "mtp",
    [
        ONLINE,
        VISIT,
        replace(ONLINE, objective=DraftObjective.KL),
        replace(VISIT, objective=DraftObjective.VERIFY_STEPS),
    ],
    ids=lambda mtp: f"{mtp.objective}-{mtp.anchors}",
)
def test_the_step_of_the_draft_equals_plain_autograd_on_the_reference_layer(
    tmp_path, common, mtp, family, layers
):
    """A large epsilon makes AdamW nearly linear in the gradient, so the weights tell of its direction."""
    path = write_random_checkpoint(tmp_path / "model", family, head_scale=0.5, mtp_layers=layers)
    groups = make_groups(common=common)
    for t in (t for g in groups for t in g.trajectories):
        t.token_ids[-1] = 0  # after the last sampled token: not read
    trainer = make_trainer(path, replace(CONFIG, clip_grad=0.0), ALGO, mtp)
    metrics = values(trainer.train_step(make_batch(groups, ALGO, budget=400, temperature=0.7)))
    exported = trainer.export_weights()

    reference = read_layers(path)
    optimizer = torch.optim.AdamW(
        reference.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-3, weight_decay=0
    )
    loss, stats = draft_loss(path, reference, [t for g in groups for t in g.trajectories], mtp, 0.7)
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in reference.parameters()]).sum().sqrt().item()
    optimizer.step()
    assert metrics["mtp/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["mtp/grad_norm"] == pytest.approx(norm, rel=1e-3) and norm > 1e-3
    for name, expected in values(stats.metrics()).items():
        assert metrics[name] == pytest.approx(expected, rel=1e-4, abs=1e-5), name
    for name, weight in reference.state_dict().items():
        torch.testing.assert_close(exported[f"model.mtp_layers.{name}"], weight, atol=1e-4, rtol=0)


@pytest.mark.parametrize("recompute", Recompute)
def test_co_training_leaves_every_gradient_of_the_backbone_bit_identical(path, recompute):
    algo, told = AlgoConfig(kl_coef=0.1, entropy_coef=0.01), {}
    for mtp in (FROZEN, ONLINE, VISIT):
        trainer = make_trainer(path, replace(CONFIG, recompute=recompute), algo, mtp)
        trainer.train_step(batches(1, algo)[0])
        told[mtp.train, mtp.anchors] = gradients(trainer, draft=False), weights_of(trainer, draft=False)
        if mtp is not FROZEN:
            for name, gradient in gradients(trainer, draft=True).items():
                assert gradient.any(), name  # a detached input plus recomputation would give exactly 0
        trainer.close()
    frozen, *others = told.values()
    for gradient, weights in others:
        assert_equal(gradient, frozen[0])
        assert_equal(weights, frozen[1])


@pytest.mark.parametrize("equal", [[1], [0, 1]], ids=["one group of two", "all groups"])
@pytest.mark.parametrize("mtp", [ONLINE, VISIT], ids=lambda mtp: str(mtp.anchors))
def test_the_draft_learns_from_groups_without_reward_variance_too(path, equal, mtp):
    """Plain autograd over all trajectories gives its step; the policy's gradient is what it was without."""
    groups = make_groups(common=9)
    for t in (t for number in equal for t in groups[number].trajectories):
        t.reward = 1.0
    frozen = make_trainer(path, CONFIG)
    alone = values(frozen.train_step(make_batch(groups, ALGO, draft=False)))
    expected = gradients(frozen, draft=False), weights_of(frozen, draft=False)
    frozen.close()
    trainer = make_trainer(path, CONFIG, ALGO, mtp)
    before, batch = weights_of(trainer, draft=False), make_batch(groups, ALGO)
    assert batch.skipped == 4 * len(equal)
    metrics = values(trainer.train_step(batch))
    found = gradients(trainer, draft=False), weights_of(trainer, draft=False)
    learnt = weights_of(trainer, draft=True)
    trainer.close()

    for name, gradient in expected[0].items():
        torch.testing.assert_close(found[0][name], gradient, rtol=1e-6, atol=1e-9)
    assert {name: metrics[name] for name in alone} == pytest.approx(alone, rel=1e-6)
    if len(equal) == len(groups):
        assert_equal(found[1], before)
        assert metrics["actor/idle_steps"] == 1

    reference = read_layers(path)
    optimizer = torch.optim.AdamW(
        reference.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-3, weight_decay=0
    )
    loss, stats = draft_loss(path, reference, [t for g in groups for t in g.trajectories], mtp, 1.0)
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in reference.parameters()]).sum().sqrt().item()
    optimizer.step()
    assert metrics["mtp/grad_norm"] == pytest.approx(norm, rel=1e-3) and norm > 1e-3
    for name, value in values(stats.metrics()).items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    for name, weight in reference.state_dict().items():
        torch.testing.assert_close(learnt[f"model.mtp_layers.{name}"], weight, atol=1e-4, rtol=0)


def test_a_draft_that_is_frozen_on_the_way_stays_and_the_policy_goes_on_as_ever(path):
    """Steps 3 and 4 without it: the draft is that of step 2, the policy that of an undisturbed run."""
    told = {}
    for freeze_after in (2, 4):
        trainer = make_trainer(path, CONFIG, ALGO, ONLINE)
        for step, batch in enumerate(batches(4)):
            if step == freeze_after:
                trainer.freeze_draft()
            metrics = trainer.train_step(batch)
            if step == 1:
                at_two = weights_of(trainer, draft=True)
        assert ("mtp/loss" in metrics) is (freeze_after == 4)
        told[freeze_after] = weights_of(trainer, draft=True), weights_of(trainer, draft=False)
        trainer.close()
    assert_equal(told[2][0], at_two)
    assert any(not torch.equal(told[4][0][name], weight) for name, weight in at_two.items())
    assert_equal(told[2][1], told[4][1])


def test_recomputation_changes_no_gradient_of_the_draft(path):
    told = []
    for recompute in Recompute:
        trainer = make_trainer(path, replace(CONFIG, recompute=recompute), ALGO, ONLINE)
        trainer.train_step(batches(1)[0])
        told.append(gradients(trainer, draft=True))
        trainer.close()
    for name, gradient in told[0].items():
        torch.testing.assert_close(told[1][name], gradient, rtol=1e-5, atol=1e-7)


def test_clipping_one_group_never_changes_the_other(path):
    """One step: later ones differ as the draft learns from the backbone as it then is."""
    told = {}
    for policy, draft in ((0.0, 0.0), (1e-3, 0.0), (0.0, 1e-3)):
        config, mtp = replace(CONFIG, clip_grad=policy), replace(ONLINE, clip_grad=draft)
        trainer = make_trainer(path, config, ALGO, mtp)
        metrics = values(trainer.train_step(batches(1)[0]))
        told[policy, draft] = metrics, weights_of(trainer, False), weights_of(trainer, True)
        trainer.close()
    free, policy, draft = told.values()
    for name in ("actor/grad_norm", "mtp/grad_norm"):  # before clipping
        assert free[0][name] == policy[0][name] == draft[0][name] > 1e-2
    assert_equal(policy[2], free[2])
    assert_equal(draft[1], free[1])
    for clipped, which in ((policy, 1), (draft, 2)):
        assert any(not torch.equal(w, free[which][k]) for k, w in clipped[which].items())


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "distributed optimizer"])
@pytest.mark.parametrize("precision", Precision)
def test_a_resumed_run_equals_an_uninterrupted_one_at_every_step(path, tmp_path, sharded, precision):
    """The groups have had different numbers of steps: the draft learns in every second one only."""
    config = replace(CONFIG, distributed_optimizer=sharded, precision=precision, eps=1e-8, warmup_steps=4)
    mtp = replace(VISIT, interval=2, warmup_steps=3, clip_grad=0.5)
    work = batches(7)
    trainer = make_trainer(path, config, ALGO, mtp)
    for batch in work[:3]:
        trainer.train_step(batch)
    trainer.save(tmp_path / "checkpoint")
    uninterrupted = [values(trainer.train_step(batch)) for batch in work[3:]]
    weights = trainer.export_weights()
    trainer.close()

    trainer = make_trainer(path, config, ALGO, mtp)
    trainer.load(tmp_path / "checkpoint")
    assert trainer.optimizer.updates == {"policy": 3, "mtp": 1}
    assert [values(trainer.train_step(batch)) for batch in work[3:]] == uninterrupted
    assert_equal(trainer.export_weights(), weights)
    trainer.close()


def test_the_draft_learns_in_every_nth_step_only_and_rests_in_the_others(path):
    trainer = make_trainer(path, CONFIG, ALGO, replace(ONLINE, interval=3))
    moved, told = [], []
    for batch in batches(6):
        before = weights_of(trainer, True)
        told.append(values(trainer.train_step(batch)))
        moved.append(any(not torch.equal(w, before[k]) for k, w in weights_of(trainer, True).items()))
    trainer.close()
    assert moved == [False, False, True] * 2
    assert [any(name.startswith("mtp/") for name in step) for step in told] == moved


def test_the_draft_has_its_own_warm_up_and_schedule(path):
    mtp = replace(ONLINE, lr=3e-3, min_lr=1e-3, warmup_steps=2, lr_schedule=LrSchedule.LINEAR)
    trainer = make_trainer(path, CONFIG, ALGO, mtp, total_steps=6)
    told = [values(trainer.train_step(batch)) for batch in batches(6)]
    trainer.close()
    assert [step["actor/lr"] for step in told] == [1e-2] * 6
    expected = [1.5e-3, 3e-3, 2.5e-3, 2e-3, 1.5e-3, 1e-3]
    assert [step["mtp/lr"] for step in told] == pytest.approx(expected)


def test_a_draft_gradient_that_is_not_finite_is_dropped_and_the_policy_steps_on(path):
    told = {}
    for poisoned in (False, True):
        trainer = make_trainer(path, CONFIG, ALGO, ONLINE)
        work, before = batches(2), weights_of(trainer, True)
        if poisoned:
            parameter = trainer.model.mtp.layers[0].eh_proj.weight
            handle = parameter.register_hook(lambda gradient: gradient * float("nan"))
        first = values(trainer.train_step(work[0]))
        if poisoned:
            handle.remove()
            assert first["mtp/skipped_steps"] == 1 and "mtp/grad_norm" not in first
            assert_equal(weights_of(trainer, True), before)
        assert first["actor/skipped_steps"] == 0
        told[poisoned] = values(trainer.train_step(work[1])), weights_of(trainer, False)
        assert trainer.policy_version == 2 and told[poisoned][0]["mtp/skipped_steps"] == 0
        trainer.close()
    assert told[True][0]["actor/grad_norm"] == told[False][0]["actor/grad_norm"]
    assert_equal(told[True][1], told[False][1])


@pytest.mark.parametrize("mtp", [ONLINE, VISIT], ids=["uniform", "visit"])
def test_the_step_depends_neither_on_the_cut_nor_on_sharing(path, mtp):
    told = {}
    for budget, rows in ((64, False), (4096, False), (4096, True)):
        trainer = make_trainer(path, CONFIG, ALGO, mtp)
        trainer._runtime.te = rows  # as with layers of TransformerEngine, which read padded rows only
        metrics = values(trainer.train_step(batches(1, budget=budget, share=not rows)[0]))
        told[budget, rows] = metrics, weights_of(trainer, True)
        trainer.close()
    expected, weights = told.pop((4096, False))
    for metrics, others in told.values():
        for name in (n for n in expected if n.startswith("mtp/")):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        for name, weight in weights.items():
            torch.testing.assert_close(others[name], weight, atol=1e-4, rtol=0)


def test_adaptation_trains_the_draft_and_leaves_the_rest_bit_identical(path):
    before = read_weights(path)
    trainer = make_trainer(path, replace(CONFIG, eps=1e-8), ALGO, ONLINE, adapt_only=True)
    told = [values(trainer.adapt_step(adaptation())) for _ in range(12)]
    after = trainer.export_weights()
    assert trainer.policy_version == 12
    trainer.close()
    for name, weight in before.items():
        assert torch.equal(after[name], weight) != (".mtp_layers." in name), name
    assert told[-1]["mtp/loss"] < told[0]["mtp/loss"] - 0.01
    assert told[-1]["mtp/alpha/depth_1"] > told[0]["mtp/alpha/depth_1"]
    assert not any(name.startswith("actor/") for name in told[0])


def test_adaptation_is_resumable(path, tmp_path):
    config, mtp = replace(CONFIG, distributed_optimizer=True), replace(VISIT, warmup_steps=3)
    work = [adaptation(seed, minibatches=2) for seed in range(4)]
    trainer = make_trainer(path, config, ALGO, mtp, adapt_only=True)
    trainer.adapt_step(work[0])
    trainer.save(tmp_path / "checkpoint")
    uninterrupted = [values(trainer.adapt_step(batch)) for batch in work[1:]]
    trainer.close()
    trainer = make_trainer(path, config, ALGO, mtp, adapt_only=True)
    trainer.load(tmp_path / "checkpoint")
    assert trainer.policy_version == 2
    assert [values(trainer.adapt_step(batch)) for batch in work[1:]] == uninterrupted
    trainer.close()


def test_adaptation_takes_the_step_that_co_training_takes(path):
    trainer = make_trainer(path, CONFIG, ALGO, ONLINE)
    batch = make_batch(make_groups(common=9), AlgoConfig(skip_zero_advantage=False))
    online = values(trainer.train_step(batch)), weights_of(trainer, True)
    trainer.close()
    frozen = replace(ONLINE, train=DraftTrain.OFF)  # in RL; adaptation trains it all the same
    trainer = make_trainer(path, CONFIG, ALGO, frozen, adapt_only=True)
    alone = values(trainer.adapt_step(batch)), weights_of(trainer, True)
    trainer.close()
    assert {k: v for k, v in online[0].items() if k.startswith("mtp/")} == alone[0]
    assert_equal(alone[1], online[1])


def test_statistics_are_those_of_the_step_and_change_nothing(path):
    trainer = make_trainer(path, CONFIG, ALGO, VISIT, adapt_only=True)
    batch = adaptation(budget=64)
    before, stats = trainer.export_weights(), trainer.mtp_stats(batch)
    assert not stats.alpha.requires_grad and stats.emitted > stats.verify_steps > 0
    assert_equal(trainer.export_weights(), before)
    metrics = values(trainer.adapt_step(batch))
    for name, value in values(stats.metrics()).items():
        assert metrics[name] == pytest.approx(value, rel=1e-6), name
    trainer.close()


def test_a_frozen_draft_is_scored_too(path):
    trainer = make_trainer(path, CONFIG)
    assert 0 < trainer.mtp_stats(adaptation()).metrics()["mtp/alpha/depth_3"].value() < 1
    trainer.close()


def test_a_step_in_which_nothing_is_drafted_is_left_out(path):
    groups = make_groups(longest=2)  # turns of one token
    trainer = make_trainer(path, CONFIG, ALGO, ONLINE)
    before = weights_of(trainer, True)
    metrics = values(trainer.train_step(make_batch(groups, ALGO)))
    assert metrics["mtp/skipped_steps"] == 1 and metrics["actor/skipped_steps"] == 0
    assert_equal(weights_of(trainer, True), before)
    trainer.close()


def test_each_kind_of_step_belongs_to_its_kind_of_trainer(path):
    trainer = make_trainer(path, CONFIG, ALGO, ONLINE)
    with pytest.raises(ValueError, match="adapt_only=True"):
        trainer.adapt_step(adaptation())
    trainer.close()
    trainer = make_trainer(path, adapt_only=True)
    with pytest.raises(ValueError, match="use adapt_step"):
        trainer.train_step(batches(1)[0])
    trainer.close()


def test_a_checkpoint_without_a_draft_cannot_train_or_score_one(tmp_path):
    path = write_random_checkpoint(tmp_path / "model", "qwen2")
    for options in ({"mtp": ONLINE}, {"adapt_only": True}):
        with pytest.raises(ValueError, match="has no MTP layer"):
            make_trainer(path, **options)
    trainer = make_trainer(path)
    with pytest.raises(ValueError, match="has no MTP layer"):
        trainer.mtp_stats(adaptation())
    trainer.close()


def test_several_layers_come_back_bit_for_bit(tmp_path):
    path = write_random_checkpoint(tmp_path / "model", "mimo", mtp_layers=2)
    trainer = make_trainer(path)
    assert_equal(trainer.export_weights(), read_weights(path))
    trainer.close()


def test_every_metric_of_the_draft_is_declared_with_its_kind(path):
    from rlpipe.metrics.names import declared

    trainer = make_trainer(path, CONFIG, ALGO, ONLINE)
    metrics = trainer.train_step(batches(1)[0])
    trainer.close()
    assert {"mtp/loss", "mtp/lr", "mtp/grad_norm", "mtp/alpha/depth_3"} <= metrics.keys()
    for name, value in metrics.items():
        assert declared(name).kind.accepts(value), name


def test_statistics_have_one_sum_per_field():
    """`no_stats` names the scalar fields; a new one must not be missed."""
    from rlpipe.trainer.draft import no_stats

    nothing = no_stats(2, torch.device("cpu"))
    assert {f.name for f in fields(MtpStats) if getattr(nothing, f.name).dim() == 0} == {
        "verify_steps",
        "emitted",
        "loss",
        "weight",
    }
