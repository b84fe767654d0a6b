"""The studies on SmolLM2: what they compute of texts against dense distributions, and their intervals."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recipes.smollm_adapt import objectives, rules
from recipes.smollm_adapt.texts import Text
from rlpipe.drafts.loss import mtp_loss
from rlpipe.drafts.vocabulary import spread

pytestmark = pytest.mark.unit

VOCAB, HIDDEN, LENGTH = 30, 16, 12
TABLE = torch.tensor([0, 2, 3, 5, 8, 9, 12, 17, 20, 21, 25, 28])


class Case:
    """A text, states of a draft at three depths, and a head; bfloat16 where the model has it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).bfloat16()

        self.head, hidden = normal(VOCAB, HIDDEN), normal(LENGTH, HIDDEN) / 2
        self.states = [(hidden.roll(-k, 0) + normal(LENGTH, HIDDEN) / 5).float()[None] for k in (1, 2, 3)]
        logits = hidden.float() @ self.head.float().T
        self.log_p = logits.log_softmax(-1)
        self.text = Text(
            ids=torch.randint(0, VOCAB, (LENGTH,), generator=generator),
            sampled=torch.arange(LENGTH) > 2,
            hidden=hidden,
            normaliser=logits.logsumexp(-1),
            entropy=-(self.log_p.exp() * self.log_p).sum(-1),
            top=logits.argmax(-1),
        )
        self.layer = SimpleNamespace(unroll=lambda hidden, ids: self.states)

    def q(self, depth: int, anchor: int) -> torch.Tensor:
        """The draft's distribution over the whole vocabulary, 0 for tokens that it does not know."""
        state = self.states[depth - 1][0, anchor].bfloat16().float()
        q = torch.zeros(VOCAB)
        q[TABLE] = (self.head.float()[TABLE] @ state).softmax(-1)
        return q

    def anchors(self) -> list[int]:
        """Those with three drafted tokens: t + 1 to t + 4 are sampled."""
        return [t for t in range(LENGTH - 4) if all(self.text.sampled[t + 1 : t + 5])]


def test_every_rule_is_measured_at_the_same_contexts_as_by_whole_distributions():
    case = Case()
    found = rules.contexts(case.layer, case.text, case.head, TABLE)
    assert len(found["entropy"]) == len(case.anchors()) > 4
    for row, t in enumerate(case.anchors()):
        q = [case.q(k, t) for k in (1, 2, 3)]
        p = [case.log_p[t + k].exp() for k in (1, 2, 3)]
        x = [int(case.text.ids[t + k + 1]) for k in (1, 2, 3)]
        alpha = [torch.minimum(a, b).sum().item() for a, b in zip(p, q, strict=True)]
        accept = [min(1.0, (b[v] / a[v]).item()) for a, b, v in zip(p, q, x, strict=True)]
        best = [int(b.argmax()) for b in q]
        joint = np.cumprod([(b[v] / a[v]).item() for a, b, v in zip(p, q, x, strict=True)])

        expected = {
            "rejection": alpha[0],
            "target-only": p[0][best[0]].item(),
            "greedy": float(best[0] == int(p[0].argmax())),
            "rejection, window": alpha[0] + accept[0] * alpha[1] + accept[0] * accept[1] * alpha[2],
            "block, window": sum(min(1.0, joint[: j + 1].min()) for j in range(3)),
            "target-only, window": p[0][best[0]].item()
            + (best[0] == x[0]) * p[1][best[1]].item()
            + (best[:2] == x[:2]) * p[2][best[2]].item(),
            "entropy": case.text.entropy[t + 1].item(),
            "largest": p[0].max().item(),
        }
        for name, value in expected.items():
            assert found[name][row] == pytest.approx(value, abs=0.03), name


def test_slopes_of_a_draw_are_those_of_the_prompts_that_it_takes():
    rng = np.random.default_rng(0)
    x = [rng.normal(size=n) for n in (5, 9, 7)]
    y = [1 - 0.3 * a + rng.normal(size=len(a)) for a in x]
    found = rules.slopes(x, y, np.array([[1.0, 1, 1], [2, 0, 1]]))
    for row, taken in enumerate(([0, 1, 2], [0, 0, 2])):
        pairs = [(x[i], y[i]) for i in taken]
        every = [np.concatenate(v) for v in zip(*pairs, strict=True)]
        within = [np.concatenate([a - a.mean() for a in v]) for v in zip(*pairs, strict=True)]
        means = [[a.mean() for a in v] for v in zip(*pairs, strict=True)]
        for name, (a, b) in {"contexts": every, "within": within, "between": means}.items():
            assert found[name][row] == pytest.approx(np.polyfit(a, b, 1)[0]), name


def drafts(case: Case) -> objectives.Drafts:
    found = object.__new__(objectives.Drafts)
    found.layer, found._head, found._table = case.layer, case.head, TABLE
    found._windows = None
    found._known = torch.full((VOCAB,), len(TABLE))
    found._known[TABLE] = torch.arange(len(TABLE))
    return found


def test_losses_with_a_column_for_all_other_tokens_are_those_of_the_whole_vocabulary():
    case = Case()
    _, stats = drafts(case).loss("tv", [case.text])
    pairs = [
        (t, k)
        for t in range(LENGTH - 2)
        for k in (1, 2, 3)
        if t + k + 1 < LENGTH and all(case.text.sampled[t + 1 : t + k + 2])
    ]
    assert stats.count.sum() == len(pairs) > 15
    alpha = sum(torch.minimum(case.log_p[t + k].exp(), case.q(k, t)).sum().item() for t, k in pairs)
    assert stats.alpha.sum().item() == pytest.approx(alpha, abs=0.05)


@pytest.mark.parametrize("kind", ["hard_ce", "kl", "reverse_kl", "tv", "lk", "e2e_chain"])
def test_gradients_with_a_column_for_all_other_tokens_are_those_of_the_whole_vocabulary(kind):
    """Towards the draft's states: a token that the draft does not know must not flatten the others."""
    case = Case()
    states = [state.clone().requires_grad_() for state in case.states]
    case.layer.unroll = lambda hidden, ids: states
    drafts(case).loss(kind, [case.text])[0].backward()
    found = torch.stack([state.grad[0] for state in states])

    grid = torch.stack(case.states).requires_grad_()
    mask = torch.stack([case.text.sampled.roll(-k) for k in (1, 2, 3, 4)], -1).cumprod(-1)[:, 1:].bool()
    for depth in (1, 2, 3):
        mask[LENGTH - depth - 1 :, depth - 1] = False
    depths = range(1, 4)
    q = torch.stack([grid[k - 1, 0].bfloat16() @ case.head[TABLE].T for k in depths], 1).float()
    p = torch.stack([case.log_p.roll(-k, 0) for k in depths], 1)
    tokens = torch.stack([case.text.ids.roll(-k - 1) for k in depths], 1)
    loss, _ = mtp_loss(kind, spread(q, TABLE, VOCAB), p, mask=mask, tokens=tokens)
    (wanted,) = torch.autograd.grad(loss, grid)
    assert torch.cosine_similarity(found.flatten(), wanted.flatten(), dim=0) > 0.99
    assert found.norm().item() == pytest.approx(wanted.norm().item(), rel=0.05)


def test_measured_windows_are_those_of_the_rules():
    case = Case()
    measured = drafts(case).measure([case.text])
    found = rules.contexts(case.layer, case.text, case.head, TABLE)
    assert measured["rejection"] == pytest.approx(found["rejection, window"].mean(), abs=0.02)
    assert measured["target_only"] == pytest.approx(found["target-only, window"].mean(), abs=0.02)
    by_depth = np.cumprod([measured[f"depth {depth}"] for depth in (1, 2, 3)])
    assert by_depth.sum() == pytest.approx(measured["rejection"])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_windows_at_a_temperature_are_measured_by_its_distributions(temperature):
    case = Case()
    logits = case.text.hidden.float() @ case.head.float().T
    text = replace(case.text, normaliser=(logits / temperature).logsumexp(-1))
    found = rules.first_drafts(case.layer, case.text, case.head, TABLE, [temperature])[temperature]
    measured = drafts(case).measure([text], temperature)
    assert measured["depth 1"] == pytest.approx(found["rejection"].mean(), abs=0.02)


def test_a_greedy_window_accepts_up_to_the_first_draft_that_is_not_the_texts_token():
    case = Case()
    case.text.ids[5:8] = torch.tensor([int(case.q(k, 3).argmax()) for k in (1, 2, 3)])  # one whole window
    measured = drafts(case).measure_greedy([case.text])
    wanted = []
    for t in case.anchors():
        right = [int(case.q(k, t).argmax()) == int(case.text.ids[t + k + 1]) for k in (1, 2, 3)]
        wanted.append(np.cumprod(right).sum())
    assert measured["rejection"] == pytest.approx(np.mean(wanted)) and max(wanted) == 3
    assert measured == {"rejection": measured["rejection"], "target_only": measured["rejection"]}


def test_arms_are_compared_seed_by_seed():
    def cell(value: float) -> dict:
        names = (
            "alpha",
            "kl",
            "reverse_kl",
            "target_above",
            "draft_above",
            "draft_entropy",
            "target_entropy",
        )
        one = {"rejection": value, "target_only": 1.0} | dict.fromkeys(names, value)
        sets = (*objectives.RESULT, *objectives.AT)
        return {"seconds": 1.0, "curve": [[0.1] * 3, [0.2] * 3, [value] * 3]} | dict.fromkeys(sets, one)

    sets = (*objectives.RESULT, *objectives.AT)
    start = {name: {"rejection": 1.0, "target_only": 1.0} for name in sets}
    cells = {"kl": [cell(1.0), cell(2.0), cell(3.0)], "tv": [cell(1.1), cell(2.1), cell(3.1)]}
    table = objectives.summary(cells, start)
    row = table["tv"]["in domain, rejection"]
    assert row["minus kl"] == pytest.approx([0.1, 0.1, 0.1])
    assert row["gain"][0] == pytest.approx(1.1) and row["gain"][1] < 0 < row["gain"][2]
    assert table["tv"]["last third minus kl, by depth"][0] == pytest.approx([0.1, 0.1, 0.1])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_first_drafts_at_a_temperature_are_those_of_whole_distributions(temperature):
    case = Case()
    found = rules.first_drafts(case.layer, case.text, case.head, TABLE, [temperature])[temperature]
    for row, t in enumerate(case.anchors()):
        p = (case.log_p[t + 1] / temperature).softmax(-1)
        q = (case.q(1, t).log() / temperature).softmax(-1)
        assert found["rejection"][row] == pytest.approx(torch.minimum(p, q).sum().item(), abs=0.03)
        assert found["target-only"][row] == pytest.approx(p[q.argmax()].item(), abs=0.03)
        assert found["entropy"][row] == pytest.approx(torch.special.entr(p).sum().item(), abs=2e-2)
    whole = rules.contexts(case.layer, case.text, case.head, TABLE)
    if temperature == 1.0:
        assert found["rejection"] == pytest.approx(whole["rejection"], abs=2e-3)


def test_the_slope_along_temperatures_leaves_out_how_contexts_differ():
    """Contexts with more entropy are accepted more often here, and each less when it is heated."""
    rng = np.random.default_rng(0)
    prompts = []
    for _ in range(6):
        level = rng.uniform(0, 3, 5)
        by_temperature = {}
        for temperature in (0.5, 1.0, 2.0):
            entropy = level + temperature
            columns = {"entropy": entropy, "rejection": level - 0.1 * temperature, "target-only": 0 * level}
            by_temperature[temperature] = columns
        prompts.append(by_temperature)
    found = rules.intervene(prompts)
    assert found["rejection, slope"] == pytest.approx([-0.1, -0.1, -0.1])
    assert found["target-only, slope"] == [0, 0, 0]
    assert found["2"]["entropy"][0] == pytest.approx(found["1"]["entropy"][0] + 1, abs=1e-3)
