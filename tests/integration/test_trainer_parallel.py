"""Trainers of several ranks on gloo do what one process does, whatever the ranks share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlpipe.config.algo import AlgoConfig
from rlpipe.config.draft import DraftConfig, DraftTrain
from rlpipe.config.draft_objectives import AnchorWeighting, DraftObjective
from rlpipe.config.trainer import Recompute, TrainerConfig
from tests.helpers.gradients import gradients_and_training
from tests.helpers.parallel import run_ranks
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import Run, train
from tests.helpers.trajectories import make_groups

pytestmark = pytest.mark.integration

# with a small epsilon AdamW steps by the sign of a gradient and turns its rounding into large differences
ALONE = TrainerConfig(lr=1e-2, eps=1e-3)
ALGO = AlgoConfig(kl_coef=0.1, entropy_coef=0.01, ppo_epochs=2)
SPLITS = {
    "tp": replace(ALONE, tp=2),
    "dp": replace(ALONE, dp=2),
    "dp_sharded": replace(ALONE, dp=2, distributed_optimizer=True),
    "cp": replace(ALONE, cp=2),
    "pp": replace(ALONE, pp=2),
    "sp": replace(ALONE, tp=2, sp=True),
}
RECOMPUTED = {  # the backward pass runs parts of the forward one again, collectives too
    "pp, all again": replace(ALONE, pp=2, recompute=Recompute.FULL),
    "pp, MLPs again": replace(ALONE, pp=2, recompute=Recompute.SELECTIVE),
    "cp, all again": replace(ALONE, cp=2, recompute=Recompute.FULL),
}
QUARTERS = {  # of four ranks
    "pp x sp": replace(ALONE, pp=2, tp=2, sp=True),
    "sp x ep": replace(ALONE, tp=2, sp=True, dp=2, ep=2),
    "pp x dp": replace(ALONE, pp=2, dp=2, distributed_optimizer=True),
    "pp x cp": replace(ALONE, pp=2, cp=2),
    "pp x ep": replace(ALONE, pp=2, dp=2, ep=2),
    "cp x dp": replace(ALONE, cp=2, dp=2),
    "cp x sp": replace(ALONE, cp=2, tp=2, sp=True),
}
QUARTERED = {"glm4_moe": [name for name in QUARTERS if name != "cp x sp"], "qwen3_next": ["cp x sp"]}
EXPERTS = {  # ranks share the experts of a mixture, too
    "ep": replace(ALONE, dp=2, ep=2),
    "ep_sharded": replace(ALONE, dp=2, ep=2, distributed_optimizer=True),
    "ep_of_cp": replace(ALONE, cp=2, ep=2),
}
HYBRID_SIZES = ("tp", "cp", "pp")  # heads, tokens and layers of delta nets on two ranks
MIXTURES = ("qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next")
ONLINE = DraftConfig(train=DraftTrain.ONLINE, lr=1e-2, clip_grad=0.1)
DRAFTS = {
    "e2e_tv": ONLINE,
    "experts": ONLINE,  # a draft whose layer is a mixture of experts
    "latent": ONLINE,  # and has latent attention
    "gated": ONLINE,  # and whose attention has an output gate
    "kl": replace(ONLINE, objective=DraftObjective.KL),
    "visit": replace(ONLINE, anchors=AnchorWeighting.VISIT),  # needs the totals of all ranks
    "ppow": replace(ONLINE, objective=DraftObjective.PPOW),
}

REFUSED = {("ppow", split) for split in ("cp", "pp", "sp")}  # by the settings
TAUGHT = [(k, s) for k in DRAFTS for s in SPLITS if (k, s) not in REFUSED]
TAUGHT += [(k, s) for k in ("experts", "gated") for s in RECOMPUTED]
TIED = "mimo tied"  # a head that is the embedding, which the MTP layer reads, too
DERIVED = [
    (model, split)
    for model in ("mimo", TIED, "qwen3", *MIXTURES)
    for split in ("tp", "cp", "pp", "sp", *(["ep"] if model in MIXTURES else []))
]


def splits_of(model):
    """Sizes that a model is trained with."""
    return SPLITS | (EXPERTS if model in MIXTURES else {})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Seven families trained alone and split, and runs continued on other sizes; a launch per world size."""
    folder = tmp_path_factory.mktemp("models")
    # 61 tokens: tensor parallelism has to pad the vocabulary
    models = {  # mimo's last pipeline stage has one of its three layers
        "mimo": write_random_checkpoint(folder / "mimo", "mimo", vocab=61, layers=3),
        TIED: write_random_checkpoint(folder / TIED, "mimo", vocab=61, tie=True),
        "qwen3": write_random_checkpoint(folder / "qwen3", "qwen3", vocab=64, tie=True),
        "qwen3_moe": write_random_checkpoint(folder / "qwen3_moe", "qwen3_moe", vocab=61),
        "glm4_moe": write_random_checkpoint(folder / "glm4_moe", "glm4_moe", vocab=61),
        "deepseek_v3": write_random_checkpoint(folder / "deepseek_v3", "deepseek_v3", vocab=61),
        "qwen3_next": write_random_checkpoint(folder / "qwen3_next", "qwen3_next", vocab=61),
    }
    groups = [make_groups(seed, vocab=61, common=7 * (seed > 0)) for seed in range(3)]

    def run(model, config, work, **files):
        return Run(path=models[model], config=config, algo=ALGO, groups=work, **files)

    def first(model):
        """Batches of a family's runs; one batch is two optimizer steps, and only mimo goes on to another."""
        return groups[:2] if model == "mimo" else groups[1:2]

    def draft(kind, config):
        others = {"experts": "glm4_moe", "latent": "deepseek_v3", "gated": "qwen3_next"}
        path = models[others.get(kind, "mimo")]
        return Run(path=path, config=config, algo=AlgoConfig(), groups=groups[:2], mtp=DRAFTS[kind])

    sharded = replace(ALONE, distributed_optimizer=True)
    alone = {f"{model}/alone": run(model, ALONE, first(model)) for model in models if model != TIED}
    alone |= {f"draft/{kind}": draft(kind, ALONE) for kind in DRAFTS}
    alone["first"] = run("mimo", ALONE, groups[:2], save=folder / "saved")
    alone["then"] = run("mimo", ALONE, groups[2:], load=folder / "saved")
    alone["first sharded"] = run("mimo", sharded, groups[:2], save=folder / "saved sharded")
    split = {
        f"{model}/{name}": run(model, config, first(model))
        for model in models
        if model != TIED
        for name, config in splits_of(model).items()
    }
    alone["experts first"] = run("qwen3_moe", ALONE, groups[:2], save=folder / "saved experts")
    alone["experts then"] = run("qwen3_moe", ALONE, groups[2:], load=folder / "saved experts")
    split["experts then ep"] = run("qwen3_moe", EXPERTS["ep"], groups[2:], load=folder / "saved experts")
    alone["hybrid first"] = run("qwen3_next", ALONE, groups[:2], save=folder / "saved hybrid")
    alone["hybrid then"] = run("qwen3_next", ALONE, groups[2:], load=folder / "saved hybrid")
    for name in HYBRID_SIZES:
        work = run("qwen3_next", SPLITS[name], groups[2:], load=folder / "saved hybrid")
        split[f"hybrid then {name}"] = work
    split |= {f"draft/{kind}/{name}": draft(kind, (SPLITS | RECOMPUTED)[name]) for kind, name in TAUGHT}
    for name, saved in (
        ("pp", "saved"),
        ("tp", "saved"),
        ("sp", "saved"),
        ("dp", "saved"),
        ("cp", "saved"),
        ("dp_sharded", "saved sharded"),
    ):
        split[f"then {name}"] = run("mimo", SPLITS[name], groups[2:], load=folder / saved)
    split["pp first"] = run("mimo", SPLITS["pp"], groups[:2], save=folder / "saved pp")
    for name in ("tp", "dp", "cp"):
        split[f"pp then {name}"] = run("mimo", SPLITS[name], groups[2:], load=folder / "saved pp")

    def derive(model, config):
        mtp = DraftConfig() if model in ("qwen3", "qwen3_moe") else ONLINE
        return replace(run(model, config, groups[:1]), mtp=mtp)

    whole = {model: derive(model, ALONE) for model, _ in DERIVED}
    cut = {f"{model}/{name}": derive(model, (SPLITS | EXPERTS)[name]) for model, name in DERIVED}
    told = gradients_and_training(0, 1, folder, whole, alone)
    ranks = run_ranks(gradients_and_training, 2, folder, cut, split, timeout=900)
    return told | ranks[0], ranks


@pytest.fixture(scope="module")
def quarters(tmp_path_factory):
    """Mixtures with a draft trained alone and by four ranks."""
    folder = tmp_path_factory.mktemp("quarters")
    paths = {
        model: write_random_checkpoint(folder / model, model, vocab=61, key_heads=4) for model in QUARTERED
    }
    groups = [make_groups(seed, vocab=61, common=7 * (seed > 0)) for seed in range(2)]

    def run(model, config):
        return Run(path=paths[model], config=config, algo=ALGO, groups=groups, mtp=ONLINE)

    alone = train(0, 1, folder, {f"{model}/alone": run(model, ALONE) for model in paths})
    split = {f"{model}/{name}": run(model, QUARTERS[name]) for model in paths for name in QUARTERED[model]}
    return alone | run_ranks(train, 4, folder, split, timeout=900)[0]


def assert_same_steps(alone, other):
    """Means over both optimizer steps are equal up to rounding, which depends on the CPU's instructions."""
    for mine, theirs in zip(alone["metrics"], other["metrics"], strict=True):
        assert other["metrics"]
        for name in ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "actor/entropy", "rollout_corr/kl"):
            assert theirs[name] == pytest.approx(mine[name], rel=3e-5, abs=1e-6), name
        assert theirs["perf/train_tokens"] == mine["perf/train_tokens"]


CASES = [(model, split) for model in ("mimo", "qwen3", *MIXTURES) for split in splits_of(model)]


@pytest.mark.parametrize(("model", "split"), CASES)
def test_gradient_norms_and_losses_equal_those_of_one_process(outcomes, model, split):
    told, _ = outcomes
    assert_same_steps(told[f"{model}/alone"], told[f"{model}/{split}"])


@pytest.mark.parametrize(("model", "split"), DERIVED)
def test_gradients_in_float64_are_those_of_one_process(outcomes, model, split):
    told, _ = outcomes
    alone, other = told[f"gradients/{model}"], told[f"gradients/{model}/{split}"]
    assert other.keys() == alone.keys()
    for name, gradient in alone.items():
        size = np.abs(gradient).max()
        assert size > 0 or ("experts." in name or "bias" in name), name  # nobody may choose an expert
        np.testing.assert_allclose(other[name], gradient, rtol=0, atol=1e-8 * max(size, 1), err_msg=name)


@pytest.mark.parametrize(("model", "split"), [(m, name) for m in QUARTERED for name in QUARTERED[m]])
def test_four_ranks_that_share_a_mixture_in_two_ways_train_as_one_process(quarters, model, split):
    alone, other = quarters[f"{model}/alone"], quarters[f"{model}/{split}"]
    assert_same_steps(alone, other)
    # The first update divides gradients near zero by their own size: rounding reaches the second step.
    tolerances = (1e-5, 1e-4)
    for mine, theirs, tolerance in zip(alone["metrics"], other["metrics"], tolerances, strict=True):
        assert theirs["mtp/grad_norm"] == pytest.approx(mine["mtp/grad_norm"], rel=tolerance)
    for name, weight in alone["weights"].items():
        np.testing.assert_allclose(other["weights"][name], weight, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("split", ["tp", "dp", "cp"])
def test_a_checkpoint_of_pipeline_stages_is_continued_on_other_parallel_sizes(outcomes, split):
    told, _ = outcomes
    assert_same_steps(told["then"], told[f"pp then {split}"])


@pytest.mark.parametrize("split", SPLITS)
def test_a_checkpoint_of_one_process_is_continued_on_other_parallel_sizes(outcomes, split):
    told, _ = outcomes
    assert_same_steps(told["then"], told[f"then {split}"])


@pytest.mark.parametrize("split", HYBRID_SIZES)
def test_delta_nets_of_one_process_are_continued_on_other_parallel_sizes(outcomes, split):
    told, _ = outcomes
    assert_same_steps(told["hybrid then"], told[f"hybrid then {split}"])


def test_experts_of_one_process_are_continued_by_ranks_that_share_them(outcomes):
    told, _ = outcomes
    assert_same_steps(told["experts then"], told["experts then ep"])


@pytest.mark.parametrize(("model", "split"), CASES)
def test_weights_after_training_equal_those_of_one_process(outcomes, model, split):
    told, _ = outcomes
    alone, other = told[f"{model}/alone"]["weights"], told[f"{model}/{split}"]["weights"]
    assert other.keys() == alone.keys()
    for name, weight in alone.items():
        np.testing.assert_allclose(other[name], weight, atol=2e-4, err_msg=name)


@pytest.mark.parametrize(("model", "split"), CASES)
def test_logprobs_equal_those_of_one_process_on_every_rank(outcomes, model, split):
    told, ranks = outcomes
    for rank in ranks:
        for alone, other in zip(
            told[f"{model}/alone"]["logprobs"], rank[f"{model}/{split}"]["logprobs"], strict=True
        ):
            np.testing.assert_allclose(other, alone, atol=1e-4)


@pytest.mark.parametrize(("kind", "split"), TAUGHT)
def test_a_draft_learns_the_same_as_in_one_process(outcomes, kind, split):
    told, _ = outcomes
    alone, other = told[f"draft/{kind}"], told[f"draft/{kind}/{split}"]
    for mine, theirs in zip(alone["metrics"], other["metrics"], strict=True):
        names = [name for name in mine if name.startswith(("mtp/", "ppow/"))]
        assert len(names) > 10
        for name in names:
            assert theirs[name] == pytest.approx(mine[name], rel=1e-4, abs=1e-5), name
    for name, weight in alone["weights"].items():
        np.testing.assert_allclose(other["weights"][name], weight, atol=2e-4, err_msg=name)


def test_only_rank_0_exports_weights_and_all_ranks_report_the_same_metrics(outcomes):
    _, ranks = outcomes
    assert all(ranks[1][f"gradients/{model}/{split}"] is None for model, split in DERIVED)
    for name in (name for name in ranks[0] if not name.startswith("gradients/")):
        assert ranks[0][name]["weights"] is not None and ranks[1][name]["weights"] is None
        for mine, theirs in zip(ranks[0][name]["metrics"], ranks[1][name]["metrics"], strict=True):
            assert mine == theirs
