"""PPOW's quantities against cases computed by hand, enumeration and the laws they are drawn from."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from rlpipe.config.ppow import PpowConfig
from rlpipe.drafts.objectives.ppow import group_advantages, ppow_loss
from rlpipe.drafts.vocabulary import OUTSIDE
from rlpipe.drafts.windows.reward import (
    acceptance_distribution,
    expected_reward,
    proximity_gap,
    proximity_reward,
    speedup_reward,
    window_reward,
)
from rlpipe.drafts.windows.selection import (
    confidence,
    criticality,
    hard_share,
    learnable_kl,
    sample_windows,
    window_distribution,
    window_scores,
)
from rlpipe.spec.verify import verify_chain

pytestmark = pytest.mark.unit

CRITICAL = {3: 16.27, 4: 18.47}  # of chi-square by degrees of freedom, alpha = 0.001
RULES = {"draft_cost": 0.25, "proximity": 0.1, "tolerance": 0.5}


def test_confidence_is_one_for_a_sure_target_and_zero_for_a_uniform_one():
    laws = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.25] * 4, [0.5, 0.5, 0.0, 0.0]])
    entropies = torch.distributions.Categorical(laws).entropy()
    torch.testing.assert_close(confidence(entropies, 4), torch.tensor([1.0, 0.0, 0.5]))


def test_criticality_is_confidence_times_forward_kl():
    kl = 0.9 * math.log(1.8) + 0.1 * math.log(0.2)  # of (0.9, 0.1) against (0.5, 0.5)
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    expected = (1 - entropy / math.log(2)) * kl
    found = criticality(torch.tensor(entropy), torch.tensor([kl, 0.0, -1e-9, math.inf]), 2)
    assert found[0].item() == pytest.approx(expected, rel=1e-5)
    assert found[1:].tolist() == [0.0, 0.0, math.inf]  # rounding below 0 counts as 0


def test_a_score_is_the_mean_of_its_window():
    critical = torch.tensor([4.0, 0.0, 2.0, 6.0])
    torch.testing.assert_close(window_scores(critical, 3), torch.tensor([2.0, 8 / 3]))
    with pytest.raises(ValueError, match="2 positions has no window of 3"):
        window_scores(critical[:2], 3)


def test_the_law_of_windows_mixes_scores_and_evenness():
    scores = torch.tensor([1.0, 0.0, 3.0])
    expected = torch.tensor([0.5 / 4 + 0.5 / 3, 0.5 / 3, 1.5 / 4 + 0.5 / 3], dtype=torch.float64)
    torch.testing.assert_close(window_distribution(scores, 0.5), expected)
    assert window_distribution(torch.zeros(4), 1.0).tolist() == [0.25] * 4
    assert window_distribution(torch.tensor([1.0, math.inf]), 1.0).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("hard", [0.0, 0.6, 1.0])
def test_windows_are_drawn_from_their_law(hard):
    scores = torch.tensor([0.2, 0.0, 1.0, 0.5, 2.0])
    drawn = sample_windows(scores, 20_000, hard, generator=torch.Generator().manual_seed(3))
    law = window_distribution(scores, hard).numpy()
    counts, expected = np.bincount(drawn.numpy(), minlength=5), 20_000 * law
    assert counts[law == 0].sum() == 0
    possible = law > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < CRITICAL[possible.sum() - 1]


def test_the_curriculum_raises_the_share_of_hard_windows():
    assert [round(hard_share(step, 5, start=0.2, end=1.0), 3) for step in (0, 2, 4, 9)] == [
        0.2,
        0.6,
        1.0,
        1.0,
    ]
    assert hard_share(0, 1, start=0.2, end=1.0) == 1.0


def test_rewards_by_hand():
    k = torch.tensor([0, 0, 2, 3])
    gap = torch.tensor([0.4, 0.6, 0.1, 9.0])
    expected = torch.tensor([0.1, 0.0, 2 / 1.5, 3 / 1.75])
    torch.testing.assert_close(window_reward(k, gap, **RULES), expected)
    torch.testing.assert_close(speedup_reward(k, 0.0), k.float())
    assert proximity_reward(torch.tensor(0.5), 0.1, 0.5).item() == 0  # the bound itself is too far


def test_the_gap_compares_sums_of_target_logprobs():
    reference, drafted = torch.tensor([[-0.1, -0.2]]), torch.tensor([[-1.0, -0.5]])
    torch.testing.assert_close(proximity_gap(reference, drafted), torch.tensor([1.2]))


def test_the_law_of_acceptance_sums_to_one_and_matches_its_coins():
    accept = torch.tensor([0.9, 0.5, 0.2], dtype=torch.float64)
    law = acceptance_distribution(accept)
    for k in range(4):
        by_hand = math.prod(accept[:k].tolist()) * (1 - accept[k].item() if k < 3 else 1)
        assert law[k].item() == pytest.approx(by_hand, abs=1e-15)
    assert law.sum().item() == pytest.approx(1)


def _case(vocabulary=3, gamma=2):
    """Laws that depend on the drafts before: p and q by prefix."""
    generator = torch.Generator().manual_seed(11)
    prefixes = [w for n in range(gamma + 1) for w in itertools.product(range(vocabulary), repeat=n)]
    laws = torch.rand(len(prefixes), 2, vocabulary, generator=generator, dtype=torch.float64) + 0.05
    laws /= laws.sum(-1, keepdim=True)
    return {prefix: (p, q) for prefix, (p, q) in zip(prefixes, laws, strict=True)}


def test_the_expected_reward_is_the_mean_over_all_drafts_and_coins():
    laws, gamma = _case(), 2
    gap = torch.zeros(())
    exact = expected = 0.0
    for window in itertools.product(range(3), repeat=gamma):
        pairs = [tuple(x[window[t]].item() for x in laws[window[:t]]) for t in range(gamma)]
        chance = math.prod(q for _, q in pairs)
        accept = torch.tensor([min(1.0, p / q) for p, q in pairs], dtype=torch.float64)
        expected += chance * expected_reward(accept, gap, **RULES).item()
        for coins in itertools.product((0, 1), repeat=gamma):
            weight = math.prod(a if coin else 1 - a for a, coin in zip(accept.tolist(), coins, strict=True))
            k = next((i for i, coin in enumerate(coins) if not coin), gamma)
            exact += chance * weight * window_reward(torch.tensor(k), gap, **RULES).item()
    assert expected == pytest.approx(exact, abs=1e-7)


def test_the_expected_reward_has_our_verification_as_its_draw_and_less_variance():
    laws, gamma, n = _case(), 2, 4000
    generator = torch.Generator().manual_seed(5)
    drafts = torch.zeros(n, gamma, dtype=torch.int64)
    p = torch.zeros(n, gamma + 1, 3, dtype=torch.float64)
    q = torch.zeros(n, gamma, 3, dtype=torch.float64)
    for row in range(n):
        for t in range(gamma + 1):
            p[row, t], law = laws[tuple(drafts[row, :t].tolist())]
            if t < gamma:
                q[row, t] = law
                drafts[row, t] = torch.multinomial(law, 1, generator=generator)
    coins = torch.rand(n, gamma, generator=generator, dtype=torch.float64)
    verdict = verify_chain(drafts, q, p, coins, torch.rand(n, generator=generator, dtype=torch.float64))
    gap = torch.zeros(n)
    drawn = window_reward(verdict.num_accepted, gap, **RULES).double()
    exact = expected_reward(verdict.accept_prob, gap, **RULES).double()
    difference = drawn - exact
    assert abs(difference.mean()) < 4 * difference.std() / math.sqrt(n)
    assert exact.var() < 0.7 * drawn.var()


def test_advantages_compare_windows_of_one_prefix():
    advantages = group_advantages(torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0]], dtype=torch.float64))
    torch.testing.assert_close(advantages.sum(-1), torch.zeros(2, dtype=torch.float64))
    assert advantages[0, 2].item() == pytest.approx(math.sqrt(1.5), abs=1e-4)
    assert advantages[1].abs().max() == 0


def _loss_case():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 2, 5, generator=generator, dtype=torch.float64)
    target = torch.randn(3, 2, 5, generator=generator, dtype=torch.float64).log_softmax(-1)
    tokens = torch.randint(5, (3, 2), generator=generator)
    return logits, target, tokens, torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)


def test_at_the_drafting_policy_the_gradient_is_that_of_reinforce_and_the_anchor():
    logits, target, tokens, advantages = _loss_case()
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    log_q = mine.log_softmax(-1)
    chosen = log_q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).detach()
    loss, told = ppow_loss(
        log_q, target, tokens, behaviour_logprobs=chosen, advantages=advantages, clip=0.2, kl_coef=0.1
    )
    loss.backward()
    other = theirs.log_softmax(-1)
    reinforce = (other.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) * advantages[:, None]).mean()
    kl = (other.exp() * (other - target)).sum(-1).mean()
    (0.1 * kl - reinforce).backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    assert told.clipped == 0
    assert (told.ratio / told.tokens).item() == pytest.approx(1)


def test_a_ratio_beyond_the_clip_gives_no_gradient_on_its_good_side():
    logits, target, tokens, _ = _loss_case()
    logits = logits.requires_grad_()
    log_q = logits.log_softmax(-1)
    chosen = log_q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).detach()
    for sign, clipped in ((1.0, True), (-1.0, False)):
        loss, told = ppow_loss(
            log_q,
            target,
            tokens,
            behaviour_logprobs=chosen - 0.5,
            advantages=sign * torch.ones(3),
            clip=0.2,
            kl_coef=0.0,
        )
        (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
        assert (grad.abs().max() == 0) == clipped
        assert told.clipped == (6 if clipped else 0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"group_size": 1}, "ppow.group_size=1"),
        ({"clip": 0.0}, "ppow.clip=0.0"),
        ({"kl_coef": -1.0}, "ppow.kl_coef=-1.0"),
        ({"hard_end": 1.5}, "ppow.hard_end=1.5"),
        ({"windows": 0}, "ppow.windows=0"),
    ],
)
def test_impossible_settings_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        PpowConfig(**settings)


def test_places_where_a_reduced_vocabulary_can_learn_nothing_take_no_more_draws_than_others():
    """1% of places want a token that the draft does not know; the plain divergence gives them half of all."""
    generator = torch.Generator().manual_seed(0)
    places, known = 2000, torch.arange(40)
    log_p = torch.randn(places, 50, generator=generator).mul(2).log_softmax(-1)
    log_p[:, 40:] -= 12  # rare tokens
    odd = torch.arange(places) % 100 == 50
    log_p[odd, 45] = 2.0
    log_p = log_p.log_softmax(-1)
    inside = log_p[:, :40] + 0.5 * torch.randn(places, 40, generator=generator)
    log_q = torch.full_like(log_p, OUTSIDE).index_copy(1, known, inside.log_softmax(-1)).log_softmax(-1)

    def share(ids):
        """Of windows of three places, drawn by score alone, those that hold an odd place."""
        entropy = -(log_p.exp() * log_p).sum(-1)
        law = window_distribution(
            window_scores(criticality(entropy, learnable_kl(log_p, log_q, ids), 50), 3), 1.0
        )
        return law[odd.unfold(0, 3, 1).any(-1)].sum().item()

    assert share(None) > 0.5 and share(known) < 0.06
