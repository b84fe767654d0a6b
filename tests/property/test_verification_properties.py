"""Verification over random laws: exactness, dominance and identities that hold for all inputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.theory import (
    block_reach_drafted,
    block_reach_target,
    chain_reach_drafted,
    chain_reach_target,
    rejection_alpha,
)
from rlpipe.spec.tree import Tree
from rlpipe.spec.verify import (
    verify_block,
    verify_chain,
    verify_tree,
    verify_tree_greedy,
)
from tests.helpers.gumbel_chain import verify_chain_gumbel
from tests.helpers.verification_law import Process, accepted_law, all_drafts, emitted_law, tree_law
from tests.helpers.wrong_tree_verifiers import plain_tree

pytestmark = pytest.mark.property
EXACT = 1e-12
few = settings(max_examples=12, deadline=None, derandomize=True)
many = settings(max_examples=30, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
sharpness = st.sampled_from([0.3, 1.0, 3.0])
zeros = st.sampled_from([0.0, 0.0, 0.4])


@st.composite
def laws(draw, vocabs=(2, 3, 4), gammas=(1, 2, 3)) -> tuple[Process, Process]:
    """Target and draft of up to 5 tokens' vocabulary, dead tokens included."""
    gamma = draw(st.sampled_from(gammas))
    vocab = draw(st.sampled_from(vocabs if gamma < 3 else vocabs[:2]))
    target = Process.random(vocab, gamma + 1, draw(seeds), draw(sharpness), draw(zeros))
    return target, Process.random(vocab, gamma, draw(seeds), draw(sharpness), draw(zeros))


@st.composite
def trees(draw, drafts: int) -> Tree:
    """Any tree with 1 to `drafts` drafts."""
    parents = [-1]
    for node in range(1, draw(st.integers(1, drafts)) + 1):
        parents.append(draw(st.integers(max(parents[-1], 0), node - 1)))
    return Tree(tuple(parents))


@given(laws(), st.sampled_from([verify_chain, verify_block]))
@few
def test_chain_and_block_emit_the_law_of_any_target_from_any_draft(pair, verifier):
    target, draft = pair
    joint = draft.joint(len(draft.probs))
    law = emitted_law(verifier, target, draft, lambda drafts: joint[tuple(drafts.T)])
    assert (law - target.joint(len(target.probs))).abs().max() < EXACT


@given(trees(4), seeds, sharpness, zeros, st.sampled_from(["replacement", "without", "top"]))
@few
def test_a_tree_of_any_shape_emits_the_law_of_the_target(tree, seed, sharp, dead, siblings):
    vocab = 3
    if siblings == "top" and max(len(tree.children(n)) for n in range(tree.num_drafts + 1)) > vocab:
        vocab = 4
    target = Process.random(vocab, tree.max_depth + 1, seed, sharp, dead)
    draft = Process.random(vocab, tree.max_depth, seed + 1, sharp, dead)
    law = tree_law(verify_tree, tree, target, draft, siblings, replacement=siblings == "replacement")
    assert (law - target.joint(tree.max_depth + 1)).abs().max() < EXACT


@given(laws())
@many
def test_block_is_never_below_chain_in_any_context_and_both_match_their_estimators(pair):
    """Expected acceptance after every prefix of drafts, and its estimates from drafts and target tokens."""
    target, draft = pair
    gamma, vocab = len(draft.probs), draft.probs[0].shape[-1]
    drafts = all_drafts(vocab, gamma)
    p_rows, q_rows = target.rows(drafts, gamma), draft.rows(drafts, gamma)
    p, q = (rows.gather(-1, drafts.unsqueeze(-1)).squeeze(-1) for rows in (p_rows, q_rows))
    chance, live = q.prod(1), p.prod(1) > 0
    reach = {}
    for name, verifier in (("chain", verify_chain), ("block", verify_block)):
        law = accepted_law(verifier, target, draft)
        reach[name] = torch.stack([law[:, depth:].sum(1) for depth in range(1, gamma + 1)], 1)
    shape = [vocab] * gamma
    for depth in range(1, gamma + 1):
        deeper = tuple(range(depth, gamma))
        block, chain = ((chance * reach[name][:, depth - 1]).view(shape) for name in ("block", "chain"))
        if deeper:
            block, chain = block.sum(deeper), chain.sum(deeper)
        assert (block >= chain - EXACT).all()
    estimates = {
        "chain": chain_reach_target(p.log(), q.log(), rejection_alpha(p_rows, q_rows)),
        "block": block_reach_target(p.log(), q.log()),
    }
    drafted = {"chain": chain_reach_drafted(p, q), "block": block_reach_drafted(p, q)}
    for name in ("chain", "block"):
        exact = chance @ reach[name]
        assert (exact - p.prod(1)[live] @ estimates[name][live]).abs().max() < EXACT
        assert (exact - chance @ drafted[name]).abs().max() < EXACT


def _batch(tree: Tree, seed: int, vocab: int, sharp: float, rows: int = 64, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, tree.num_drafts + 1, vocab)

    def law() -> torch.Tensor:
        logits = sharp * torch.randn(shape, generator=generator, dtype=dtype)
        dead = torch.rand(shape, generator=generator) < 0.2
        dead[..., 0] = False
        return logits.masked_fill(dead, float("-inf")).softmax(-1)

    tokens = torch.randint(0, vocab, shape[:2], generator=generator)[:, 1:]
    # A lattice, ends included: coins meet thresholds of 0 and 1 exactly.
    coins = torch.randint(0, 9, tokens.shape, generator=generator).double() / 8
    residual = torch.randint(0, 9, (rows,), generator=generator).double() / 8
    return tokens, law(), law(), coins, residual


@given(trees(8), seeds, st.integers(2, 9), sharpness, st.booleans(), st.booleans())
@many
def test_tree_agrees_with_the_plain_walk_on_any_shape(tree, seed, vocab, sharp, replacement, told):
    tokens, q, p, coins, residual = _batch(tree, seed, vocab, sharp)
    coins, residual = coins.clamp(1e-4, 1 - 1e-4), residual.clamp(1e-4, 1 - 1e-4)  # off ties
    case = (tree, tokens, q if told else None, p, coins, residual)
    ours, theirs = (verify(*case, replacement=replacement) for verify in (verify_tree, plain_tree))
    assert torch.equal(ours.path, theirs.path)
    assert torch.equal(ours.next_token, theirs.next_token)


@given(
    st.integers(1, 5), seeds, st.integers(1, 9), sharpness, st.sampled_from([torch.float32, torch.float64])
)
@many
def test_whatever_is_emitted_is_allowed_by_the_target_and_nothing_is_nan(gamma, seed, vocab, sharp, dtype):
    """Boundary coins, dead tokens in either law, drafts that q cannot have drawn."""
    tree = Tree.chain(gamma)
    tokens, q, p, coins, residual = _batch(tree, seed, vocab, sharp, dtype=dtype)
    noise = residual.unsqueeze(1).expand(-1, vocab)
    verdicts = [
        verify_chain(tokens, q[:, :-1], p, coins, residual),
        verify_block(tokens, q[:, :-1], p, coins, residual),
        verify_chain_gumbel(tokens, q[:, :-1], p, coins, noise),
        verify_tree(tree, tokens, q, p, coins, residual, replacement=False),
        verify_tree_greedy(tree, tokens, p),
    ]
    for verdict in verdicts:
        assert ((verdict.accept_prob >= 0) & (verdict.accept_prob <= 1)).all()
        emitted = torch.cat([tokens, tokens[:, :1]], 1)
        emitted = emitted.scatter(1, verdict.num_accepted.unsqueeze(1), verdict.next_token.unsqueeze(1))
        allowed = p.gather(-1, emitted.unsqueeze(-1)).squeeze(-1) > 0
        within = torch.arange(gamma + 1) <= verdict.num_accepted.unsqueeze(1)
        assert allowed[within].all()
