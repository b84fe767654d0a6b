"""An EAGLE-3 draft that is trained beside the policy: what is learnt travels, is saved and is resumed."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from rlpipe.actors.trainer_worker import TrainerWorker
from rlpipe.config.draft import DraftConfig
from rlpipe.config.injection import InjectionConfig
from rlpipe.config.lora import LoraConfig
from rlpipe.config.pipeline import PipelineConfig
from rlpipe.config.ppow import PpowConfig
from rlpipe.config.rollout import RolloutConfig
from rlpipe.config.run import ClusterConfig, Config, ModelConfig, RunSettings
from rlpipe.config.spec import SpecConfig
from rlpipe.config.trainer import TrainerConfig
from rlpipe.models.checkpoint import read_weights
from rlpipe.preflight.settings import check
from rlpipe.rollout.embedded.engine import EmbeddedEngine
from rlpipe.weights.payload import unpack_weights
from tests.helpers.cli import ROOT, run
from tests.helpers.cotrained import co_train, differing
from tests.helpers.eagle3_drafts import write_random_draft
from tests.helpers.parallel import run_ranks
from tests.helpers.trajectories import make_groups

pytestmark = pytest.mark.integration

TINY = ROOT / "models" / "tiny"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return write_random_draft(tmp_path_factory.mktemp("start"), TINY, scale=0.05, ids=range(400))


STEPS = [make_groups(seed=seed, groups=3, common=6) for seed in (3, 4)]


def settings(start, tmp_path, **mtp) -> Config:
    return Config(
        model=ModelConfig(path=str(TINY)),
        draft=DraftConfig(**{"train": "online", "objective": "kl", "lr": 1e-2, "clip_grad": 0.5} | mtp),
        spec=SpecConfig(drafter="eagle3", draft_path=str(start)),
        rollout=RolloutConfig(device="cpu", max_context=64),
        trainer=TrainerConfig(lr=1e-3, micro_batch_tokens=256),
        pipeline=PipelineConfig(max_staleness=0),
        cluster=ClusterConfig(mode="inline"),
        run=RunSettings(dir=str(tmp_path / "run"), steps=4),
    )


def weights_of(engine):
    draft = engine._model.draft_model
    return {"fc.weight": draft._fc, "lm_head.weight": draft._head, "norm.weight": draft._norm}


def test_the_draft_learns_for_the_policy_as_it_is_and_travels_with_it(start, tmp_path):
    config = settings(start, tmp_path)
    groups = make_groups(seed=3, groups=3, common=6)
    for trajectory in groups[0].trajectories:
        trajectory.reward = 1.0  # a group without variance teaches the policy nothing, and the draft as ever
    worker = TrainerWorker(config)
    worker.start()
    engine = EmbeddedEngine(config.rollout, config.spec, TINY)
    try:
        draft, before = worker._draft, {}
        for _ in range(2):
            policy = worker._trainer.export_weights()
            before = {name: tensor.clone() for name, tensor in draft._draft.state_dict().items()}
            metrics = worker.step(groups)
            assert torch.equal(draft._target.embedding, policy["model.embed_tokens.weight"])
            assert metrics["mtp/grad_norm"].value() > 0 and metrics["mtp/lr"].value() == 1e-2
            assert metrics["actor/grad_norm"].value() > 0
        sent = unpack_weights(worker.export(2))
        engine.update_weights(sent, 2)
        learnt = draft._draft.state_dict()
        for name, held in weights_of(engine).items():
            assert not torch.equal(learnt[name], before[name]), name
            held = held if isinstance(held, torch.Tensor) else held(torch.eye(learnt[name].shape[1])).T
            torch.testing.assert_close(held, learnt[name], atol=1e-6, rtol=1e-5)
        some = dict(list(sent.items())[:-1]) if list(sent)[-1].startswith("eagle3.") else {}
        with pytest.raises(ValueError, match=r"missing eagle3\."):
            engine.update_weights(some, 3)
        worker.freeze_draft()
        assert "mtp/grad_norm" not in worker.step(groups)
        assert all(torch.equal(tensor, learnt[name]) for name, tensor in draft._draft.state_dict().items())
    finally:
        engine.close()
        worker.close()


@pytest.fixture(scope="module")
def alone(start, tmp_path_factory):
    """Two steps of one process without adapters."""
    folder = tmp_path_factory.mktemp("alone")
    return co_train(0, 1, settings(start, folder), STEPS, folder)


def test_windows_get_harder_over_the_updates_of_the_draft_not_over_the_steps_of_the_policy(
    start, tmp_path, alone
):
    """PPOW during RL in every second of four steps: two updates, from the first share to the last."""
    config = settings(start, tmp_path, objective="ppow", interval=2)
    config = replace(config, ppow=PpowConfig(group_size=2, windows=1, hard_start=0.2, hard_end=0.6))
    check(config)
    done = co_train(0, 1, config, [*STEPS, *STEPS], tmp_path)

    shares = [step.get("ppow/hard_share") for step in done["metrics"]]
    assert shares == [None, pytest.approx(0.2), None, pytest.approx(0.6)]
    changes = [differing(done["drafts"][i], done["drafts"][i + 1]) for i in range(4)]
    assert changes[0] == changes[2] == 0 and min(changes[1], changes[3]) > 1e-3

    # The policy learns what it learns beside a draft with another objective.
    for step, beside in zip(done["metrics"], alone["metrics"], strict=False):
        assert step["actor/grad_norm"] == beside["actor/grad_norm"] > 0


def test_beside_pipeline_stages_it_learns_what_it_learns_beside_one_process(start, tmp_path, alone):
    config = settings(start, tmp_path)
    config = replace(config, trainer=replace(config.trainer, pp=2))
    check(replace(config, cluster=ClusterConfig()))
    first, last = run_ranks(co_train, 2, config, STEPS, tmp_path)
    assert last["drafts"] == [] and len(first["drafts"]) == 3
    assert differing(first["drafts"][1], alone["drafts"][1]) == 0  # stages hold the weights of one process
    assert differing(first["drafts"][2], first["drafts"][1]) > 1e-3
    assert differing(first["drafts"][2], alone["drafts"][2]) < 1e-4  # their own step rounds otherwise
    for staged, whole in zip(first["metrics"], alone["metrics"], strict=True):
        for name in ("mtp/loss", "mtp/grad_norm", "actor/grad_norm"):
            assert staged[name] == pytest.approx(whole[name], rel=1e-5), name


def test_beside_adapters_it_learns_for_the_merged_weights(start, tmp_path):
    """Its second loss is the first one of a draft as it was then, whose policy has the merged weights."""
    adapters = TrainerConfig(lr=1e-2, micro_batch_tokens=256, lora=LoraConfig(rank=4))
    config = replace(settings(start, tmp_path), trainer=adapters)
    check(config)
    played = co_train(0, 1, config, STEPS, tmp_path)
    merged = load_file(tmp_path / "hf" / "model.safetensors")
    assert any(not torch.equal(merged[name], tensor) for name, tensor in read_weights(TINY).items())
    other = tmp_path / "other"
    other.mkdir()
    again = replace(config, model=ModelConfig(path=str(tmp_path / "hf")))
    again = replace(again, spec=replace(config.spec, draft_path=str(tmp_path / "draft")))
    oracle = co_train(0, 1, again, STEPS[1:], other)
    assert differing(oracle["drafts"][0], played["drafts"][1]) == 0
    for name in ("mtp/loss", "mtp/grad_norm"):
        assert oracle["metrics"][0][name] == played["metrics"][1][name]
        assert played["metrics"][0][name] != played["metrics"][1][name]


def test_a_resumed_run_equals_the_uninterrupted_one_and_says_what_was_accepted(start, tmp_path):
    asked = ["+recipe=reasoning_rl", "cluster=inline", "run.dir=out", "run.steps=2", "run.save_every=1"]
    asked += ["pipeline.prompts_per_step=2", "pipeline.group_size=4", "pipeline.max_staleness=0"]
    asked += ["rollout.max_running=1", "val.every=0", "metrics.probe.every=0", "metrics.report=false"]
    asked += ["metrics.wandb=off", "spec.drafter=eagle3", f"spec.draft_path={start}"]
    online = ["draft.train=online", "draft.objective=kl", "draft.lr=5e-3"]
    whole, other = tmp_path / "whole", tmp_path / "other"
    whole.mkdir()
    first = run(*asked, *online, cwd=whole, OMP_NUM_THREADS="1")
    assert first.returncode == 0, first.stdout + first.stderr
    shutil.copytree(whole, other)
    shutil.rmtree(other / "out" / "checkpoints" / "step_2")
    shutil.copytree(other, tmp_path / "untrained")
    refused = run(*asked, "run.resume=anyway", cwd=tmp_path / "untrained")
    assert refused.returncode != 0 and "draft.train=online" in refused.stdout + refused.stderr
    second = run(*asked, *online, cwd=other, OMP_NUM_THREADS="1")
    assert second.returncode == 0, second.stdout + second.stderr
    a, b, earlier = (
        load_file(part / "draft" / "model.safetensors")
        for part in (
            whole / "out" / "checkpoints" / "step_2",
            other / "out" / "checkpoints" / "step_2",
            whole / "out" / "checkpoints" / "step_1",
        )
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["lm_head.weight"], earlier["lm_head.weight"])
    states = [
        torch.load(part / "out" / "checkpoints" / "step_2" / "draft_trainer" / "eagle3.pt")
        for part in (whole, other)
    ]
    for index, moments in states[0]["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(value, states[1]["optimizer"]["state"][index][name])
    records = [json.loads(line) for line in (whole / "out" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["training/global_step"]]
    assert len(steps) == 2
    assert all(0 <= step["spec/acceptance_rate"] <= 1 and step["mtp/loss"] > 0 for step in steps)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"draft": DraftConfig(train="online", lr_schedule="cosine")}, r"draft\.lr_schedule=cosine"),
        ({"injection": InjectionConfig(weight_noise=0.1)}, r"injection\.weight_noise=0\.1"),
    ],
)
def test_what_does_not_go_with_it_is_refused_at_launch(start, tmp_path, change, named):
    config = replace(settings(start, tmp_path), **change)
    with pytest.raises(ValueError, match=named):
        check(config)
