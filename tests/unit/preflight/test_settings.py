"""What is refused before a run starts: greedy rollouts where a distribution is needed, untrainable biases."""

import json

import pytest

from rlpipe.config.adapt import AdaptConfig
from rlpipe.config.algo import AlgoConfig, Correction
from rlpipe.config.decoupled import DecoupledConfig
from rlpipe.config.draft import DraftConfig, DraftTrain
from rlpipe.config.draft_objectives import DraftObjective
from rlpipe.config.drafters import Drafter
from rlpipe.config.lora import LoraConfig
from rlpipe.config.probe import ProbeConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import ClusterConfig, ClusterMode, Config, ModelConfig, RunSettings, Task
from rlpipe.config.run_mode import RunMode
from rlpipe.config.spec import SpecMode
from rlpipe.config.trainer import LayerSpec, TrainerConfig
from rlpipe.preflight.checkpoint_and_machine import check_machine
from rlpipe.preflight.settings import check, check_adapt
from tests.helpers.tiny_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("checked", [check, check_adapt])
def test_what_needs_a_distribution_refuses_greedy_rollouts_and_names_the_remedy(tmp_path, checked):
    config = Config(
        run=RunSettings(dir=str(tmp_path)),
        algo=AlgoConfig(correction=Correction.OBRS),
        rollout=RolloutConfig(temperature=0.0),
    )
    with pytest.raises(
        ValueError, match=r"distribution.* rollout\.temperature=0 leaves none: set rollout\.temperature=1"
    ):
        checked(config)


@pytest.mark.parametrize(
    ("family", "setting", "where"),
    [
        ("llama", "attention_bias", "o_proj"),
        ("qwen3", "attention_bias", "o_proj"),
        ("llama", "mlp_bias", "gate_proj, up_proj and down_proj"),
    ],
)
def test_biases_that_the_trainer_has_no_place_for_are_refused_before_loading(
    tmp_path, family, setting, where
):
    path = write_random_checkpoint(tmp_path / "model", family, max_position=65536)
    config = Config(run=RunSettings(dir=str(tmp_path / "run")), model=ModelConfig(path=str(path)))
    config.spec.mode = SpecMode.NONE
    check(config)
    described = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(described | {setting: True}))
    with pytest.raises(
        ValueError, match=rf"{setting}=true, which gives {where} a bias.* {family} .*Use .*{setting}=false"
    ):
        check(config)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_what_gated_delta_nets_cannot_have_is_refused_with_what_to_use_instead(tmp_path, family):
    path = write_random_checkpoint(tmp_path / "model", family, max_position=65536)
    config = Config(run=RunSettings(dir=str(tmp_path / "run")), model=ModelConfig(path=str(path)))
    with pytest.raises(ValueError, match=f"{family}.*embedded engine does not decode: set rollout=sglang"):
        check(config)
    config.run.half = RunMode.TRAIN  # rolled out elsewhere
    check(config)
    for name in (DraftObjective.PPOW, DraftObjective.EXACT_WINDOW):
        config.draft = DraftConfig(train=DraftTrain.ONLINE, objective=name)
        refusal = rf"draft.objective={name} .* keep none: set draft.objective=e2e_tv"
        with pytest.raises(ValueError, match=refusal):
            check(config)
    config.draft = DraftConfig()
    for trainer, words in (
        (TrainerConfig(cp=4), r"trainer.cp=4 .*linear_num_key_heads=2. Set trainer.cp to one of \[1, 2\]"),
        (TrainerConfig(tp=2, cp=2), r"delta net, and 4 does not .* Set trainer.cp to one of \[1\]"),
        (TrainerConfig(tp=4), r"trainer.tp=4 does not divide .* Set trainer.tp to one of \[1, 2\]"),
        (TrainerConfig(lora=LoraConfig(rank=4, targets="attention")), r"have no adapters. Set .*rank=0"),
    ):
        config.trainer = trainer
        with pytest.raises(ValueError, match=words):
            check(config)


def test_features_are_not_compared_with_a_draft_that_has_another_head(tmp_path):
    config = Config(
        task=Task.MTP_ADAPT,
        run=RunSettings(dir=str(tmp_path / "run")),
        draft=DraftConfig(objective=DraftObjective.EAGLE1),
    )
    check(config)
    config.adapt.drafter = Drafter.EAGLE3
    with pytest.raises(ValueError, match=r"draft.objective=eagle1 .* set draft.objective=kl"):
        check(config)


@pytest.mark.parametrize("slope", [[-0.1], [0.0, 1.0, 0.5], [0.0, float("nan"), 1.0]])
def test_a_measured_slope_has_an_interval_around_it(slope):
    ProbeConfig(slope=[-0.03, -0.05, -0.015])
    with pytest.raises(ValueError, match=r"metrics.probe.slope=.*Set \[value, low, high\]"):
        ProbeConfig(slope=slope)


def test_adapters_are_refused_where_nothing_would_train_them(tmp_path):
    lora = {"trainer": TrainerConfig(lora=LoraConfig(rank=8)), "run": RunSettings(dir=str(tmp_path / "run"))}
    check(Config(**lora))
    with pytest.raises(ValueError, match=r"trainer.lora.rank=8 with task=mtp_adapt.*Set trainer.lora.rank=0"):
        check(Config(task=Task.MTP_ADAPT, **lora))
    actor = DecoupledConfig(path="shipped:models/tiny_actor")
    with pytest.raises(ValueError, match=r"trainer.lora.rank=8 with decoupled.path"):
        check(Config(decoupled=actor, **lora))


def test_routes_are_replayed_where_there_are_some_and_something_reads_them(tmp_path):
    mixture = {
        "model": ModelConfig(path="shipped:models/tiny_moe"),
        "rollout": RolloutConfig(replay_routes=True),
        "run": RunSettings(dir=str(tmp_path / "run")),
    }
    check(Config(**mixture))
    refused = {
        r"model.path='shipped:models/tiny', which has no experts": {"model": ModelConfig()},
        r"task=mtp_adapt, which trains no policy": {"task": Task.MTP_ADAPT},
        r"trainer.layers=te": {"trainer": TrainerConfig(layers=LayerSpec.TE)},
    }
    for what, settings in refused.items():
        with pytest.raises(ValueError, match=rf"rollout.replay_routes=true with {what}.*Set "):
            check(Config(**mixture | settings))


def test_an_adaptation_on_several_ranks_needs_processes_and_an_mtp_layer(tmp_path):
    path = write_random_checkpoint(tmp_path / "model", "mimo")

    def adapting(mode=ClusterMode.RAY, **adapt):
        return Config(
            task=Task.MTP_ADAPT,
            run=RunSettings(dir=str(tmp_path / "run")),
            model=ModelConfig(path=str(path)),
            trainer=TrainerConfig(dp=2),
            cluster=ClusterConfig(mode=mode),
            adapt=AdaptConfig(**adapt),
            rollout=RolloutConfig(max_context=64),
        )

    check(adapting())
    with pytest.raises(ValueError, match=r"cluster=inline runs one process, .*dp=2.*use cluster=ray"):
        check(adapting(ClusterMode.INLINE))
    with pytest.raises(ValueError, match=r"adapt\.drafter=eagle3 is trained by one process"):
        check_adapt(adapting(drafter="eagle3"))


@pytest.mark.parametrize("setting", [{"warmup_steps": 5}, {"lr_schedule": "cosine"}])
def test_a_schedule_that_adaptation_does_not_follow_is_refused(setting):
    (name,) = setting
    config = Config(task=Task.MTP_ADAPT, draft=DraftConfig(**setting))
    with pytest.raises(ValueError, match=rf"draft\.{name}=.*adapt\.warmup"):
        check_adapt(config)


def test_delta_nets_are_not_trained_on_a_gpu_without_their_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    config = Config(rollout=RolloutConfig(device="cuda"), cluster=ClusterConfig(mode=ClusterMode.RAY))
    config.model = ModelConfig(path=str(write_random_checkpoint(tmp_path / "hybrid", "qwen3_next")))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"has gated delta nets.*flash-linear-attention.*train on a CPU"):
        check_machine(config)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    check_machine(config)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config.model = ModelConfig(path=str(write_random_checkpoint(tmp_path / "dense", "qwen3")))
    check_machine(config)
