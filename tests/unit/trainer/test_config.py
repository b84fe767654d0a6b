"""Settings that cannot work are refused with what, the value and the remedy."""

from __future__ import annotations

import sys

import pytest
import yaml

from rlpipe.config.algo import AlgoConfig, LossAgg
from rlpipe.config.draft import DraftConfig, check_draft
from rlpipe.config.lora import LoraConfig, LoraTargets, check_lora
from rlpipe.config.trainer import LayerSpec, TrainerConfig, check_parallel, for_model
from tests.helpers.cli import ROOT

pytestmark = pytest.mark.unit

MODEL = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
}


def test_tensor_parallelism_must_divide_the_query_groups_and_the_message_says_what_fits():
    with pytest.raises(ValueError, match=r"tp=4 does not divide .*num_key_value_heads=2.* one of \[1, 2\]"):
        check_parallel(TrainerConfig(tp=4), MODEL)


def test_tensor_parallelism_must_divide_the_heads():
    with pytest.raises(ValueError, match=r"tp=3 does not divide .*num_attention_heads=8"):
        check_parallel(TrainerConfig(tp=3), MODEL)


def test_a_checkpoint_without_query_groups_has_one_per_head():
    model = {k: v for k, v in MODEL.items() if k != "num_key_value_heads"}
    check_parallel(TrainerConfig(tp=8), model)


def test_parallel_sizes_must_multiply_to_the_ranks():
    with pytest.raises(ValueError, match=r"2 \* 1 \* 1 \* 2 = 4, but there are 2 ranks"):
        check_parallel(TrainerConfig(tp=2, dp=2), MODEL, world_size=2)
    check_parallel(TrainerConfig(tp=2, dp=2), MODEL, world_size=4)


def test_expert_parallelism_must_divide_data_parallelism_and_the_experts():
    with pytest.raises(ValueError, match=r"trainer.ep=4 does not divide .* = 6, .*one of \[1, 2, 3, 6\]"):
        TrainerConfig(dp=6, ep=4)
    with pytest.raises(ValueError, match=r"trainer.ep=2 shares experts.* has none"):
        check_parallel(TrainerConfig(dp=2, ep=2), MODEL)
    with pytest.raises(ValueError, match=r"trainer.ep=3 shares experts.* has 8"):
        check_parallel(TrainerConfig(dp=3, ep=3), MODEL | {"num_experts": 8})
    check_parallel(TrainerConfig(dp=4, ep=4), MODEL | {"num_experts": 8})


@pytest.mark.parametrize(
    ("experts", "dp", "cp", "ranks"), [(128, 4, 1, 4), (6, 4, 1, 2), (8, 2, 2, 4), (0, 4, 1, 1)]
)
def test_ep_0_shares_experts_between_as_many_ranks_as_divide_them(experts, dp, cp, ranks):
    config = TrainerConfig(dp=dp, cp=cp, ep=0)
    model = MODEL | {"num_experts": experts}
    check_parallel(config, model)
    assert for_model(config, model).ep == ranks
    assert for_model(TrainerConfig(dp=dp, cp=cp), model).ep == 1


def test_presets_for_several_gpus_share_experts():
    for name in ("one_node", "one_node_shared", "many_nodes"):
        assert (
            yaml.safe_load((ROOT / "configs" / "cluster" / f"{name}.yaml").read_text())["trainer"]["ep"] == 0
        )


def test_experts_have_no_adapters_and_a_rank_is_below_the_width():
    mixture = MODEL | {"num_experts": 8, "moe_intermediate_size": 16}
    with pytest.raises(ValueError, match=r"experts have no adapters. Set trainer.lora.targets=attention"):
        check_lora(LoraConfig(rank=8), mixture)
    check_lora(LoraConfig(rank=8, targets=LoraTargets.ATTENTION), mixture)
    check_lora(LoraConfig(), mixture)
    with pytest.raises(ValueError, match=r"trainer.lora.rank=64 is not below .*hidden_size=64"):
        check_lora(LoraConfig(rank=64), MODEL)


def test_more_pipeline_stages_than_layers_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"trainer.pp=3 is more .*num_hidden_layers=2. Set .* to at most 2"):
        check_parallel(TrainerConfig(pp=3), MODEL | {"num_hidden_layers": 2})


@pytest.mark.parametrize("layers", range(4, 13))
def test_every_pipeline_stage_has_its_share_of_the_layers(layers):
    counts = TrainerConfig(pp=4).stage_layers(layers)
    assert sum(counts) == layers and max(counts) - min(counts) <= 1 and counts[-1] == min(counts)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainerConfig(tp=0), r"trainer.tp=0 must be at least 1"),
        (
            lambda: TrainerConfig(lr=1e-5, min_lr=1e-4),
            r"trainer.min_lr=0.0001 must lie in 0..trainer.lr=1e-05",
        ),
        (lambda: TrainerConfig(beta2=1.0), r"trainer.beta2 must be in \[0, 1\), got 1.0"),
        (lambda: TrainerConfig(clip_grad=-1.0), r"trainer.clip_grad=-1.0 must be at least 0"),
        (lambda: AlgoConfig(clip_high=0.0), r"algo.clip_high=0.0 must be positive"),
        (lambda: AlgoConfig(kl_coef=-0.1), r"algo.kl_coef=-0.1 must be at least 0"),
        (lambda: AlgoConfig(minibatches=0), r"algo.minibatches=0 must be at least 1"),
        (lambda: AlgoConfig(loss_agg=LossAgg.SEQ_MEAN_TOKEN_SUM_NORM), r"loss_scale_factor, which is None"),
        (lambda: DraftConfig(lr=0.0, min_lr=1.0), r"draft.min_lr=1.0 must lie in 0..draft.lr=0.0"),
        (lambda: DraftConfig(depths=0), r"draft.depths=0 must be at least 1"),
        (lambda: DraftConfig(interval=0), r"draft.interval=0 must be at least 1"),
        (lambda: check_draft(DraftConfig(), MODEL, "here"), r"'here' has no MTP layer .* draft.train=off"),
    ],
)
def test_single_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_zero_advantage_trajectories_are_kept_when_another_loss_term_reads_them():
    assert AlgoConfig().skips_zero_advantage
    assert not AlgoConfig(kl_coef=0.1).skips_zero_advantage
    assert not AlgoConfig(entropy_coef=0.1).skips_zero_advantage


def test_configuration_imports_no_torch():
    import subprocess

    code = "import rlpipe.config.trainer, rlpipe.config.algo, rlpipe.config.draft, sys\n"
    code += "import rlpipe.batching.packing\n"
    code += "assert not {'torch', 'verl', 'megatron'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_latent_attention_is_refused_what_it_cannot_have_by_name():
    sizes = {"num_attention_heads": 8, "hidden_size": 32, "intermediate_size": 64, "kv_lora_rank": 16}
    latent = sizes | {"qk_rope_head_dim": 4, "q_lora_rank": 22}
    check_parallel(TrainerConfig(tp=2), latent)
    with pytest.raises(ValueError, match=r"tp=4 does not divide the model's q_lora_rank=22.*\[1, 2\]"):
        check_parallel(TrainerConfig(tp=4), latent)
    with pytest.raises(ValueError, match=r"kv_lora_rank \+ qk_rope_head_dim=19"):
        check_parallel(TrainerConfig(tp=2), latent | {"qk_rope_head_dim": 3})
    assert for_model(TrainerConfig(), latent).layers is LayerSpec.LOCAL
    assert for_model(TrainerConfig(), MODEL).layers is LayerSpec.AUTO
    with pytest.raises(ValueError, match=r"trainer.layers=te: .*Set trainer.layers=auto or local"):
        check_parallel(TrainerConfig(layers=LayerSpec.TE), latent)
    with pytest.raises(ValueError, match=r"latent attention .*has no adapters. Set trainer.lora.rank=0"):
        check_lora(LoraConfig(rank=8), latent)
    check_lora(LoraConfig(rank=8, targets=LoraTargets.MLP), latent)
