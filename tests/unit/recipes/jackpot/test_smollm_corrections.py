"""What corrections leave of a distance: by hand on three tokens, and where they change nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from recipes.jackpot import smollm

pytestmark = pytest.mark.unit


def test_the_measure_of_each_correction_is_that_of_a_computation_by_hand():
    p, q = (torch.tensor([x], dtype=torch.float64) for x in ([0.6, 0.3, 0.1], [0.2, 0.3, 0.5]))
    found = smollm.measure(p.log(), q.log())
    z = 0.2 + 0.3 + 0.1
    measures = {  # q a w, and q a w^2
        "none": ([0.2, 0.3, 0.5], [0.2, 0.3, 0.5]),
        "coin only": ([0.2 * z, 0.3 * z, 0.5 * z], [0.2 * z, 0.3 * z, 0.5 * z]),
        "TIS": ([0.4, 0.3, 0.1], [0.8, 0.3, 0.02]),
        "TIS, bound 3": ([0.6, 0.3, 0.1], [1.8, 0.3, 0.02]),
        "masking only": ([0.2, 0.3, 0.1], [0.2, 0.3, 0.1]),
        "reweighting only": ([0.36, 0.18, 0.3], [0.648, 0.108, 0.18]),
        "OBRS": ([0.36, 0.18, 0.06], [0.648, 0.108, 0.036]),
    }
    assert found.keys() == measures.keys()
    for name, (first, second) in measures.items():
        m = torch.tensor(first, dtype=torch.float64)
        row = {key: value.item() for key, value in found[name].items()}
        assert row["mass"] == pytest.approx(m.sum().item()), name
        assert row["bias"] == pytest.approx((m / m.sum() - p[0]).abs().sum().item() / 2), name
        assert row["share"] == pytest.approx(m.sum().item() ** 2 / sum(second)), name
    assert found["OBRS"]["bias"].item() == pytest.approx(0)  # no weight is above its bound


def test_nothing_is_left_to_correct_where_the_policy_sampled_itself():
    p = torch.randn(5, 20, dtype=torch.float64).log_softmax(-1)
    for row in smollm.measure(p, p).values():
        for name, wanted in (("bias", 0.0), ("share", 1.0), ("mass", 1.0)):
            torch.testing.assert_close(row[name], torch.full((5,), wanted, dtype=torch.float64))


def test_contexts_are_those_before_sampled_tokens_and_each_policy_reads_with_its_head():
    generator = torch.Generator().manual_seed(0)
    stale, last, q_head, p_head = (torch.randn(4, 3, generator=generator) for _ in range(4))
    text, again = (
        SimpleNamespace(sampled=torch.tensor([False, False, True, True]), hidden=hidden)
        for hidden in (stale, last)
    )
    ((log_p, log_q),) = smollm.contexts([text], [again], [q_head, p_head])
    torch.testing.assert_close(log_p, (last[1:3] @ p_head.T).double().log_softmax(-1))
    torch.testing.assert_close(log_q, (stale[1:3] @ q_head.T).double().log_softmax(-1))


def test_figures_are_over_runs_and_paired_with_obrs():
    runs = [{"kl": 0.1, "none": {"bias": 0.3 + x}, "OBRS": {"bias": 0.1 + x}} for x in (0.0, 0.1, 0.2)]
    row = smollm.summary({20: runs})["20"]
    assert row["none"]["bias, minus OBRS"] == pytest.approx([0.2, 0.2, 0.2])
    assert row["none"]["bias"][0] == pytest.approx(0.4) and row["none"]["bias"][1] < 0.4
