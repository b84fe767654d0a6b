"""The study of choosing rule and gamma: costs from break-even acceptances, and planted domains."""

from __future__ import annotations

import numpy as np
import pytest

from recipes.smollm_adapt import advice

pytestmark = pytest.mark.unit


def test_a_step_costs_what_the_acceptance_that_it_needs_emits():
    result = {
        "config": {"batches": [4]},
        "break_even_acceptance": {"batch 4, gamma 1": 0.5, "batch 4, gamma 2": 0.5, "batch 4, gamma 3": 1.0},
    }
    assert advice.step_costs(result) == {4: [1.0, 1.5, 1.75, 4.0]}


def test_tokens_per_step_are_one_and_the_accepted_drafts():
    reach = np.array([[0.5, 0.25, 0.125], [1.0, 0.5, 0.25]])
    one = {"entropy": np.zeros(2)} | {f"{rule}, reach": reach * (rule != "block") for rule in advice.RULES}
    (rows,) = advice.lengths([one])
    assert rows[0].tolist() == [2, 3.5, 4.25, 4.625, 2]
    assert rows[1].tolist() == [2, 2, 2, 2, 2]
    assert advice.speeds(rows, [1, 1.25, 2, 4])[0].tolist() == [1, 1.4, 1.0625, 0.578125]


def test_the_choice_of_another_domain_loses_where_domains_differ():
    def domain(rule: int, gamma: int) -> np.ndarray:
        """Answers of one context each; one rule accepts everything up to a gamma."""
        tokens = np.ones((3, 5))
        tokens[rule, :4] += np.minimum(np.arange(4), gamma)
        return np.stack([tokens] * 6)

    domains = {"a": domain(1, 2), "b": domain(1, 2), "c": domain(2, 3)}
    table = advice.regrets(domains, [1.0, 1.1, 1.2, 1.3])
    for name, one in table.items():
        assert one["here"] == pytest.approx(0, abs=1e-9), name
    assert table["a"]["best speed"] == pytest.approx(3 / 1.2)
    assert table["c"]["elsewhere"] == pytest.approx(1 - (1 / 1.2) / (4 / 1.3))
    assert table["a"]["default"] == pytest.approx(1 - (1 / 1.3) / (3 / 1.2))
    assert table["a"]["never"] == pytest.approx(1 - 1.2 / 3)

    row = advice.summary(domains, {8: [1.0, 1.1, 1.2, 1.3]})["8"]
    assert row["here"][0] == 0 and row["elsewhere minus here"][0] > 0.1
