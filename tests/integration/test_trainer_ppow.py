"""PPOW in the trainer: the law of its windows, who judges them, what learns, resume, and that it learns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpipe.batching.draft_layout import draft_batch
from rlpipe.batching.packing import pack
from rlpipe.config.algo import AlgoConfig
from rlpipe.config.draft import DraftConfig, DraftTrain
from rlpipe.config.draft_objectives import DraftObjective
from rlpipe.config.ppow import PpowConfig
from rlpipe.config.trainer import Recompute, TrainerConfig
from rlpipe.drafts.objectives.ppow import group_advantages
from rlpipe.drafts.windows.selection import window_distribution, window_scores
from rlpipe.models.checkpoint import read_weights
from rlpipe.trainer import continuation, runtime
from rlpipe.trainer.ppow import MtpWindows
from tests.helpers.draft_oracle import read_layers
from tests.helpers.engines import generate, request, running_engine
from tests.helpers.ppow_oracle import check_verdict, greedy_logprob
from tests.helpers.tiny_checkpoint import write_random_checkpoint
from tests.helpers.trainers import make_batch, make_trainer
from tests.helpers.trajectories import make_groups

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_leftovers")]

ALGO = AlgoConfig()
CONFIG = TrainerConfig(lr=1e-2, eps=1e-3)
MTP = DraftConfig(train=DraftTrain.ONLINE, objective=DraftObjective.PPOW, lr=1e-2, clip_grad=0.0)
PPOW = PpowConfig(group_size=3, windows=2, draft_cost=0.25, tolerance=3.0)
RULES = {"draft_cost": 0.25, "proximity": 0.1, "tolerance": 3.0}
T = 0.7


@pytest.fixture
def path(tmp_path):
    return write_random_checkpoint(tmp_path / "model", "mimo", head_scale=0.5)


def trajectories(seed=0, **options):
    return [t for g in make_groups(seed, **{"common": 9, "longest": 16} | options) for t in g.trajectories]


def adaptation(seed=0, budget=4096, minibatches=1, **options):
    return pack(trajectories(seed, **options), None, budget, dp_size=1, minibatches=minibatches)


def values(metrics):
    return {k: v.value() for k, v in metrics.items() if not k.startswith("timing_s")}


def weights_of(trainer, draft):
    return {k: w for k, w in trainer.export_weights().items() if (".mtp_layers." in k) is draft}


def gradients(trainer, draft):
    return {
        name: parameter.main_grad.clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad and name.startswith("mtp.") is draft
    }


def assert_equal(found, expected):
    assert found.keys() == expected.keys() and found
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def rollouts(trainer, packed, step=0):
    """(micro-batch, rollout) of every micro-batch that has windows."""
    found = []
    for micro in packed.minibatches[0].shards[0]:
        with torch.no_grad():
            hidden, _, layout = trainer._passes.hidden(trainer.model, micro, retain_keys=True)
        drafting, batch = trainer._drafting, draft_batch(micro, 1, 32)
        if batch is None:
            continue
        text = MtpWindows(
            trainer.model,
            micro,
            batch,
            hidden=hidden,
            retained=layout.release(),
            temperature=T,
            runtime=drafting._runtime,
        )
        if (rollout := drafting._windows.rollout(text, step)) is not None:
            found.append((micro, rollout))
    return found


def texts(micro, rollout, whole):
    """The tokens that each window knows, and the trajectory it was drawn from."""
    for w, owner in enumerate(rollout.windows.owners):
        known = micro.tokens[rollout.text.prefixes[w].numpy()]
        text = whole[micro.rows[owner]].token_ids.tolist()
        assert known.tolist() == text[: len(known)]
        yield w, torch.from_numpy(known), text


def chi_square_bound(degrees):
    """At alpha = 0.0001 (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.72 * spread**0.5) ** 3


class Oracle:
    """transformers' backbone, and the reference layer run as an engine runs it: one key per token."""

    def __init__(self, path):
        self.model, self.layer = AutoModelForCausalLM.from_pretrained(path), read_layers(path)[0]

    @torch.no_grad()
    def target(self, ids):
        hidden = self.model(ids[None], output_hidden_states=True).hidden_states[-1][0]
        return hidden, (self.model.lm_head(hidden) / T).log_softmax(-1)

    def draft(self, known, drafts):
        """logprobs [K, V] after each draft before; known: tokens 0..t + 1."""
        hidden, _ = self.target(known[:-1])
        embed = self.model.get_input_embeddings()
        found, ids = [], known[1:]
        for token in drafts:
            positions = torch.arange(len(ids))[None]
            states = self.layer(hidden[None], embed(ids).detach()[None], positions)[0]
            found.append((states[-1] @ self.model.lm_head.weight.detach().T / T).log_softmax(-1))
            hidden, ids = torch.cat((hidden, states[-1:])), torch.cat((ids, token[None]))
        return torch.stack(found)


def test_the_reference_of_these_tests_drafts_with_the_probabilities_of_the_engine(path):
    oracle, prompt = Oracle(path), [5, 9, 2, 33]
    with running_engine(path) as engine:
        sampling = {"max_new_tokens": 24, "temperature": T, "record_drafts": True}
        (result,) = generate(engine, request(1, prompt, **sampling))
    assert len(result.drafts) > 5
    for step in result.drafts:
        known = torch.tensor(prompt + result.output_ids.tolist()[: step.position])
        drafts = torch.tensor(step.tokens)
        q = oracle.draft(known, drafts).detach()
        _, p = oracle.target(torch.cat((known, drafts)))
        for found, expected in ((q, step.draft_probs), (p[len(known) - 1 : -1], step.target_probs)):
            chosen = found.gather(1, drafts[:, None])[:, 0].exp()
            torch.testing.assert_close(chosen, torch.tensor(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("budget", "at_once"), [(64, 1), (4096, 2**23)], ids=["one window at once", "all windows at once"]
)
def test_windows_are_drafted_as_an_engine_does_and_judged_by_a_plain_forward_pass(
    path, monkeypatch, budget, at_once
):
    monkeypatch.setattr(continuation, "GATHERED_ELEMENTS", at_once)
    oracle, whole = Oracle(path), trajectories()
    trainer = make_trainer(path, CONFIG, ALGO, MTP, adapt_only=True, ppow=PPOW)
    parts = rollouts(trainer, adaptation(budget=budget))
    assert sum(len(rollout.windows.owners) for _, rollout in parts) > 8
    for micro, rollout in parts:
        log_q, log_p = rollout.logprobs.detach(), rollout.target_logprobs
        for w, known, _ in texts(micro, rollout, whole):
            reference = greedy_logprob(oracle.target, known, 3)
            for g, drafts in enumerate(rollout.tokens[w]):
                q = oracle.draft(known, drafts)
                torch.testing.assert_close(log_q[w, g], q, atol=2e-5, rtol=0)
                _, p = oracle.target(torch.cat((known, drafts)))
                p = p[len(known) - 1 : -1]
                torch.testing.assert_close(log_p[w, g, :-1], p, atol=2e-5, rtol=0)
                coins = rollout.windows.coins[w, g]
                check_verdict(rollout.verified, (w, g), drafts, q.detach(), p, coins, reference, RULES)


def test_drafts_follow_the_law_that_is_stated_for_them(path):
    """Each is drawn by inverting its CDF at a uniform; uniforms and coins are even and independent."""
    many = replace(PPOW, group_size=50, windows=100)
    trainer = make_trainer(path, CONFIG, ALGO, MTP, adapt_only=True, ppow=many)
    ((_, rollout),) = rollouts(trainer, adaptation(groups=1))
    uniforms, coins = rollout.windows.draft_uniforms, rollout.windows.coins
    cdf, drawn = rollout.logprobs.detach().exp().double().cumsum(-1), rollout.tokens[..., None]
    upper = cdf.gather(-1, drawn)[..., 0]
    lower = torch.where(drawn[..., 0] > 0, cdf.gather(-1, (drawn - 1).clamp(min=0))[..., 0], 0.0)
    assert (lower - 1e-6 <= uniforms).all() and (uniforms <= upper + 1e-6).all()
    cells = (uniforms * 4).long() * 4 + (coins * 4).long()
    counts, expected = cells.flatten().bincount(minlength=16), cells.numel() / 16
    assert expected > 1000
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_bound(15)


@pytest.mark.parametrize("known", [None, [*range(3, 64, 2)]], ids=["all tokens", "half of the tokens"])
def test_windows_are_drawn_by_their_score_and_lie_within_a_turn(path, known):
    """A draft that knows half of the tokens is judged by what it can learn: the divergence among these."""
    oracle, whole = Oracle(path), trajectories(groups=1)
    hard = replace(PPOW, hard_start=1.0, hard_end=1.0, windows=3000, group_size=2, proximity=0.0)
    trainer = make_trainer(path, CONFIG, ALGO, MTP, adapt_only=True, ppow=hard, draft_vocab=known)
    ((micro, rollout),) = rollouts(trainer, adaptation(groups=1))
    embed = oracle.model.get_input_embeddings()
    for row, trajectory in enumerate(whole):
        ids, mask = torch.tensor(trajectory.token_ids.tolist()), trajectory.loss_mask.tolist()
        hidden, log_p = oracle.target(ids)
        positions = torch.arange(len(ids) - 1)[None]
        states = oracle.layer(hidden[None, :-1], embed(ids[1:]).detach()[None], positions)
        log_q = (states[0].detach() @ oracle.model.lm_head.weight.detach().T / T).log_softmax(-1)
        p, q = log_p[1:], log_q  # both of token t + 2, at anchor t
        entropy, kl = -(p.exp() * p).sum(-1), (p.exp() * (p - q)).sum(-1)
        if known is not None:
            inside = p[:, known].exp().sum(-1)
            given = p[:, known].log_softmax(-1)
            kl = inside * (given.exp() * (given - q[:, known].log_softmax(-1))).sum(-1)
        critical = (1 - entropy / np.log(64)) * kl
        anchors = [t for t in range(len(ids) - 4) if all(mask[t + 1 : t + 5])]
        mine = np.flatnonzero(micro.rows[rollout.windows.owners] == row)
        if not anchors:
            assert not len(mine)
            continue
        law = window_distribution(window_scores(critical, 3)[anchors], 1.0).numpy() * 3000
        drawn = [len(rollout.text.draft_prefixes[w]) - 1 for w in mine]
        assert len(drawn) == 3000 and set(drawn) <= set(anchors)
        if len(anchors) == 1:
            continue
        counts = np.array([drawn.count(t) for t in anchors])
        assert ((counts - law) ** 2 / law).sum() < chi_square_bound(len(anchors) - 1)


def test_windows_depend_neither_on_the_cut_nor_on_sharing_but_on_seed_and_step(path):
    def told(budget, share=True, seed=0, step=0):
        trainer = make_trainer(path, CONFIG, ALGO, MTP, adapt_only=True, ppow=PPOW, seed=seed)
        batch = pack(trajectories(), None, budget, dp_size=1, share_prefixes=share)
        found = {}
        for micro, rollout in rollouts(trainer, batch, step):
            for w, owner in enumerate(rollout.windows.owners):
                at = len(rollout.text.prefixes[w])
                found.setdefault(int(micro.rows[owner]), []).append((at, rollout.tokens[w].tolist()))
        trainer.close()
        return found

    first = told(4096)
    assert len(first) > 4
    assert told(64) == told(64, share=False) == first
    assert told(4096, seed=1) != first and told(4096, step=1) != first


def test_the_gradient_is_that_of_reinforce_and_the_anchor_by_plain_autograd(path):
    oracle, whole, batch = Oracle(path), trajectories(), adaptation(budget=200)
    trainer = make_trainer(path, replace(CONFIG, clip_grad=0.0), ALGO, MTP, adapt_only=True, ppow=PPOW)
    batch.temperature = T
    parts = rollouts(trainer, batch)
    terms = []
    for micro, rollout in parts:
        advantages, log_p = group_advantages(rollout.verified.rewards), rollout.target_logprobs[:, :, :-1]
        for w, known, _ in texts(micro, rollout, whole):
            for g, drafts in enumerate(rollout.tokens[w]):
                q, p = oracle.draft(known, drafts), log_p[w, g]
                chosen = q.gather(1, drafts[:, None])[:, 0]
                terms.append(-advantages[w, g] * chosen + 0.02 * (q.exp() * (q - p)).sum(-1))
    loss = torch.cat(terms).mean()
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in oracle.layer.parameters()]).sum().sqrt().item()
    metrics = values(trainer.adapt_step(batch))
    assert metrics["ppow/kl"] > 0 and metrics["ppow/clip_fraction"] == 0
    assert metrics["mtp/grad_norm"] == pytest.approx(norm, rel=1e-3) and norm > 1e-3
    optimizer = torch.optim.AdamW(
        oracle.layer.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-3, weight_decay=0
    )
    optimizer.step()
    exported = trainer.export_weights()
    for name, weight in oracle.layer.state_dict().items():
        torch.testing.assert_close(exported[f"model.mtp_layers.0.{name}"], weight, atol=1e-4, rtol=0)


@pytest.mark.parametrize("recompute", Recompute)
def test_co_training_leaves_every_gradient_of_the_backbone_bit_identical(path, recompute):
    algo, told = AlgoConfig(kl_coef=0.1, entropy_coef=0.01), []
    for mtp in (DraftConfig(), MTP):
        trainer = make_trainer(path, replace(CONFIG, recompute=recompute), algo, mtp, ppow=PPOW)
        groups = make_groups(0, common=9, longest=16)
        metrics = trainer.train_step(make_batch(groups, algo))
        told.append((gradients(trainer, draft=False), weights_of(trainer, draft=False)))
        if mtp is MTP:
            for name, gradient in gradients(trainer, draft=True).items():
                assert gradient.any(), name
            assert metrics["ppow/reward"].value() > 0
        trainer.close()
    for found, expected in zip(*told, strict=True):
        assert_equal(found, expected)


def test_recomputation_changes_no_gradient_of_the_draft(path):
    told = []
    for recompute in Recompute:
        trainer = make_trainer(path, replace(CONFIG, recompute=recompute), ALGO, MTP, ppow=PPOW)
        trainer.train_step(make_batch(make_groups(common=9, longest=16), ALGO))
        told.append(gradients(trainer, draft=True))
        trainer.close()
    for name, gradient in told[0].items():
        torch.testing.assert_close(told[1][name], gradient, rtol=1e-5, atol=1e-7)


def test_co_training_takes_the_step_of_adaptation(path):
    batch = make_batch(make_groups(common=9, longest=16), AlgoConfig(skip_zero_advantage=False))
    trainer = make_trainer(path, CONFIG, ALGO, MTP, ppow=PPOW)
    online = values(trainer.train_step(batch)), weights_of(trainer, True)
    trainer.close()
    trainer = make_trainer(path, CONFIG, ALGO, MTP, adapt_only=True, ppow=PPOW)
    alone = values(trainer.adapt_step(batch)), weights_of(trainer, True)
    trainer.close()
    assert {k: v for k, v in online[0].items() if k.startswith(("mtp/", "ppow/"))} == alone[0]
    assert_equal(alone[1], online[1])


def test_the_step_does_not_depend_on_the_cut(path):
    told = []
    for budget in (64, 4096):
        trainer = make_trainer(path, CONFIG, ALGO, MTP, adapt_only=True, ppow=PPOW)
        told.append((values(trainer.adapt_step(adaptation(budget=budget))), weights_of(trainer, True)))
        trainer.close()
    (first, weights), (second, others) = told
    for name, value in first.items():
        assert second[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, atol=1e-4, rtol=0)


def test_adaptation_is_resumable(path, tmp_path):
    config, mtp = replace(CONFIG, distributed_optimizer=True), replace(MTP, warmup_steps=3)
    work = [adaptation(seed, minibatches=2) for seed in range(4)]
    told = []
    for resumed in (False, True):
        trainer = make_trainer(path, config, ALGO, mtp, adapt_only=True, ppow=PPOW)
        if resumed:
            trainer.load(tmp_path / "checkpoint")
        else:
            trainer.adapt_step(work[0])
            trainer.save(tmp_path / "checkpoint")
        told.append([values(trainer.adapt_step(batch)) for batch in work[1:]])
        trainer.close()
    assert told[0] == told[1]
    shares = [step["ppow/hard_share"] for step in told[0]]
    assert 0.3 < shares[0] < shares[1] < shares[2]  # the curriculum goes on where it was


@pytest.mark.parametrize(
    ("objective", "exact"),
    [
        ("ppow", False),
        ("ppow_exact", True),
        ("ppow_measured", False),
        ("exact_window", False),
        ("exact_block", False),
        ("own_kl", False),
    ],
)
def test_twenty_steps_raise_the_reward_and_leave_the_rest_bit_identical(path, objective, exact):
    """Without the anchor, so that nothing but the reward teaches."""
    before = read_weights(path)
    rules = {"draft_cost": 0.1, "kl_coef": 0.0, "hard_start": 0.0, "hard_end": 0.0}
    ppow = PpowConfig(windows=8, expected_reward=exact, **rules)
    mtp = replace(MTP, objective=DraftObjective(objective))
    trainer = make_trainer(
        path, replace(CONFIG, eps=1e-8), ALGO, mtp, adapt_only=True, ppow=ppow, total_steps=20
    )
    batch = adaptation(groups=4)
    told = [values(trainer.adapt_step(batch)) for _ in range(20)]
    after = trainer.export_weights()
    trainer.close()
    for name, weight in before.items():
        assert torch.equal(after[name], weight) != (".mtp_layers." in name), name
    first, last = (
        np.mean([[step[name] for step in part] for name in ("ppow/reward", "ppow/accepted")], axis=1)
        for part in (told[:3], told[-3:])
    )
    # The speed-up of a step holds the target's own token, which no draft can raise; that of `ppow` does not.
    least = 1.2 if objective in ("ppow", "ppow_exact") else 1.05
    assert last[1] > 1.2 * first[1] and last[0] > least * first[0]


def test_a_batch_without_a_window_is_left_out(path):
    trainer = make_trainer(path, CONFIG, ALGO, MTP, adapt_only=True, ppow=PPOW)
    before = trainer.export_weights()
    metrics = values(trainer.adapt_step(adaptation(longest=4)))  # turns of three tokens: two are drafted
    assert metrics["mtp/skipped_steps"] == 1 and metrics["ppow/reward"] is None
    assert_equal(trainer.export_weights(), before)
    trainer.close()


def test_every_metric_is_declared_with_its_kind(path):
    from rlpipe.metrics.names import declared

    trainer = make_trainer(path, CONFIG, ALGO, MTP, adapt_only=True, ppow=PPOW)
    metrics = trainer.adapt_step(adaptation())
    trainer.close()
    assert {"ppow/reward", "ppow/accepted", "ppow/score", "mtp/lr"} <= metrics.keys()
    for name, value in metrics.items():
        assert declared(name).kind.accepts(value), name


def test_a_layer_per_depth_is_refused(tmp_path):
    path = write_random_checkpoint(tmp_path / "model", "mimo", mtp_layers=3)
    with pytest.raises(ValueError, match="one MTP layer for all depths"):
        make_trainer(path, mtp=MTP)


def test_layers_that_keep_their_keys_to_themselves_are_refused(path, monkeypatch):
    monkeypatch.setattr(runtime, "_use_transformer_engine", lambda layers, gpu: True)
    with pytest.raises(ValueError, match=r"trainer\.layers=local"):
        make_trainer(path, mtp=MTP)
