"""Acceptance theory against enumeration of drafts and of target sequences."""

from __future__ import annotations

import pytest
import torch

from recipes import theory
from rlpipe.spec.verify import verify_chain
from tests.helpers.verification_law import Process, all_drafts

pytestmark = pytest.mark.unit
VOCAB, GAMMA = 3, 3
EXACT = 1e-12


def _random_pair(rows: int, vocab: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    p = (2 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)).softmax(-1)
    return p, (p.log() + torch.randn(rows, vocab, generator=generator, dtype=torch.float64)).softmax(-1)


class _Enumerated:
    """All sequences of GAMMA tokens, with the laws of target and draft along them."""

    def __init__(self, seed: int = 0, zeros: float = 0.0):
        self.target = Process.random(VOCAB, GAMMA, seed=seed, zeros=zeros)
        self.draft = Process.random(VOCAB, GAMMA, seed=seed + 100, zeros=zeros)
        self.tokens = all_drafts(VOCAB, GAMMA)
        pick = self.tokens.unsqueeze(-1)
        self.p_rows, self.q_rows = (law.rows(self.tokens, GAMMA) for law in (self.target, self.draft))
        self.p = self.p_rows.gather(-1, pick).squeeze(-1)
        self.q = self.q_rows.gather(-1, pick).squeeze(-1)
        self.p_chance, self.q_chance = self.p.prod(1), self.q.prod(1)

    def drafted(self, reach: torch.Tensor) -> torch.Tensor:
        """Expectation over drafts: [GAMMA]."""
        return self.q_chance @ reach

    def sampled(self, reach: torch.Tensor) -> torch.Tensor:
        """Expectation over the target's sequences: [GAMMA]."""
        live = self.p_chance > 0
        return self.p_chance[live] @ reach[live]


def test_alpha_of_rejection_is_the_chance_that_a_sampled_draft_is_accepted():
    p, q = _random_pair(50)
    enumerated = (q * (p / q).clamp(max=1)).sum(-1)
    assert torch.allclose(theory.rejection_alpha(p, q), enumerated, atol=EXACT)
    assert torch.allclose(theory.rejection_alpha(p, q), 1 - theory.total_variation(p, q), atol=EXACT)


def test_alpha_of_target_only_is_the_targets_probability_of_the_drafted_token():
    p, q = _random_pair(50)
    greedy = theory.target_only_alpha(p, q)
    assert greedy.tolist() == [p[i, int(q[i].argmax())].item() for i in range(50)]
    assert (greedy <= p.amax(-1)).all()
    sampled = theory.target_only_alpha_sampled(p, q)
    assert torch.allclose(sampled, sum(q[:, v] * p[:, v] for v in range(7)), atol=EXACT)
    assert (sampled <= theory.rejection_alpha(p, q)).all()


def test_rejection_wins_exactly_where_the_distance_is_below_the_mass_outside_the_greedy_token():
    p, q = _random_pair(500)
    wins = theory.rejection_margin(p, q) > 0
    boundary = 1 - p.gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1)
    assert torch.equal(wins, theory.total_variation(p, q) < boundary)
    assert 0 < wins.sum() < 500


def test_acceptance_length_of_constant_alphas_is_the_product_form():
    alphas = torch.tensor([0.9, 0.5, 0.2], dtype=torch.float64)
    length = theory.acceptance_length(theory.expected_reach(alphas)).item()
    assert length == pytest.approx(1 + 0.9 + 0.45 + 0.09)
    target = [Process.random(VOCAB, 1, seed=s).probs[0] for s in range(GAMMA)]
    draft = [Process.random(VOCAB, 1, seed=s + 9).probs[0] for s in range(GAMMA)]
    alphas = theory.rejection_alpha(torch.stack(target), torch.stack(draft))
    enumerated = _Enumerated()  # tokens alone are used: the laws here do not depend on the context
    p, q = (
        torch.stack([law[i][enumerated.tokens[:, i]] for i in range(GAMMA)], 1) for law in (target, draft)
    )
    reach = q.prod(1) @ theory.chain_reach_drafted(p, q)
    assert torch.allclose(reach, theory.expected_reach(alphas), atol=EXACT)


def test_geometric_length_is_leviathans_closed_form():
    alpha = torch.tensor([0.0, 0.3, 0.8, 1.0], dtype=torch.float64)
    lengths = theory.geometric_length(alpha, 4)
    assert torch.allclose(lengths[:3], (1 - alpha[:3] ** 5) / (1 - alpha[:3]))
    assert lengths[3] == 5


@pytest.mark.parametrize("zeros", [0.0, 0.3])
def test_reach_of_drafts_is_what_the_verifiers_state(zeros):
    case = _Enumerated(zeros=zeros)
    live = case.q_chance > 0
    bonus = torch.full((len(case.tokens), 1, VOCAB), 1 / VOCAB, dtype=torch.float64)
    coins = torch.full(case.tokens.shape, 0.5, dtype=torch.float64)
    verdict = verify_chain(case.tokens, case.q_rows, torch.cat([case.p_rows, bonus], 1), coins, coins[:, 0])
    chain = theory.chain_reach_drafted(case.p, case.q)
    assert torch.allclose(chain[live], verdict.accept_prob.cumprod(1)[live], atol=EXACT)
    assert (theory.block_reach_drafted(case.p, case.q) >= chain - EXACT).all()


@pytest.mark.parametrize("zeros", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_estimators_from_target_tokens_equal_those_from_drafts_in_expectation(seed, zeros):
    case = _Enumerated(seed, zeros)
    alphas = theory.rejection_alpha(case.p_rows, case.q_rows)
    chain = case.sampled(theory.chain_reach_target(case.p.log(), case.q.log(), alphas))
    assert torch.allclose(chain, case.drafted(theory.chain_reach_drafted(case.p, case.q)), atol=EXACT)
    block = case.sampled(theory.block_reach_target(case.p.log(), case.q.log()))
    assert torch.allclose(block, case.drafted(theory.block_reach_drafted(case.p, case.q)), atol=EXACT)
    assert (block >= chain - EXACT).all()


def test_the_target_token_estimator_covers_target_only_by_a_one_hot_draft():
    case = _Enumerated()
    greedy = case.q_rows.argmax(-1)
    one_hot = (case.tokens == greedy).double()
    alphas = theory.target_only_alpha(case.p_rows, case.q_rows)
    reach = case.sampled(theory.chain_reach_target(case.p.log(), one_hot.log(), alphas))
    on_path = one_hot.cumprod(1)
    assert torch.allclose(reach, case.p_chance @ on_path, atol=EXACT)


def test_the_product_of_mean_alphas_is_biased_where_laws_depend_on_context():
    """Why the exact estimators exist: the mistake they avoid is visible here."""
    case = _Enumerated()
    alphas = theory.rejection_alpha(case.p_rows, case.q_rows)
    exact = case.drafted(theory.chain_reach_drafted(case.p, case.q))
    product = case.sampled(theory.expected_reach(alphas))
    assert (product - exact).abs().max() > 1e-3
    assert product[0] == pytest.approx(exact[0].item(), abs=EXACT)


def test_speedup_breaks_even_where_the_length_is_the_cost_of_a_step():
    alpha, gamma, cost = torch.tensor(0.8, dtype=torch.float64), 5, 0.1
    length = theory.geometric_length(alpha, gamma)
    closed = (1 - alpha ** (gamma + 1)) / ((1 - alpha) * (gamma * cost + 1))
    assert torch.allclose(theory.speedup(length, gamma, cost), closed)
    assert theory.step_cost(3, 0.2, verify_cost=1.4) == pytest.approx(2.0)
    assert theory.speedup(torch.tensor(2.0), 3, 0.2, verify_cost=1.4).item() == pytest.approx(1.0)
