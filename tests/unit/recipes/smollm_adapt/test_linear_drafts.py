"""Drafts fitted in closed form: their fits, and what is measured of them, on made texts."""

from __future__ import annotations

import pytest
import torch

from recipes.smollm_adapt import linear
from recipes.smollm_adapt.linear import DEPTHS, Text

pytestmark = pytest.mark.unit

VOCAB, HIDDEN = 20, 6
TABLE = torch.tensor([0, 2, 3, 5, 8, 9, 12, 17])
HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))


def made(seed: int, *, exact: bool = False, length: int = 14) -> Text:
    """A text; exact: f_{t+1} is a linear map of (f_t, e_{t+1}), normed as the drafts see them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (length,), generator=generator)
    embedded = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(6))[ids]
    layers = torch.randn(3, length, HIDDEN, generator=generator)
    if exact:
        weight = torch.randn(2 * HIDDEN + 2, HIDDEN, generator=torch.Generator().manual_seed(7))
        for t in range(length - 1):
            both = torch.cat([linear.normed(layers[-1, t]), linear.normed(embedded[t + 1])])
            layers[-1, t + 1] = both @ weight
    return Text(ids, torch.arange(length) > 2, layers, embedded)


def test_anchors_are_those_of_which_all_drafts_and_the_next_token_are_sampled():
    text = made(0)
    assert text.anchors.tolist() == [t for t in range(14 - 4) if t + 1 > 2]
    text.sampled[8] = False
    assert 4 not in text.anchors.tolist() and 7 not in text.anchors.tolist() and 8 in text.anchors.tolist()


def test_a_target_that_is_linear_in_the_inputs_is_found_and_only_with_the_token_that_was_sampled(monkeypatch):
    monkeypatch.setattr(linear, "RIDGES", (1e-9,))
    train, test = [made(s, exact=True) for s in range(30)], [made(99, exact=True)]
    found = linear.arms(train, test)

    def error(name: str, depth: int) -> float:
        wanted = linear.targets(test, depth)
        return ((found[name][depth - 1] - wanted).square().mean() / wanted.square().mean()).item()

    for depth in range(1, DEPTHS + 1):
        assert error("EAGLE", depth) < 1e-4
    for name in ("unshifted", "feature only", "token only", "parallel heads"):
        assert error(name, 1) > 0.1, name
    assert error("Hydra heads", 1) < 1e-4 and error("three layers", 1) < 1e-4


def test_acceptance_is_that_of_whole_distributions():
    texts, generator = [made(1), made(2)], torch.Generator().manual_seed(0)
    wanted = [linear.targets(texts, k) for k in (1, 2, 3)]
    states = [x + 0.3 * torch.randn(x.shape, generator=generator) for x in wanted]
    found = linear.HeldOut(texts, HEAD, TABLE).measure(states)
    row = 0
    for number, text in enumerate(texts):
        first, windows = [], []
        for t in text.anchors.tolist():
            p = [(text.layers[-1, t + k] @ HEAD.T).softmax(-1) for k in (1, 2, 3)]
            q = [
                torch.zeros(VOCAB).index_copy(0, TABLE, (s[row] @ HEAD[TABLE].T).softmax(-1)) for s in states
            ]
            x = [int(text.ids[t + k + 1]) for k in (1, 2, 3)]
            alpha = [torch.minimum(a, b).sum().item() for a, b in zip(p, q, strict=True)]
            accept = [min(1.0, (b[v] / a[v]).item()) for a, b, v in zip(p, q, x, strict=True)]
            first.append(alpha[0])
            windows.append(alpha[0] + accept[0] * alpha[1] + accept[0] * accept[1] * alpha[2])
            row += 1
        assert found["depth 1"][number] == pytest.approx(sum(first) / len(first), abs=1e-5)
        assert found["accepted of 3"][number] == pytest.approx(sum(windows) / len(windows), abs=1e-5)


def test_a_fit_without_ridge_is_least_squares(monkeypatch):
    monkeypatch.setattr(linear, "RIDGES", (0.0,))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 5, generator=generator), torch.randn(40, 3, generator=generator)
    torch.testing.assert_close(linear.fit(x, y), torch.linalg.lstsq(x, y).solution, atol=1e-4, rtol=1e-3)


def test_the_ridge_is_the_one_that_predicts_rows_it_was_not_fitted_on():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 20, generator=generator)
    noise, exact = torch.randn(24, 4, generator=generator), torch.randn(20, 4, generator=generator)
    for y, ridge in ((5 * noise, max(linear.RIDGES)), (x @ exact, min(linear.RIDGES))):
        expected = linear._solve(x.double(), y.double(), ridge).float()
        torch.testing.assert_close(linear.fit(x, y), expected)


def test_differences_are_paired_by_text():
    found = {"EAGLE": {"depth 1": [0.1, 0.5, 0.3]}, "other": {"depth 1": [0.2, 0.6, 0.4]}}
    table = linear.compare(found, "EAGLE")
    assert table["other"]["depth 1, minus EAGLE"] == pytest.approx([0.1, 0.1, 0.1])
    assert table["EAGLE"]["depth 1"][1] < 0.3 < table["EAGLE"]["depth 1"][2]
