"""Chain verification (rejection, target-only, Gumbel) against an exact oracle; coins at the boundaries."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from rlpipe.spec.verify import verify_block, verify_chain, verify_target_only
from tests.helpers.gumbel_chain import verify_chain_gumbel
from tests.helpers.verification_law import Process, emitted_law

pytestmark = pytest.mark.unit
EXACT = 1e-12


def _error(verifier, target: Process, draft: Process, **options) -> float:
    gamma = len(target.probs) - 1
    joint = draft.joint(gamma)
    law = emitted_law(verifier, target, draft, lambda drafts: joint[tuple(drafts.T)], **options)
    return (law - target.joint(gamma + 1)).abs().max().item()


@pytest.mark.parametrize(
    ("vocab", "gamma", "zeros"), [(5, 1, 0.0), (4, 2, 0.0), (3, 2, 0.0), (3, 3, 0.0), (3, 3, 0.3)]
)
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


@pytest.mark.parametrize(("vocab", "gamma", "zeros"), [(3, 1, 0.0), (3, 2, 0.0), (3, 2, 0.3)])
def test_gumbel_max_emits_exactly_the_joint_law_of_the_target(vocab, gamma, zeros):
    target = Process.random(vocab, gamma + 1, seed=1, zeros=zeros)
    draft = Process.random(vocab, gamma, seed=2, zeros=zeros)
    assert _error(verify_chain_gumbel, target, draft, gumbel=True) < EXACT


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


def test_coins_at_the_threshold_reject_and_just_below_accept():
    target = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]], dtype=torch.float64)
    draft = torch.tensor([[[0.5, 0.5]]], dtype=torch.float64)
    residual = torch.tensor([0.5], dtype=torch.float64)
    for verifier in (verify_chain, verify_block):
        for coin, accepted in ((0.5, 0), (0.5 - 2**-53, 1)):
            coins = torch.tensor([[coin]], dtype=torch.float64)
            assert (
                verifier(torch.tensor([[0]]), draft, target, coins, residual).num_accepted.item() == accepted
            )


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
    for verifier in (verify_chain, verify_block):
        verdict = verifier(torch.tensor([[0]]), probs[:, :1], probs, coins, coins[0] * 0.75)
        assert (verdict.num_accepted.item(), verdict.next_token.item()) == (0, 1)


def test_a_draft_of_zero_draft_probability_is_accepted_exactly_when_the_target_allows_it():
    target = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]]).expand(2, -1, -1)
    draft = torch.tensor([[[0.0, 1.0, 0.0]]]).expand(2, -1, -1)
    coins = torch.tensor([[0.0], [0.999]], dtype=torch.float64)
    for verifier in (verify_chain, verify_block):
        allowed = verifier(torch.tensor([[0], [0]]), draft, target, coins, coins[:, 0])
        assert allowed.num_accepted.tolist() == [1, 1]
        assert allowed.accept_prob.tolist() == [[1.0], [1.0]]
        forbidden = verifier(torch.tensor([[2], [2]]), draft, target, coins, coins[:, 0])
        assert forbidden.num_accepted.tolist() == [0, 0]
        assert forbidden.next_token.tolist() == [0, 0]  # of the residual's support
        assert forbidden.accept_prob.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("uniform", [0.0, 1.0])
def test_gumbel_noise_at_the_ends_of_the_interval_never_draws_a_forbidden_token(uniform):
    """vllm#43249: infinite noise on a token of log-probability -inf is NaN, and NaN wins an argmax."""
    target = torch.tensor([[[0.0, 0.3, 0.7, 0.0], [0.0, 0.0, 0.0, 1.0]]])
    draft = torch.tensor([[[0.0, 0.6, 0.2, 0.2]]])
    coins = torch.tensor([[0.9]], dtype=torch.float64)
    noise = torch.full((1, 4), uniform)
    assert verify_chain_gumbel(torch.tensor([[1]]), draft, target, coins, noise).next_token.item() == 2


def test_accept_prob_is_at_most_one_where_the_target_rounds_above_it():
    target = torch.tensor([[[1.0000001, 0.0], [0.5, 0.5]]])
    half = torch.full((1, 1), 0.5, dtype=torch.float64)
    assert verify_target_only(torch.tensor([[0]]), None, target, half, half[0]).accept_prob.item() == 1.0


@pytest.mark.parametrize("verifier", [verify_chain, verify_block])
@pytest.mark.parametrize(("p", "q"), [(0.5, float("nan")), (float("nan"), 0.5)])
def test_nan_at_the_draft_is_never_accepted(verifier, p, q):
    target = torch.tensor([[[p, 0.5], [0.5, 0.5]]])
    draft = torch.tensor([[[q, 0.5]]])
    zero = torch.zeros(1, 1, dtype=torch.float64)
    verdict = verifier(torch.tensor([[0]]), draft, target, zero, zero[0])
    assert (verdict.num_accepted.item(), verdict.accept_prob.item()) == (0, 0.0)


def test_an_unknown_backend_is_refused_with_the_choice():
    empty = torch.zeros(1, 1)
    for verifier in (verify_chain, verify_block, verify_target_only):
        with pytest.raises(ValueError, match="backend='cuda' is unknown; use 'torch' or 'triton'"):
            verifier(empty.long(), empty, empty, empty, empty, backend="cuda")


@pytest.mark.parametrize("verifier", [verify_chain, verify_block, verify_target_only])
def test_the_triton_backend_hands_all_arguments_to_the_kernel_of_the_same_name(verifier, monkeypatch):
    fake = SimpleNamespace(**{verifier.__name__: lambda *arguments: arguments})
    monkeypatch.setitem(sys.modules, "rlpipe.spec.kernels", fake)
    arguments = tuple(torch.zeros(1) for _ in range(5))
    assert verifier(*arguments, backend="triton") == arguments
