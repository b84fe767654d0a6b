"""Block verification: exact, never below chain in expectation, and why not pathwise."""

from __future__ import annotations

import pytest
import torch

from recipes.theory import block_reach_drafted, chain_reach_drafted
from rlpipe.spec.verify import verify_block, verify_chain
from tests.helpers.verification_law import Process, accepted_law, all_drafts, emitted_law
from tests.helpers.wrong_verifiers import plain_block

pytestmark = pytest.mark.unit
EXACT = 1e-12


def _random_case(rows: int, gamma: int, vocab: int, dtype=torch.float64, seed: int = 0):
    """Drafts sampled from q, p, q, coins and residual uniforms."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(rows, gamma + 1, vocab, generator=generator).to(dtype).softmax(-1)
    q = (p[:, :-1].log() + torch.randn(rows, gamma, vocab, generator=generator).to(dtype)).softmax(-1)
    drafts = torch.multinomial(q.flatten(0, 1).float(), 1, generator=generator).view(rows, gamma)
    coins = torch.rand(rows, gamma, generator=generator, dtype=torch.float64)
    return drafts, q, p, coins, torch.rand(rows, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("vocab", "gamma", "zeros"), [(5, 1, 0.0), (4, 2, 0.0), (3, 3, 0.0), (3, 3, 0.3), (2, 3, 0.0)]
)
def test_block_emits_exactly_the_joint_law_of_the_target(vocab, gamma, zeros):
    target = Process.random(vocab, gamma + 1, seed=1, sharpness=1.5, zeros=zeros)
    draft = Process.random(vocab, gamma, seed=2, zeros=zeros)
    joint = draft.joint(gamma)
    law = emitted_law(verify_block, target, draft, lambda drafts: joint[tuple(drafts.T)])
    assert (law - target.joint(gamma + 1)).abs().max() < EXACT


def test_block_agrees_with_a_plain_implementation_coin_by_coin():
    case = _random_case(400, 4, 6)
    ours, theirs = verify_block(*case), plain_block(*case)
    assert torch.equal(ours.num_accepted, theirs.num_accepted)
    assert torch.equal(ours.next_token, theirs.next_token)
    assert torch.allclose(ours.accept_prob, theirs.accept_prob.double(), atol=1e-6)
    assert set(ours.num_accepted.tolist()) == {0, 1, 2, 3, 4}


def test_block_of_one_draft_decides_as_chain_bit_for_bit():
    case = _random_case(5000, 1, 50, dtype=torch.float32)
    block, chain = verify_block(*case), verify_chain(*case)
    assert torch.equal(block.num_accepted, chain.num_accepted)
    assert torch.equal(block.next_token, chain.next_token)


def test_block_is_never_below_chain_at_any_depth_once_coins_are_marginalised():
    drafts, q, p, *_ = _random_case(5000, 5, 8)
    pick = drafts.unsqueeze(-1)
    realised = p[:, :-1].gather(-1, pick).squeeze(-1), q.gather(-1, pick).squeeze(-1)
    block, chain = block_reach_drafted(*realised), chain_reach_drafted(*realised)
    assert (block >= chain - 1e-15).all()
    assert (block > chain + 0.05).any()


def test_more_drafts_are_accepted_by_block_on_the_same_drafts_and_coins_taken_together():
    case = _random_case(20_000, 4, 8)
    assert verify_block(*case).num_accepted.sum() > 1.01 * verify_chain(*case).num_accepted.sum()


def test_on_one_draft_block_may_accept_less_than_chain_which_no_lossless_rule_that_gains_can_avoid():
    """A second draft that the target forbids makes block give up the first; see the rule's docstring."""
    p1, q1 = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])
    p2, q2 = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.5])
    target = torch.stack([p1, p2, p2]).unsqueeze(0)
    draft = torch.stack([q1, q2]).unsqueeze(0)
    coins = torch.tensor([[0.4, 0.9]], dtype=torch.float64)
    bad, good = torch.tensor([[0, 0]]), torch.tensor([[0, 1]])
    assert verify_chain(bad, draft, target, coins, coins[:, 0]).num_accepted.item() == 1
    assert verify_block(bad, draft, target, coins, coins[:, 0]).num_accepted.item() == 0
    assert verify_chain(good, draft, target, coins, coins[:, 0]).num_accepted.item() == 2
    late = torch.tensor([[0.6, 0.9]], dtype=torch.float64)  # chain rejects the first, block takes both
    assert verify_chain(good, draft, target, late, coins[:, 0]).num_accepted.item() == 0
    assert verify_block(good, draft, target, late, coins[:, 0]).num_accepted.item() == 2


@pytest.mark.parametrize("zeros", [0.0, 0.3])
def test_accept_prob_is_the_chance_of_reaching_a_depth_given_the_drafts_up_to_it(zeros):
    """Deeper drafts and coins marginalised by enumeration, from the verifier's decisions alone."""
    vocab, gamma = 3, 3
    target = Process.random(vocab, gamma + 1, seed=5, zeros=zeros)
    draft = Process.random(vocab, gamma, seed=6, zeros=zeros)
    drafts, shape = all_drafts(vocab, gamma), [vocab] * gamma
    coins = torch.full((len(drafts), gamma), 0.5, dtype=torch.float64)
    stated = verify_block(
        drafts, draft.rows(drafts, gamma), target.rows(drafts, gamma + 1), coins, coins[:, 0]
    )
    law, chance = accepted_law(verify_block, target, draft), draft.joint(gamma)
    for depth in range(1, gamma + 1):
        deeper = tuple(range(depth, gamma))
        reached = (chance * law[:, depth:].sum(1).view(shape)).sum(deeper)
        weights = (chance * stated.accept_prob[:, depth - 1].view(shape)).sum(deeper)
        assert (reached - weights).abs().max() < EXACT
