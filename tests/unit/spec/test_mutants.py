"""Every planted bug is caught: by the exact law, or by a coin at a boundary. A survivor fails the suite.

The error of a right rule's law is about 1e-16; that of the mildest bug here, rounding q to bfloat16, is
3e-4, of the others 4e-3 to 1e-1. Which bugs a pair of laws can show depends on the pair: some residuals
hold a single token whatever their scale. The seeds are chosen so that all bugs show.
"""

from __future__ import annotations

import pytest
import torch

from rlpipe.spec.tree import Tree
from rlpipe.spec.verify import (
    verify_block,
    verify_chain,
    verify_target_only,
)
from tests.helpers.gumbel_chain import verify_chain_gumbel
from tests.helpers.verification_law import PremiseBroken, Process, emitted_law, tree_law
from tests.helpers.wrong_tree_verifiers import TREE_MUTANTS, plain_tree
from tests.helpers.wrong_verifiers import (
    BLOCK_MUTANTS,
    CHAIN_MUTANTS,
    falls_back_to_the_last_token,
    lenient_coin,
    plain,
    plain_block,
    typical_acceptance,
)

pytestmark = pytest.mark.unit
VOCAB, GAMMA = 3, 2
SIBLINGS = Tree.from_branching((2,))
TARGET, DRAFT = Process.random(VOCAB, GAMMA + 1, seed=5), Process.random(VOCAB, GAMMA, seed=105)
CAUGHT, EXACT = 1e-4, 1e-12


def _chain_error(verifier, drafted: Process | None = None) -> float:
    """Law error; infinite where the verifier has no law of thresholds. drafted: what is really drafted."""
    joint = (drafted or DRAFT).joint(GAMMA)
    try:
        law = emitted_law(verifier, TARGET, DRAFT, lambda drafts: joint[tuple(drafts.T)])
    except PremiseBroken:
        return float("inf")
    return (law - TARGET.joint(GAMMA + 1)).abs().max().item()


def _tree_error(verifier, siblings: str) -> float:
    target, draft = Process.random(4, 2, seed=5), Process.random(4, 1, seed=105)
    try:
        law = tree_law(verifier, SIBLINGS, target, draft, siblings, replacement=siblings == "replacement")
    except PremiseBroken:
        return float("inf")
    return (law - target.joint(2)).abs().max().item()


def test_the_plain_verifiers_without_a_bug_are_exact():
    assert _chain_error(plain) < EXACT
    assert _chain_error(plain_block) < EXACT
    for siblings in ("replacement", "without", "top"):
        assert _tree_error(plain_tree, siblings) < EXACT


@pytest.mark.parametrize("mutant", CHAIN_MUTANTS)
def test_the_exact_law_catches_in_chain(mutant):
    assert _chain_error(CHAIN_MUTANTS[mutant]) > CAUGHT


@pytest.mark.parametrize("mutant", BLOCK_MUTANTS)
def test_the_exact_law_catches_in_block(mutant):
    assert _chain_error(BLOCK_MUTANTS[mutant]) > CAUGHT


@pytest.mark.parametrize("mutant", TREE_MUTANTS)
def test_the_exact_law_catches_in_tree(mutant):
    siblings, verifier = TREE_MUTANTS[mutant]
    assert _tree_error(verifier, siblings) > CAUGHT


@pytest.mark.parametrize("verifier", [verify_chain, verify_block])
def test_the_exact_law_catches_drafts_of_another_law_than_stated(verifier):
    """Another temperature; top-k applied to the draft but not to q (transformers#47932)."""
    sharper = Process([probs**2 / (probs**2).sum(-1, keepdim=True) for probs in DRAFT.probs])
    kept = [probs.masked_fill(probs == probs.amin(-1, keepdim=True), 0.0) for probs in DRAFT.probs]
    top_k = Process([probs / probs.sum(-1, keepdim=True) for probs in kept])
    for drafted in (sharper, top_k):
        assert _chain_error(verifier, drafted) > 1e-3


def test_the_exact_law_catches_draft_length_chosen_by_the_drafts_own_probability():
    """Verifying the second draft only where q_2(d_2) is high is lossy; where max q_2 is high, it is not."""
    joint = DRAFT.joint(GAMMA)

    def adaptive(confidence, threshold):
        def verify(tokens, q, p, coins, residual):
            long = verify_chain(tokens, q, p, coins, residual)
            short = verify_chain(tokens[:, :1], q[:, :1], p[:, :2], coins[:, :1], residual)
            use_long = confidence(q[:, 1], tokens[:, 1:]) > threshold
            long.num_accepted = torch.where(use_long, long.num_accepted, short.num_accepted)
            long.next_token = torch.where(use_long, long.next_token, short.next_token)
            return long

        law = emitted_law(verify, TARGET, DRAFT, lambda drafts: joint[tuple(drafts.T)])
        return (law - TARGET.joint(GAMMA + 1)).abs().max().item()

    assert adaptive(lambda q, token: q.gather(1, token)[:, 0], 0.4) > 1e-3
    assert adaptive(lambda q, token: q.amax(1), 0.6) < EXACT


def test_the_exact_law_catches_typical_acceptance():
    assert _chain_error(typical_acceptance) > 1e-2


def _zero_coin(verifier) -> int:
    """Accepted drafts when the coin is 0 and the target forbids the draft."""
    target = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]], dtype=torch.float64)
    draft = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    return verifier(torch.tensor([[0]]), draft, target, zero, zero[0]).num_accepted.item()


def test_a_zero_coin_does_not_accept_a_token_of_probability_zero():
    assert _zero_coin(lenient_coin) == 1  # the planted bug shows
    for verifier in (verify_chain, verify_block, verify_target_only):
        assert _zero_coin(verifier) == 0
    target = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    zero = torch.zeros(1, 1, dtype=torch.float64)
    noise = torch.full((1, 2), 0.5)
    assert (
        verify_chain_gumbel(torch.tensor([[0]]), target.flip(-1)[:, :1], target, zero, noise).num_accepted
        == 0
    )


def _end_of_the_cdf(verifier) -> int:
    """Token drawn for the largest uniform, when the last token of the vocabulary has no weight."""
    target = torch.tensor([[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]], dtype=torch.float64)
    draft = torch.tensor([[[1.0, 0.0, 0.0]]], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    return verifier(torch.tensor([[0]]), draft, target, one, one[0]).next_token.item()


def test_the_end_of_the_cdf_is_the_last_token_with_weight():
    assert _end_of_the_cdf(falls_back_to_the_last_token) == 2  # the planted bug shows
    for verifier in (verify_chain, verify_block, verify_target_only):
        assert _end_of_the_cdf(verifier) == 1


def test_at_least_ten_bugs_are_planted():
    assert len(CHAIN_MUTANTS) + len(BLOCK_MUTANTS) + len(TREE_MUTANTS) >= 10
