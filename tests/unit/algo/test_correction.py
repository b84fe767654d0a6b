"""The contract of corrections: weights, mask and metrics of each kind, against hand computations."""

from __future__ import annotations

import math

import pytest
import torch

from rlpipe.algo.correction import add_sample_size, correct, make_rule
from rlpipe.algo.obrs import Obrs, acceptance, kept_logprobs, kl, normalizer_bounds
from rlpipe.algo.policy_loss import LossInputs, LossTotals, finish, micro_batch_loss, optimizer_step_count
from rlpipe.algo.rule import TokenExtras
from rlpipe.config.algo import (
    AlgoConfig,
    Correction,
    MaskRule,
    ObrsCalibration,
    ObrsConfig,
    ObrsNormalizer,
    ObrsTarget,
    Proximal,
)
from rlpipe.metrics.names import declared
from rlpipe.metrics.values import Mean, Ratio, reduce

pytestmark = pytest.mark.unit

# ratios of trainer to rollout: 2, 1, 1/4 and, in the second row, 1/2 and 8
MASK = torch.tensor([[1.0, 1, 1], [1, 0, 1]])
ROLLOUT = torch.tensor([[0.2, 0.5, 0.4], [0.5, 1.0, 0.1]]).log()
TRAINER = torch.tensor([[0.4, 0.5, 0.1], [0.25, 1.0, 0.8]]).log()
TOKENS = 5


def corrected(config, trainer=TRAINER, rollout=ROLLOUT, current=None, obrs=None):
    return correct(
        current_logprobs=trainer if current is None else current,
        trainer_logprobs=trainer,
        rollout_logprobs=rollout,
        mask=MASK,
        config=config,
        rule=make_rule(config),
        extras=obrs,
    )


def rows(*values):
    return torch.tensor(values)


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        ({"correction": Correction.TIS_TOKEN}, rows([2, 1, 0.25], [0.5, 0, 2])),
        (
            {"correction": Correction.TIS_TOKEN, "correction_threshold": 1.5},
            rows([1.5, 1, 0.25], [0.5, 0, 1.5]),
        ),
        (
            {"correction": Correction.TIS_SEQUENCE, "correction_threshold": 3.0},
            rows([0.5, 0.5, 0.5], [3, 0, 3]),
        ),
        ({"correction": Correction.ICEPOP, "correction_threshold": 3.0}, rows([2, 1, 0], [0.5, 0, 0])),
        (
            {"correction": Correction.ICEPOP, "correction_low": 0.1, "correction_threshold": 9.0},
            rows([2, 1, 0.25], [0.5, 0, 8]),
        ),
    ],
)
def test_ratio_weights_equal_the_hand_computation(config, weights):
    found = corrected(AlgoConfig(**config))
    torch.testing.assert_close(found.weights, weights * MASK)
    assert torch.equal(found.mask, MASK)
    metrics, flat = add_sample_size(reduce([found.metrics])), weights[MASK.bool()]
    assert metrics["rollout_corr/rollout_is_mean"].value() == pytest.approx(flat.mean().item())
    size = (flat.mean() ** 2 / flat.square().mean()).item()
    assert metrics["rollout_corr/rollout_is_eff_sample_size"].value() == pytest.approx(size, rel=1e-5)


def test_without_correction_there_are_no_weights():
    found = corrected(AlgoConfig(correction=Correction.NONE))
    assert found.weights is None and torch.equal(found.mask, MASK)


def test_icepop_reports_the_share_of_tokens_it_silences():
    found = corrected(AlgoConfig(correction=Correction.ICEPOP, correction_threshold=3.0))
    assert found.metrics["rollout_corr/rollout_is_oob_ratio"].value() == pytest.approx(2 / TOKENS)


LOG_RATIOS = (TRAINER - ROLLOUT) * MASK
SUM = LOG_RATIOS.sum(-1)  # log 1/2 and log 4
MEAN = SUM / MASK.sum(-1)
K3 = (LOG_RATIOS.exp() - 1 - LOG_RATIOS) * MASK


@pytest.mark.parametrize(
    ("rule", "bounds", "kept"),
    [
        (MaskRule.TOKEN_K1, {"mask_high": 2.5}, [[1, 1, 0], [1, 0, 0]]),
        (MaskRule.TOKEN_K1, {"mask_high": 9.0, "mask_low": 0.9}, [[0, 1, 1], [1, 0, 0]]),
        (MaskRule.TOKEN_K2, {"mask_high": 0.5}, [[1, 1, 0], [1, 0, 0]]),
        (MaskRule.TOKEN_K3, {"mask_high": 0.3}, [[0, 1, 0], [1, 0, 0]]),
        (MaskRule.SEQ_SUM_K1, {"mask_high": 3.0}, [[1, 1, 1], [0, 0, 0]]),
        (MaskRule.SEQ_MEAN_K1, {"mask_high": 1.5}, [[1, 1, 1], [0, 0, 0]]),
        (MaskRule.SEQ_SUM_K2, {"mask_high": 1.3}, [[1, 1, 1], [0, 0, 0]]),
        (MaskRule.SEQ_MEAN_K2, {"mask_high": 0.3}, [[0, 0, 0], [0, 0, 0]]),
        (MaskRule.SEQ_SUM_K3, {"mask_high": 1.0}, [[1, 1, 1], [0, 0, 0]]),
        (MaskRule.SEQ_MEAN_K3, {"mask_high": 3.0}, [[1, 1, 1], [1, 0, 1]]),
        (MaskRule.SEQ_MAX_K2, {"mask_high": 1.0}, [[1, 1, 1], [0, 0, 0]]),
        (MaskRule.SEQ_MAX_K3, {"mask_high": 0.5}, [[0, 0, 0], [0, 0, 0]]),
    ],
)
def test_divergence_masks_keep_what_lies_within_their_bounds(rule, bounds, kept):
    kept = torch.tensor(kept, dtype=torch.float32)
    found = corrected(AlgoConfig(mask=rule, **bounds))
    assert torch.equal(found.mask, kept)
    torch.testing.assert_close(found.weights, rows([2, 1, 0.25], [0.5, 0, 2]) * kept)
    lost = (MASK - kept).sum().item() / TOKENS
    assert found.metrics["rollout_corr/rollout_rs_masked_fraction"].value() == pytest.approx(lost)
    lost_rows = ((MASK - kept).sum(-1) > 0).float().mean().item()
    assert found.metrics["rollout_corr/rollout_rs_seq_masked_fraction"].value() == pytest.approx(lost_rows)


def test_a_mask_works_without_weights():
    found = corrected(AlgoConfig(correction=Correction.NONE, mask=MaskRule.SEQ_SUM_K1, mask_high=3.0))
    assert found.weights is None and found.mask.sum() == 3


VOCAB = 6


def obrs_case(seed=0, gap=1.0, rows=3, width=4):
    """Whole-vocabulary policies (rollout, start of batch, current) of a micro-batch, and sampled tokens."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(rows, width)
    mask[0, -1] = mask[-1, 1] = 0
    tokens = int(mask.sum())
    logits = torch.randn(tokens, VOCAB, generator=generator)
    laws = [
        (logits + scale * gap * torch.randn(tokens, VOCAB, generator=generator)).log_softmax(-1)
        for scale in (0, 1, 1.3)
    ]
    sampled = torch.multinomial(laws[0].exp(), 1, generator=generator)
    grids = [
        torch.zeros_like(mask).masked_scatter(mask.bool(), law.gather(-1, sampled).squeeze(-1))
        for law in laws
    ]
    draws = torch.rand(tokens, generator=generator)
    return mask, laws, grids, draws


def settings(**kwargs):
    return AlgoConfig(correction=Correction.OBRS, obrs=ObrsConfig(**kwargs))


@pytest.mark.parametrize("lam", [0.5, 1.0, 1.5])
def test_the_parts_of_obrs_reject_without_weights_and_weigh_without_rejection(lam):
    """Masking only: 1 where u < p / (lam q). Reweighting only: min(Z max(lam, p / q), c1) everywhere."""
    mask, laws, (rollout, _, current), draws = obrs_case()
    found = {}
    for part in (Correction.OBRS_MASK, Correction.OBRS_WEIGHT):
        obrs = ObrsConfig(lam=lam, normalizer=ObrsNormalizer.EXACT, c1=1.2, c2=1e6)
        config = AlgoConfig(correction=part, obrs=obrs)
        found[part] = correct(
            current_logprobs=current,
            trainer_logprobs=current,
            rollout_logprobs=rollout,
            mask=mask,
            config=config,
            rule=make_rule(config),
            extras=TokenExtras(columns={"uniforms": draws}, rollout_top=laws[0], target_top=laws[2]),
        )
    where = mask.bool()
    p, q = current[where].exp(), rollout[where].exp()
    accepted = draws < (p / (lam * q)).clamp(max=1)
    z = torch.minimum(laws[0].exp(), laws[2].exp() / lam).sum(-1)

    masked, weighed = found.values()
    torch.testing.assert_close(masked.weights[where], accepted.float())
    assert torch.equal(masked.mask[where].bool(), accepted) and 0 < accepted.sum() < len(accepted)
    torch.testing.assert_close(weighed.weights[where], (z * (p / q).clamp(min=lam)).clamp(max=1.2))
    assert torch.equal(weighed.mask, mask)


@pytest.mark.parametrize("target", list(ObrsTarget))
@pytest.mark.parametrize("lam", [0.5, 1.0, 1.5])
def test_obrs_weights_equal_equation_5_for_either_target(target, lam):
    """min(p_target / q', c1) min(p_start / p_target, c2) on accepted tokens, 0 on rejected ones."""
    mask, laws, (rollout, start, current), draws = obrs_case()
    which = laws[2] if target is ObrsTarget.CURRENT else laws[1]
    config = settings(lam=lam, target=target, normalizer=ObrsNormalizer.EXACT, c1=1.2, c2=1.1)
    found = correct(
        current_logprobs=current,
        trainer_logprobs=start,
        rollout_logprobs=rollout,
        mask=mask,
        config=config,
        rule=make_rule(config),
        extras=TokenExtras(columns={"uniforms": draws}, rollout_top=laws[0], target_top=which),
    )
    where = mask.bool()
    p = (current if target is ObrsTarget.CURRENT else start)[where].exp()
    q = rollout[where].exp()
    accepted = draws < (p / (lam * q)).clamp(max=1)
    z = torch.minimum(laws[0].exp(), which.exp() / lam).sum(-1)
    kept = torch.minimum(q, p / lam) / z
    expected = (p / kept).clamp(max=1.2) * (start[where].exp() / p).clamp(max=1.1) * accepted
    torch.testing.assert_close(found.weights[where], expected)
    assert torch.equal(found.mask[where].bool(), accepted) and not found.mask[~where].any()
    assert 0 < accepted.sum() < len(accepted)


def test_obrs_metrics_equal_their_definitions_and_are_declared():
    mask, laws, (rollout, _, current), draws = obrs_case(seed=3)
    config = settings(normalizer=ObrsNormalizer.EXACT, c1=1.05, top_k=2)
    found = correct(
        current_logprobs=current,
        trainer_logprobs=current,
        rollout_logprobs=rollout,
        mask=mask,
        config=config,
        rule=make_rule(config),
        extras=TokenExtras(columns={"uniforms": draws}, rollout_top=laws[0], target_top=laws[2]),
    )
    where = mask.bool()
    probs = acceptance(current[where], rollout[where], 1.0)
    accepted = draws < probs
    p, q = laws[2].exp(), laws[0].exp()
    z = torch.minimum(p, q).sum(-1)
    best, ids = laws[0].topk(2, -1)
    estimate = normalizer_bounds(laws[2].gather(-1, ids), best, 1.0)[1]
    w = z * (current[where] - rollout[where]).exp().clamp(min=1.0)
    applied = w.clamp(max=1.05) * accepted
    expected = {
        "obrs_acceptance": accepted.float().mean(),
        "obrs_acceptance_prob": probs.mean(),
        "obrs_z": z.mean(),
        "obrs_z_ratio": estimate.sum() / z.sum(),
        "obrs_kappa": probs.sum() / estimate.sum(),
        "obrs_kl_before": kl(laws[2], laws[0]).mean(),
        "obrs_kl_after": kl(laws[2], kept_logprobs(laws[2], laws[0], 1.0)).mean(),
        "obrs_truncated": (w > 1.05)[accepted].float().mean(),
        "rollout_is_mean": applied.mean(),
        "rollout_is_eff_sample_size": applied.mean() ** 2 / applied.square().mean(),
    }
    metrics = add_sample_size(found.metrics)
    for name, value in expected.items():
        key = f"rollout_corr/{name}"
        assert metrics[key].value() == pytest.approx(value.item(), rel=1e-4), name
        assert declared(key).kind.accepts(metrics[key])


@pytest.mark.parametrize("calibration", [ObrsCalibration.ACCEPTED, ObrsCalibration.PROBABILITY])
def test_kappa_of_many_batches_removes_the_bias_of_the_candidates(calibration):
    """Σ rate / Σ Z_approx over draws tends to Σ Z / Σ Z_approx."""
    mask, laws, (_, _, _), _ = obrs_case(seed=5)
    generator = torch.Generator().manual_seed(0)
    where, rounds = mask.bool(), 600
    config = settings(normalizer=ObrsNormalizer.TOPK, calibration=calibration)
    best, ids = laws[0].topk(2, -1)
    top = {"rollout_top": best, "target_top": laws[2].gather(-1, ids)}
    parts = []
    for _ in range(rounds):
        sampled = torch.multinomial(laws[0].exp(), 1, generator=generator)
        q, p = (
            torch.zeros_like(mask).masked_scatter(where, law.gather(-1, sampled))
            for law in (laws[0], laws[2])
        )
        draws = torch.rand(len(sampled), generator=generator)
        inputs = TokenExtras(columns={"uniforms": draws}, **top)
        found = correct(
            current_logprobs=p,
            trainer_logprobs=p,
            rollout_logprobs=q,
            mask=mask,
            config=config,
            rule=make_rule(config),
            extras=inputs,
        )
        parts.append({"rollout_corr/obrs_kappa": found.metrics["rollout_corr/obrs_kappa"]})
    exact = torch.minimum(laws[0].exp(), laws[2].exp()).sum()
    estimate = torch.minimum(best.exp(), top["target_top"].exp()).sum()
    # the standard error of the share of accepted tokens is at most 0.5 / sqrt(tokens drawn)
    tolerance = 4 * 0.5 / math.sqrt(rounds * len(best)) * len(best) / estimate.item()
    rule = Obrs(config)
    rule.observe(reduce(parts))
    assert rule.kappa == pytest.approx((exact / estimate).item(), abs=tolerance)
    assert exact / estimate > 1.1


def test_the_next_calibration_is_the_one_measured_and_stays_when_nothing_was():
    rule = Obrs(settings())
    for measured in (Ratio(11, 10), Ratio(0, 10), Ratio(0, 0)):
        rule.observe({"rollout_corr/obrs_kappa": measured})
        assert rule.kappa == pytest.approx(1.1)
    rule.observe({"actor/lr": Mean(1, 1)})
    assert rule.kappa == pytest.approx(1.1)


@pytest.mark.parametrize("correction", [kind for kind in Correction if kind is not Correction.USER])
def test_equal_policies_are_not_corrected_by_any_kind(correction):
    """Every weight is exactly 1 and no token is lost: with lambda 1 a correction costs nothing on-policy."""
    mask, laws, (rollout, _, _), draws = obrs_case()
    best, ids = laws[0].topk(2, -1)
    found = correct(
        current_logprobs=rollout,
        trainer_logprobs=rollout,
        rollout_logprobs=rollout,
        mask=mask,
        config=AlgoConfig(correction=correction),
        rule=make_rule(AlgoConfig(correction=correction)),
        extras=TokenExtras(columns={"uniforms": draws}, rollout_top=best, target_top=laws[0].gather(-1, ids)),
    )
    assert torch.equal(found.mask, mask)
    assert correction is Correction.NONE or torch.equal(found.weights, mask)
    if correction is not Correction.NONE:
        assert add_sample_size(found.metrics)["rollout_corr/rollout_is_eff_sample_size"].value() == 1
    if correction.is_obrs:
        assert found.metrics["rollout_corr/obrs_acceptance"].value() == 1
        assert found.metrics["rollout_corr/obrs_kappa"].value() == 1


def test_a_mask_applies_on_top_of_obrs_and_reports_only_what_it_took():
    mask, laws, (rollout, start, current), draws = obrs_case()
    alone, both = (
        correct(
            current_logprobs=current,
            trainer_logprobs=start,
            rollout_logprobs=rollout,
            mask=mask,
            config=config,
            rule=make_rule(config),
            extras=TokenExtras(columns={"uniforms": draws}, rollout_top=laws[0], target_top=laws[2]),
        )
        for config in (
            AlgoConfig(correction=Correction.OBRS, **mask_settings)
            for mask_settings in ({}, {"mask": MaskRule.TOKEN_K1, "mask_high": 1.5})
        )
    )
    inside = ((start - rollout).abs() <= math.log(1.5)) * mask
    assert torch.equal(both.mask, alone.mask * inside)
    torch.testing.assert_close(both.weights, alone.weights * inside)
    lost = 1 - (inside.sum() / mask.sum()).item()
    assert both.metrics["rollout_corr/rollout_rs_masked_fraction"].value() == pytest.approx(lost)
    assert 0 < both.mask.sum() < alone.mask.sum()


def test_obrs_without_its_inputs_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"got no candidates.*top_logprobs"):
        corrected(settings())


def loss_case(seed=0):
    mask, laws, (rollout, start, current), draws = obrs_case(seed)
    advantages = torch.linspace(-1, 1, mask.numel()).view_as(mask) * mask
    return mask, laws, rollout, start, current, draws, advantages


def gradient(
    config, mask, rollout, start, current, advantages, obrs=None, totals=None, reference=None, kappa=1.0
):
    rule = make_rule(config)
    if isinstance(rule, Obrs):
        rule.kappa = kappa
    logprobs = current.clone().requires_grad_()
    inputs = LossInputs(
        logprobs=logprobs,
        entropies=torch.ones_like(mask) * mask,
        old_logprobs=start,
        rollout_logprobs=rollout,
        advantages=advantages,
        mask=mask,
        reference_logprobs=reference,
    )
    loss, metrics = micro_batch_loss(
        inputs,
        totals or LossTotals(tokens=mask.sum().item(), sequences=len(mask), dp_size=1),
        config,
        rule=make_rule(config),
        extras=obrs,
    )
    loss.backward()
    return logprobs.grad, metrics


WIDE = {"clip_low": 1.0, "clip_high": 1e9, "clip_dual": 1e9}


def test_the_loss_leaves_out_rejected_tokens_and_weighs_the_rest():
    mask, laws, rollout, start, current, draws, advantages = loss_case()
    obrs = TokenExtras(columns={"uniforms": draws}, rollout_top=laws[0], target_top=laws[2])
    exact = ObrsConfig(normalizer=ObrsNormalizer.EXACT)
    config = AlgoConfig(correction=Correction.OBRS, obrs=exact, kl_coef=0.5, **WIDE)
    found = correct(
        current_logprobs=current,
        trainer_logprobs=start,
        rollout_logprobs=rollout,
        mask=mask,
        config=config,
        rule=make_rule(config),
        extras=obrs,
    )
    reference = start - 0.1 * mask
    grad, metrics = gradient(config, mask, rollout, start, current, advantages, obrs, reference=reference)
    ratio = (current - start).exp()
    kl_slope = 0.5 * (1 - (reference - current).exp())
    expected = (-advantages * found.weights * ratio + kl_slope * found.mask) / mask.sum()
    torch.testing.assert_close(grad, expected)
    assert 0 < found.mask.sum() < mask.sum() and not grad[found.mask == 0].any()
    assert metrics["perf/train_tokens"].value() == mask.sum()


@pytest.mark.parametrize("correction", [Correction.TIS_TOKEN, Correction.OBRS])
def test_the_short_circuit_follows_the_current_policy_and_never_clips(correction):
    """Jackpot App. 10.1: weight sg(p_new) / p_inf (of the kept tokens, for OBRS), gradient of log p_new."""
    mask, laws, rollout, start, current, draws, advantages = loss_case(2)
    config = AlgoConfig(correction=correction, proximal=Proximal.CURRENT, clip_low=1e-6, clip_high=1e-6)
    config.obrs.normalizer = ObrsNormalizer.EXACT
    obrs = TokenExtras(columns={"uniforms": draws}, rollout_top=laws[0], target_top=laws[2])
    grad, metrics = gradient(config, mask, rollout, start, current, advantages, obrs)
    ratio = (current - rollout).exp()
    weight = ratio.clamp(max=2.0)
    if correction is Correction.OBRS:
        where = mask.bool()
        z = torch.zeros_like(mask).masked_scatter(where, torch.minimum(laws[0].exp(), laws[2].exp()).sum(-1))
        accepted = torch.zeros_like(mask).masked_scatter(where, (draws < ratio[where]).float())
        weight = (z * ratio.clamp(min=1.0)).clamp(max=3.0) * accepted
    torch.testing.assert_close(grad, -advantages * weight / mask.sum())
    assert metrics["actor/pg_clipfrac"].value() == 0


def test_decoupled_ppo_clips_against_the_start_and_weighs_from_the_rollout_to_it():
    mask, _, rollout, start, current, _, advantages = loss_case()
    grad, _ = gradient(AlgoConfig(clip_dual=1e9), mask, rollout, start, current, advantages)
    ratio, weight = (current - start).exp(), (start - rollout).exp().clamp(max=2.0)
    free = torch.where(advantages > 0, ratio <= 1.2, ratio >= 0.8)
    torch.testing.assert_close(grad, -advantages * weight * ratio * free / mask.sum())
    assert not free.all()


def test_coupled_ppo_clips_against_the_rollout_without_weights():
    mask, _, rollout, start, current, _, advantages = loss_case()
    config = AlgoConfig(proximal=Proximal.ROLLOUT, correction=Correction.NONE, clip_dual=1e9)
    grad, metrics = gradient(config, mask, rollout, start, current, advantages)
    ratio = (current - rollout).exp()
    free = torch.where(advantages > 0, ratio <= 1.2, ratio >= 0.8)
    torch.testing.assert_close(grad, -advantages * ratio * free / mask.sum())
    gap = (rollout - start)[mask.bool()].mean().item()
    assert metrics["rollout_corr/kl"].value() == pytest.approx(gap, rel=1e-5)


def test_a_micro_batch_that_loses_all_its_tokens_has_gradient_zero_and_still_reports():
    mask, laws, rollout, start, current, draws, advantages = loss_case()
    obrs = TokenExtras(columns={"uniforms": torch.ones_like(draws)}, rollout_top=laws[0], target_top=laws[2])
    grad, metrics = gradient(settings(lam=2.0), mask, rollout, start, current, advantages, obrs)
    assert not grad.any()
    assert metrics["rollout_corr/obrs_acceptance"].value() < 1
    grad, metrics = gradient(settings(lam=1e6), mask, rollout, start, current, advantages, obrs)
    assert not grad.any() and metrics["rollout_corr/obrs_acceptance"].value() == 0


@pytest.mark.parametrize("loss", ["vanilla", "gspo", "cispo", "gpg"])
def test_obrs_reaches_other_losses(loss):
    mask, laws, rollout, start, current, draws, advantages = loss_case()
    obrs = TokenExtras(columns={"uniforms": draws}, rollout_top=laws[0], target_top=laws[2])
    config = AlgoConfig(correction=Correction.OBRS, policy_loss=loss)
    grad, _ = gradient(config, mask, rollout, start, current, advantages, obrs)
    assert grad.isfinite().all() and grad.any()


def test_weights_and_metrics_do_not_depend_on_the_cut_into_micro_batches():
    mask, laws, rollout, start, current, draws, advantages = loss_case()
    config, totals = settings(), LossTotals(tokens=mask.sum().item(), sequences=len(mask), dp_size=1)
    best, ids = laws[0].topk(3, -1)
    top = laws[2].gather(-1, ids)
    ends = [0, *mask.sum(-1).cumsum(0).int().tolist()]

    def part(rows):
        flat = slice(ends[rows.start], ends[rows.stop])
        inputs = TokenExtras(columns={"uniforms": draws[flat]}, rollout_top=best[flat], target_top=top[flat])
        grids = (x[rows] for x in (mask, rollout, start, current, advantages))
        return gradient(config, *grids, obrs=inputs, totals=totals, kappa=1.1)

    whole, metrics = part(slice(0, 3))
    parts = [part(slice(i, i + 1)) for i in range(3)]
    torch.testing.assert_close(torch.cat([g for g, _ in parts]), whole)
    one_step = optimizer_step_count(config)
    merged = finish(reduce([*(m for _, m in parts), one_step]))
    for name, value in finish(reduce([metrics, one_step])).items():
        assert merged[name].value() == pytest.approx(value.value(), rel=1e-4, abs=1e-6), name
