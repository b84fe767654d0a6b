"""Experts of the rollout are recorded as chosen, and read the same tokens in the trainer, its draft apart."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpipe.config.algo import AlgoConfig
from rlpipe.config.draft import DraftConfig, DraftTrain
from rlpipe.config.trainer import Recompute, TrainerConfig
from rlpipe.models.checkpoint import is_mtp_weight, read_weights
from rlpipe.trainer.experts import Router
from rlpipe.trainer.passes import Passes
from tests.helpers.chosen_experts import chosen_experts
from tests.helpers.engines import generate, request, running_engine
from tests.helpers.parallel import run_ranks
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import Run, make_batch, make_trainer, train
from tests.helpers.trajectories import make_groups

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_leftovers")]
EXPERTS, CHOSEN, NONE = 8, 2, 255
STEP = TrainerConfig(lr=1e-2, clip_grad=0.0, eps=1e-3)


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    """Three layers, the first of them dense, and an MTP layer with experts."""
    return write_random_checkpoint(tmp_path_factory.mktemp("glm"), "glm4_moe", layers=3)


@pytest.fixture
def trainer_of():
    """Trainers that are closed at the end: a process has one at a time."""
    made = []

    def make(*args, **kwargs):
        if made:
            made.pop().close()
        made.append(make_trainer(*args, **kwargs))
        return made[-1]

    yield make
    made.pop().close()


class Reference:
    """transformers' model of a GLM checkpoint, whose experts are given."""

    def __init__(self, path):
        self.model = AutoModelForCausalLM.from_pretrained(path)
        self.mixtures = [layer.mlp for layer in self.model.model.layers if hasattr(layer.mlp, "gate")]
        self.given = None
        for index, mixture in enumerate(self.mixtures):
            mixture.route_tokens_to_experts = lambda logits, i=index, m=mixture: self._route(i, m, logits)

    def _route(self, index, mixture, logits):
        scores = logits.sigmoid()
        chosen = (scores + mixture.gate.e_score_correction_bias).topk(CHOSEN).indices
        given = torch.from_numpy(self.given[:, index].astype(np.int64))
        chosen = torch.where(given == NONE, chosen, given)
        weights = scores.gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) * mixture.routed_scaling_factor

    def logprobs(self, trajectory):
        """[T - 1] of the tokens that follow, by the experts recorded in the trajectory."""
        ids = trajectory.token_ids.tolist()
        self.given = np.full((len(ids), len(self.mixtures), CHOSEN), NONE, np.uint8)
        if trajectory.routes is not None:
            self.given[: len(trajectory.routes)] = trajectory.routes
        logits = self.model(torch.tensor([ids])).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def recorded(groups, layers=2):
    """The same groups with random experts for each token, one in five without a record.

    They depend on the text before, as in a rollout, where siblings share keys.
    """
    for trajectory in (t for group in groups for t in group.trajectories):
        rows = []
        for end in range(1, len(trajectory.token_ids)):
            rng = np.random.default_rng(zlib.crc32(bytes(trajectory.token_ids.tolist()[:end])))
            choice = [rng.choice(EXPERTS, CHOSEN, replace=False) for _ in range(layers)]
            rows.append(choice if rng.random() < 0.8 else np.full((layers, CHOSEN), NONE))
        trajectory.routes = np.array(rows, np.uint8)
    return groups


@pytest.mark.parametrize("mode", ["none", "rejection", "tree"])
def test_the_engine_returns_the_experts_that_read_each_token(glm, mode):
    """Rows share prompts, move, and keep a conversation; drafts are rejected in between."""
    rng = np.random.default_rng(0)
    shared, own = rng.integers(2, 64, 9).tolist(), rng.integers(2, 64, (3, 5)).tolist()
    prompts = [shared, shared, shared, *own]
    sampling = {"max_new_tokens": 11, "routes": True}
    with running_engine(glm, mode, max_running=4, replay_routes=True) as engine:
        first = generate(engine, *(request(i, p, session=str(i), **sampling) for i, p in enumerate(prompts)))
        texts = [[*p, *r.output_ids.tolist(), 3, 4] for p, r in zip(prompts, first, strict=True)]
        second = generate(
            engine, *(request(9 + i, t, session=str(i), **sampling) for i, t in enumerate(texts))
        )
        quiet = generate(engine, request(99, shared, max_new_tokens=3))[0]
    assert quiet.routes is None
    played = [*zip(prompts, first, strict=True), *zip(texts, second, strict=True)]
    if mode != "none":
        spec = [result.spec for _, result in played]
        assert 0 < sum(sum(s.accepted) for s in spec) < sum(s.proposed for s in spec)
    for prompt, result in played:
        ids = [*prompt, *result.output_ids.tolist()]
        assert result.routes.dtype == np.uint8 and result.routes.shape == (len(ids), 2, CHOSEN)
        assert (result.routes[-1] == NONE).all()
        assert np.array_equal(np.sort(result.routes[:-1], -1), chosen_experts(glm, ids)[:-1])


@pytest.mark.parametrize("common", [0, 9], ids=["own prompts", "shared prompts"])
def test_a_step_with_given_experts_equals_autograd_on_the_transformers_model(
    glm, trainer_of, common, tmp_path
):
    """The scores of given experts are the trainer's, so its router learns; other tokens choose themselves."""
    groups, reference = recorded(make_groups(common=common)), Reference(glm)
    trajectories = [t for group in groups for t in group.trajectories]
    trainer, batch = trainer_of(glm, STEP), make_batch(groups, AlgoConfig())
    logprobs = trainer.logprobs(batch)
    metrics = trainer.train_step(batch)

    for trajectory, found in zip(trajectories, logprobs, strict=True):
        with torch.no_grad():
            expected = reference.logprobs(trajectory) * torch.tensor(trajectory.loss_mask.tolist()[1:])
        torch.testing.assert_close(torch.tensor(found[1:]), expected, atol=1e-4, rtol=0)
    plain = [t.routes for t in trajectories]
    for trajectory in trajectories:
        trajectory.routes = None
    without = torch.tensor(trainer_of(glm, STEP).logprobs(make_batch(groups, AlgoConfig()))[0])
    assert (without - torch.tensor(logprobs[0])).abs().max() > 0.01
    for trajectory, routes in zip(trajectories, plain, strict=True):
        trajectory.routes = routes

    model = reference.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.0)
    tokens, loss = sum(t.response_length for t in trajectories), 0.0
    for group in groups:
        rewards = torch.tensor([t.reward for t in group.trajectories])
        for t, advantage in zip(group.trajectories, rewards - rewards.mean(), strict=True):
            found = reference.logprobs(t)
            weight = (found.detach() - torch.tensor(t.rollout_logprobs[1:])).exp().clamp(max=2.0)
            weight = weight * advantage / (rewards.std() + 1e-6) * torch.tensor(t.loss_mask.tolist()[1:])
            loss = loss - ((found - found.detach()).exp() * weight).sum() / tokens
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item()
    optimizer.step()
    assert metrics["actor/grad_norm"].value() == pytest.approx(norm, rel=1e-5)
    assert 0.6 < metrics["routes/replayed"].value() < 0.9 and metrics["routes/flipped"].value() > 0.8
    model.save_pretrained(tmp_path / "stepped")
    stepped, before = read_weights(tmp_path / "stepped"), read_weights(glm)
    gate = "model.layers.1.mlp.gate.weight"
    assert (stepped[gate] - before[gate]).abs().max() > 1e-3
    trainer = trainer_of(glm, STEP)
    trainer.train_step(batch)
    exported = trainer.export_weights()
    assert stepped.keys() == {name for name in exported if not is_mtp_weight(name)}
    for name, weight in stepped.items():
        assert (exported[name] - weight).abs().max() < 2e-5, name


FAMILIES = {
    "weights sum to 1": {"family": "qwen3_moe"},
    "weights below 1": {"family": "qwen3_moe", "normed": False},
    "groups of experts": {"family": "deepseek_v3"},
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_choice_that_is_its_own_changes_nothing(tmp_path, trainer_of, family, monkeypatch):
    path, groups = write_random_checkpoint(tmp_path / "model", **family), make_groups()
    trainer, chosen = trainer_of(path), []
    routing = Router.routing

    def watched(self, logits, **options):
        weights, mine = routing(self, logits, **options)
        chosen.append(mine)
        return weights, mine

    batch = make_batch(groups, AlgoConfig())
    with monkeypatch.context() as patched:
        patched.setattr(Router, "routing", watched)
        plain = trainer.logprobs(batch)
    own = iter(chosen)
    mixtures = sum(isinstance(module, Router) for module in trainer.model.decoder.modules())
    micros = [micro for minibatch in batch.minibatches for micro in minibatch.shards[0]]
    for micro in micros:
        layers = [next(own).numpy() for _ in range(mixtures)]
        routes = np.stack([np.nonzero(layer)[1].reshape(len(layer), -1) for layer in layers], 1)
        micro.routes = routes.astype(np.uint8)
    for mine, theirs in zip(trainer.logprobs(batch), plain, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)
    for micro in micros:  # and another one does
        micro.routes = (micro.routes + 1) % EXPERTS
    changed = np.concatenate(trainer.logprobs(batch)) - np.concatenate(plain)
    assert np.abs(changed).max() > 0.01


@pytest.mark.parametrize("recompute", [Recompute.FULL, Recompute.SELECTIVE])
def test_layers_that_are_computed_again_read_the_routes_of_their_own_micro_batch(glm, trainer_of, recompute):
    """Another micro-batch runs between the pass and its gradient, as pipeline stages have it."""
    micros = make_batch(recorded(make_groups()), AlgoConfig(), budget=48).minibatches[0].shards[0][:2]
    gradients = []
    for mode in (Recompute.NONE, recompute):
        trainer = trainer_of(glm, TrainerConfig(recompute=mode))
        model, passes = trainer.model, Passes(trainer._runtime)
        model.train()
        first = passes.hidden(model, micros[0])[0]
        passes.hidden(model, micros[1])
        (first * torch.linspace(-1, 1, first.shape[1])).sum().backward()
        gradients.append(
            {
                name: (p.grad if p.grad is not None else p.main_grad).clone()
                for name, p in model.named_parameters()
                if p.grad is not None or getattr(p, "main_grad", None) is not None
            }
        )
    plain, again = gradients
    assert plain.keys() == again.keys() and any("router" in name for name in plain)
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, atol=1e-6, rtol=1e-5, msg=name)


def test_the_draft_chooses_for_itself(glm, trainer_of, monkeypatch):
    """A peer's MTP layer read the experts of a layer of the backbone."""
    seen, routing = [], Router.routing

    def watched(self, logits, **options):
        weights, chosen = routing(self, logits, **options)
        replay, self.replay = self.replay, None
        _, own = routing(self, logits, **options)
        self.replay = replay
        seen.append((names[self], bool((own != chosen).any())))
        return weights, chosen

    trainer = trainer_of(glm, STEP, mtp=DraftConfig(train=DraftTrain.ONLINE, lr=1e-2))
    names = {module: name for name, module in trainer.model.named_modules() if isinstance(module, Router)}
    monkeypatch.setattr(Router, "routing", watched)
    trainer.train_step(make_batch(recorded(make_groups()), AlgoConfig()))
    drafts = [other for name, other in seen if name.startswith("mtp.")]
    backbone = [other for name, other in seen if name.startswith("decoder.")]
    assert drafts and not any(drafts)
    assert backbone and all(backbone)


SPLITS = {
    "tp": replace(STEP, tp=2),
    "ep": replace(STEP, dp=2, ep=2),
    "cp": replace(STEP, cp=2),
    "pp": replace(STEP, pp=2),
    "ep_of_cp": replace(STEP, cp=2, ep=2),
}


def test_ranks_replay_what_one_process_does(glm, tmp_path):
    """With tensor, expert, context and pipeline parallelism, prefixes shared."""
    groups = [recorded(make_groups(seed, common=7 * seed)) for seed in range(2)]
    runs = {
        name: Run(path=glm, config=config, algo=AlgoConfig(kl_coef=0.1), groups=groups)
        for name, config in {"alone": STEP, **SPLITS}.items()
    }
    alone = train(0, 1, tmp_path, {"alone": runs.pop("alone")})
    ranks = run_ranks(train, 2, tmp_path, runs)
    for name in runs:
        for expected, found in zip(alone["alone"]["metrics"], ranks[0][name]["metrics"], strict=True):
            for metric in ("actor/grad_norm", "actor/pg_loss", "actor/kl_loss", "rollout_corr/kl"):
                assert found[metric] == pytest.approx(expected[metric], rel=1e-5, abs=1e-6), (name, metric)
        for weight, values in alone["alone"]["weights"].items():
            np.testing.assert_allclose(ranks[0][name]["weights"][weight], values, atol=2e-4, err_msg=weight)
    assert alone["alone"]["metrics"][0]["routes/flipped"] > 0.8
