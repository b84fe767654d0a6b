"""Settings of the corrections: what contradicts itself is refused with the remedy."""

from __future__ import annotations

import pytest

from rlpipe.algo.correction import top_logprobs
from rlpipe.config.algo import AlgoConfig, Correction, LossAgg, MaskRule, ObrsConfig, ObrsNormalizer, Proximal

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"correction_threshold": 0.0}, "algo.correction_threshold=0.0 must be positive"),
        (
            {"correction": Correction.ICEPOP, "correction_low": 3.0},
            "correction_low=3.0 .*correction_threshold=2.0",
        ),
        ({"proximal": Proximal.ROLLOUT}, "algo.correction=tis_token would apply it again"),
        ({"proximal": Proximal.ROLLOUT, "correction": Correction.OBRS}, "set algo.correction=none"),
        (
            {"correction": Correction.OBRS, "loss_agg": LossAgg.SEQ_MEAN_TOKEN_MEAN},
            "algo.loss_agg=seq-mean-token-mean: .*Set algo.loss_agg=token-mean",
        ),
        ({"mask": MaskRule.SEQ_MEAN_K3}, "algo.mask=seq_mean_k3 needs algo.mask_high > 0, got None"),
        ({"mask_high": 2.0}, "bound nothing with algo.mask=none"),
        ({"mask": MaskRule.TOKEN_K2, "mask_high": 1.0, "mask_low": 0.5}, "this statistic has one bound"),
        ({"mask": MaskRule.TOKEN_K1, "mask_high": 1.0, "mask_low": 2.0}, "choose it from 0 to"),
        ({"mask": MaskRule.SEQ_SUM_K1, "mask_high": 0.5}, "set algo.mask_low"),
    ],
)
def test_contradictions_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AlgoConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lam": 0.0}, "algo.obrs.lam=0.0 must be positive: 1.0 is usual"),
        ({"c1": 0.5}, "algo.obrs.c1=0.5 must be at least 1: a smaller bound"),
        ({"c2": 0.9}, "algo.obrs.c2=0.9 must be at least 1"),
        ({"top_k": 0}, "algo.obrs.top_k=0 must be at least 1"),
    ],
)
def test_obrs_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ObrsConfig(**settings)


def test_the_engine_is_asked_for_candidates_only_by_obrs():
    assert top_logprobs(AlgoConfig(), 1000) == 0
    assert top_logprobs(AlgoConfig(correction=Correction.OBRS), 1000) == 20
    assert top_logprobs(AlgoConfig(correction=Correction.OBRS), 7) == 7
    exact = ObrsConfig(normalizer=ObrsNormalizer.EXACT)
    assert top_logprobs(AlgoConfig(correction=Correction.OBRS, obrs=exact), 1000) == 1000


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, False),
        ({"ppo_epochs": 2}, True),
        ({"minibatches": 2}, True),
        ({"minibatches": 2, "proximal": Proximal.CURRENT}, False),
        ({"minibatches": 2, "proximal": Proximal.ROLLOUT, "correction": Correction.NONE}, False),
        ({"minibatches": 2, "correction": Correction.OBRS}, True),
    ],
)
def test_a_pass_before_the_batch_is_made_only_where_its_logprobs_are_read(settings, needed):
    assert AlgoConfig(**settings).needs_start_logprobs is needed
