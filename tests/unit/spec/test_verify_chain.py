"""Chain verification against an exact oracle, and the oracle against planted bugs."""

from __future__ import annotations

import pytest
import torch

from rlpipe.spec.verify import verify_chain, verify_target_only
from tests.helpers.verification_law import Process, emitted_law
from tests.helpers.wrong_verifiers import MUTANTS, lenient_coin, plain

pytestmark = pytest.mark.unit
EXACT = 1e-12


def _draft_law(process: Process, gamma: int):
    joint = process.joint(gamma)
    return lambda drafts: joint[tuple(drafts.T)]


def _error(verifier, target: Process, draft: Process, drafted_by=None) -> float:
    gamma = len(target.probs) - 1
    law = emitted_law(verifier, target, draft, drafted_by or _draft_law(draft, gamma))
    return (law - target.joint(gamma + 1)).abs().max().item()


@pytest.mark.parametrize(("vocab", "gamma", "zeros"), [(4, 1, 0.0), (3, 2, 0.0), (3, 3, 0.0), (3, 3, 0.3)])
def test_rejection_emits_exactly_the_joint_law_of_the_target(vocab, gamma, zeros):
    target = Process.random(vocab, gamma + 1, seed=1, sharpness=1.5, zeros=zeros)
    draft = Process.random(vocab, gamma, seed=2, zeros=zeros)
    assert _error(verify_chain, target, draft) < EXACT


def test_rejection_is_exact_when_draft_and_target_are_equal_or_disjoint():
    target = Process.random(3, 3, seed=1)
    assert _error(verify_chain, target, Process(target.probs[:2])) < EXACT
    first = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    second = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    disjoint = Process([second, second.expand(3, 3), second.expand(3, 3, 3)])
    assert _error(verify_chain, disjoint, Process([first, first.expand(3, 3)])) < EXACT


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_target_only_is_exact_for_a_draft_chosen_by_argmax(gamma):
    target = Process.random(3, gamma + 1, seed=1)
    draft = Process.random(3, gamma, seed=2)

    def argmax_drafts(drafts: torch.Tensor) -> torch.Tensor:
        return (draft.rows(drafts, gamma).argmax(-1) == drafts).all(1).double()

    law = emitted_law(verify_target_only, target, None, argmax_drafts)
    assert (law - target.joint(gamma + 1)).abs().max() < EXACT


def test_target_only_is_rejection_with_a_one_hot_draft():
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(500, 4, 6, generator=generator).softmax(-1)
    drafts = torch.randint(0, 6, (500, 3), generator=generator)
    coins = torch.rand(500, 3, generator=generator, dtype=torch.float64)
    residual = torch.rand(500, generator=generator, dtype=torch.float64)
    one_hot = torch.nn.functional.one_hot(drafts, 6).float()
    ours = verify_target_only(drafts, None, target, coins, residual)
    chain = verify_chain(drafts, one_hot, target, coins, residual)
    assert torch.equal(ours.num_accepted, chain.num_accepted)
    assert torch.equal(ours.next_token, chain.next_token)
    assert torch.equal(ours.accept_prob, chain.accept_prob)


def test_the_oracle_accepts_an_independent_implementation():
    assert _error(plain, Process.random(3, 3, seed=1), Process.random(3, 2, seed=2)) < EXACT


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_oracle_catches(mutant):
    assert _error(MUTANTS[mutant], Process.random(3, 3, seed=1), Process.random(3, 2, seed=2)) > 1e-3


def test_the_oracle_catches_drafts_sampled_at_another_temperature_than_stated():
    target, draft = Process.random(3, 3, seed=1), Process.random(3, 2, seed=2)
    sharper = Process([(probs**2) / (probs**2).sum(-1, keepdim=True) for probs in draft.probs])
    assert _error(verify_chain, target, draft, _draft_law(sharper, 2)) > 1e-3


def _zero_coin(verifier) -> int:
    """Accepted drafts when the coin is 0 and the target forbids the draft."""
    target = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]], dtype=torch.float64)
    draft = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    verdict = verifier(torch.tensor([[0]]), draft, target, zero, zero[0])
    return verdict.num_accepted.item()


def test_a_zero_coin_does_not_accept_a_token_of_probability_zero():
    assert _zero_coin(verify_chain) == 0
    assert _zero_coin(verify_target_only) == 0
    assert _zero_coin(lenient_coin) == 1  # the planted bug shows


def test_coins_at_the_threshold_reject_and_just_below_accept():
    target = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]], dtype=torch.float64)
    draft = torch.tensor([[[0.5, 0.5]]], dtype=torch.float64)
    residual = torch.tensor([0.5], dtype=torch.float64)

    def accepted(coin: float) -> int:
        coins = torch.tensor([[coin]], dtype=torch.float64)
        return verify_chain(torch.tensor([[0]]), draft, target, coins, residual).num_accepted.item()

    assert accepted(0.5) == 0
    assert accepted(0.5 - 2**-53) == 1


def test_only_the_first_rejected_row_is_resampled():
    """Later rows are poisoned: had they been read, the token would differ."""
    target = torch.zeros(1, 4, 5, dtype=torch.float64)
    target[0, :, 4] = 1.0
    target[0, 0] = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
    draft = torch.zeros(1, 3, 5, dtype=torch.float64)
    draft[0, :, 4] = 1.0
    half = torch.full((1, 3), 0.5, dtype=torch.float64)
    verdict = verify_chain(torch.full((1, 3), 4), draft, target, half, half[:, 0])
    assert (verdict.num_accepted.item(), verdict.next_token.item()) == (0, 2)


def test_a_residual_that_rounds_to_nothing_falls_back_to_the_target():
    probs = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]])
    coins = torch.ones(1, 1, dtype=torch.float64)  # u = 1 rejects although p = q
    verdict = verify_chain(torch.tensor([[0]]), probs[:, :1], probs, coins, coins[0] * 0.75)
    assert (verdict.num_accepted.item(), verdict.next_token.item()) == (0, 1)


def test_an_unknown_backend_is_refused_with_the_choice():
    empty = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="backend='cuda' is unknown; use 'torch'"):
        verify_chain(empty.long(), empty, empty, empty, empty, backend="cuda")
