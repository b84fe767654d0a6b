"""The loss of micro-batches: an autograd oracle, independence of the cut, exact metrics."""

from __future__ import annotations

import pytest
import torch

from rlpipe.algo.policy_loss import LossInputs, LossTotals, finish, micro_batch_loss, optimizer_step_count
from rlpipe.config.algo import AlgoConfig, Correction, LossAgg
from rlpipe.metrics.values import Sum, reduce

pytestmark = pytest.mark.unit

B, S = 4, 7


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high):
        return low + (high - low) * torch.rand(B, S, generator=generator)

    mask = (uniform(0, 1) > 0.3).float()
    mask[:, 0] = 1
    return {
        "logprobs": uniform(-3, -0.1) * mask,
        "entropies": uniform(0, 2) * mask,
        "old_logprobs": uniform(-3, -0.1) * mask,
        "rollout_logprobs": uniform(-3, -0.1) * mask,
        "advantages": uniform(-2, 2) * mask,
        "mask": mask,
        "reference_logprobs": uniform(-3, -0.1) * mask,
    }


def totals_of(mask, dp_size=1):
    return LossTotals(tokens=mask.sum().item(), sequences=len(mask), dp_size=dp_size)


def gradient(data, config, totals):
    logprobs = data["logprobs"].clone().requires_grad_()
    entropies = data["entropies"].clone().requires_grad_()
    reference = data["reference_logprobs"] if config.kl_coef else None
    loss, metrics = micro_batch_loss(
        LossInputs(**data | {"logprobs": logprobs, "entropies": entropies, "reference_logprobs": reference}),
        totals,
        config,
    )
    loss.backward()
    grad_entropy = torch.zeros_like(entropies) if entropies.grad is None else entropies.grad
    return loss.item(), logprobs.grad, grad_entropy, metrics


def test_loss_and_gradient_equal_a_plain_implementation_of_the_clipped_objective():
    data, config = batch(), AlgoConfig(kl_coef=0.3, entropy_coef=0.2, clip_low=0.1, clip_high=0.25)
    mask, advantages = data["mask"], data["advantages"]
    logprobs = data["logprobs"].clone().requires_grad_()
    entropies = data["entropies"].clone().requires_grad_()
    ratio = (logprobs - data["old_logprobs"]).exp()
    weight = (data["old_logprobs"] - data["rollout_logprobs"]).exp().clamp(max=2.0)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.25) * advantages)
    dual = torch.where(advantages < 0, torch.maximum(surrogate, 3.0 * advantages), surrogate)
    log_reference = data["reference_logprobs"] - logprobs
    kl = log_reference.exp() - log_reference - 1
    loss = (((-dual * weight + 0.3 * kl - 0.2 * entropies) * mask).sum()) / mask.sum()
    loss.backward()

    found, grad, grad_entropy, _ = gradient(data, config, totals_of(mask))
    assert found == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(grad, logprobs.grad)
    torch.testing.assert_close(grad_entropy, entropies.grad)


@pytest.mark.parametrize("agg", [LossAgg.TOKEN_MEAN, LossAgg.SEQ_MEAN_TOKEN_SUM, LossAgg.SEQ_MEAN_TOKEN_MEAN])
def test_the_sum_over_micro_batches_does_not_depend_on_the_cut(agg):
    data, config = batch(), AlgoConfig(loss_agg=agg, kl_coef=0.1, entropy_coef=0.1)
    totals = totals_of(data["mask"])
    whole_loss, whole, _, whole_metrics = gradient(data, config, totals)
    parts = [gradient({k: v[rows] for k, v in data.items()}, config, totals) for rows in ([0], [1, 2], [3])]
    assert sum(p[0] for p in parts) == pytest.approx(whole_loss, rel=1e-5)
    torch.testing.assert_close(torch.cat([p[1] for p in parts]), whole)
    one_step = optimizer_step_count(config)
    merged = finish(reduce([*(p[3] for p in parts), one_step]))
    for name, value in finish(reduce([whole_metrics, one_step])).items():
        assert merged[name].value() == pytest.approx(value.value(), rel=1e-4, abs=1e-6), name


def test_data_parallel_scaling_cancels_the_mean_over_ranks():
    data, config = batch(), AlgoConfig()
    _, alone, _, _ = gradient(data, config, totals_of(data["mask"]))
    _, one_of_four, _, _ = gradient(data, config, totals_of(data["mask"], dp_size=4))
    torch.testing.assert_close(one_of_four / 4, alone)


def test_with_one_step_the_gradient_is_the_policy_gradient():
    """old = current: the ratio is 1 and its gradient that of log pi, weighted by truncated importance."""
    data = batch()
    data["old_logprobs"] = data["logprobs"]
    _, grad, _, metrics = gradient(data, AlgoConfig(), totals_of(data["mask"]))
    weight = (data["logprobs"] - data["rollout_logprobs"]).exp().clamp(max=2.0)
    torch.testing.assert_close(grad, -data["advantages"] * weight * data["mask"] / data["mask"].sum())
    assert metrics["actor/ppo_kl"].value() == 0 and metrics["actor/pg_clipfrac"].value() == 0


def test_without_correction_the_weights_are_one():
    data = batch()
    data["old_logprobs"] = data["logprobs"]
    _, grad, _, metrics = gradient(data, AlgoConfig(correction=Correction.NONE), totals_of(data["mask"]))
    torch.testing.assert_close(grad, -data["advantages"] * data["mask"] / data["mask"].sum())
    assert "rollout_corr/kl" in metrics and "rollout_corr/rollout_is_mean" not in metrics


def test_sequence_correction_weighs_whole_trajectories():
    data = batch()
    data["old_logprobs"] = data["logprobs"]
    data["rollout_logprobs"] = (data["logprobs"] + 0.05) * data["mask"]
    config = AlgoConfig(correction=Correction.TIS_SEQUENCE)
    _, grad, _, _ = gradient(data, config, totals_of(data["mask"]))
    weight = (-0.05 * data["mask"].sum(-1, keepdim=True)).exp()
    torch.testing.assert_close(grad, -data["advantages"] * weight * data["mask"] / data["mask"].sum())


def test_an_empty_micro_batch_has_loss_zero_and_counts_no_token():
    data = {k: torch.zeros_like(v) for k, v in batch().items()}
    loss, grad, _, metrics = gradient(data, AlgoConfig(), LossTotals(tokens=5, sequences=1, dp_size=1))
    assert loss == 0 and not grad.any() and metrics == {"perf/train_tokens": Sum(0)}


def test_probability_metrics_equal_their_definition_over_all_tokens():
    data = batch()
    _, _, _, metrics = gradient(data, AlgoConfig(), totals_of(data["mask"]))
    metrics = finish(metrics)
    chosen = data["mask"].bool()
    x, y = data["rollout_logprobs"][chosen].exp(), data["old_logprobs"][chosen].exp()
    correlation = torch.corrcoef(torch.stack([x, y]))[0, 1].item()
    assert metrics["training/rollout_actor_probs_pearson_corr"].value() == pytest.approx(
        correlation, abs=1e-5
    )
    assert metrics["training/rollout_probs_diff_mean"].value() == pytest.approx((x - y).abs().mean().item())
    assert metrics["training/rollout_probs_diff_max"].value() == pytest.approx((x - y).abs().max().item())
    weight = (y / x).clamp(max=2.0)
    size = (weight.mean() ** 2 / weight.square().mean()).item()
    assert metrics["rollout_corr/rollout_is_eff_sample_size"].value() == pytest.approx(size, rel=1e-5)


@pytest.mark.parametrize("name", ["gspo", "dppo_tv", "cispo", "clip_cov", "gpg"])
def test_other_losses_are_reached_by_name_and_give_a_gradient(name):
    data = batch()
    data["old_logprobs"] = (data["logprobs"] - 0.01) * data["mask"]
    _, grad, _, _ = gradient(data, AlgoConfig(policy_loss=name), totals_of(data["mask"]))
    assert grad.isfinite().all() and grad.any()
