"""Every verl symbol that `rlpipe.algo.verl_door` relies on exists and means what we think it means."""

from __future__ import annotations

import pytest
import torch

from rlpipe.algo import verl_door
from rlpipe.config.algo import AlgoConfig, KlKind, LossAgg

pytestmark = pytest.mark.unit

MASK = torch.tensor([[1.0, 1, 0], [1, 1, 1]])
INFO = {"dp_size": 1, "batch_num_tokens": 10, "global_batch_size": 4, "loss_scale_factor": None}


def test_an_unknown_policy_loss_is_refused_with_the_registered_names():
    with pytest.raises(ValueError, match=r"algo.policy_loss='vanila' .*'vanilla'"):
        verl_door.policy_loss("vanila")


def test_an_unknown_advantage_estimator_is_refused_with_the_registered_names():
    with pytest.raises(ValueError, match=r"algo.advantage='gprO' .*'grpo'"):
        verl_door.advantage_estimator("gprO")


def test_the_losses_and_estimators_of_the_documentation_are_registered():
    for name in ("vanilla", "gspo", "dppo_tv", "cispo", "clip_cov"):
        assert callable(verl_door.policy_loss(name))
    for name in ("grpo", "rloo", "reinforce_plus_plus_baseline", "opo"):
        assert callable(verl_door.advantage_estimator(name))


def test_token_mean_divides_by_the_tokens_of_the_global_batch():
    loss = verl_door.agg_loss(torch.ones(2, 3), MASK, "token-mean", **INFO)
    assert loss.item() == pytest.approx(5 / 10)


@pytest.mark.parametrize(("mode", "total"), [("seq-mean-token-sum", 5), ("seq-mean-token-mean", 2)])
def test_sequence_means_divide_by_the_sequences_of_the_global_batch(mode, total):
    assert verl_door.agg_loss(torch.ones(2, 3), MASK, mode, **INFO).item() == pytest.approx(total / 4)


@pytest.mark.parametrize("mode", LossAgg)
def test_every_aggregation_we_offer_is_accepted(mode):
    info = INFO | {"loss_scale_factor": 8}
    assert torch.isfinite(verl_door.agg_loss(torch.ones(2, 3), MASK, mode.value, **info))
    config = AlgoConfig(loss_agg=mode, loss_scale_factor=8)
    assert verl_door.actor_config(config, info).loss_agg_mode == mode.value


@pytest.mark.parametrize("kind", KlKind)
def test_every_kl_estimator_we_offer_vanishes_for_equal_policies_only(kind):
    logp = torch.tensor([[-1.0, -2.0]])
    assert verl_door.kl_penalty(logp, logp, kind.value).abs().max() == 0
    assert verl_door.kl_penalty(logp, logp - 0.5, kind.value).min() > 0


def test_k3_is_the_estimator_of_schulman():
    logp, ref = torch.tensor([-1.0]), torch.tensor([-1.7])
    expected = (ref - logp).exp() - (ref - logp) - 1
    assert verl_door.kl_penalty(logp, ref, "k3").item() == pytest.approx(expected.item())


def test_clip_settings_reach_the_loss():
    """ratio 1.5 and advantage 1: clipped at 1 + high; ratio 0.5 and advantage -1: clipped at 1 - low."""
    config = verl_door.actor_config(AlgoConfig(clip_low=0.1, clip_high=0.3), INFO | {"batch_num_tokens": 2})
    loss, _ = verl_door.policy_loss("vanilla")(
        old_log_prob=torch.zeros(1, 2),
        log_prob=torch.tensor([[1.5, 0.5]]).log(),
        advantages=torch.tensor([[1.0, -1.0]]),
        response_mask=torch.ones(1, 2),
        loss_agg_mode="token-mean",
        config=config,
        rollout_is_weights=None,
    )
    assert loss.item() == pytest.approx((-1.3 + 0.9) / 2)


def test_the_correction_truncates_the_ratio_of_trainer_to_rollout():
    trainer, rollout = torch.tensor([[0.0, -1.0]]), torch.tensor([[-2.0, -0.5]])
    proto, mask, metrics = verl_door.rollout_correction(
        old_log_prob=trainer,
        rollout_log_prob=rollout,
        response_mask=torch.ones(1, 2),
        rollout_is="token",
        rollout_is_threshold=2.0,
    )
    weights = proto.batch["rollout_is_weights"]
    torch.testing.assert_close(weights, torch.tensor([[2.0, 2.718281828**-0.5]]))
    assert mask.sum() == 2 and metrics["rollout_corr/kl"] == pytest.approx((-2.0 + 0.5) / 2)
