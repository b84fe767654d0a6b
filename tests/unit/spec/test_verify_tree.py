"""Tree verification against an exact oracle, its special cases, greedy walks and the KV rearrangement."""

from __future__ import annotations

import pytest
import torch

from rlpipe.spec.tree import Tree
from rlpipe.spec.verify import (
    rearrange_kv,
    verify_chain,
    verify_greedy,
    verify_target_only,
    verify_tree,
    verify_tree_greedy,
)
from tests.helpers.verification_law import Process, tree_law
from tests.helpers.wrong_tree_verifiers import plain_tree

pytestmark = pytest.mark.unit
EXACT = 1e-12
IRREGULAR = Tree((-1, 0, 0, 1, 1, 3))


@pytest.mark.parametrize("siblings", ["replacement", "without", "top"])
@pytest.mark.parametrize(
    ("tree", "vocab", "zeros"),
    [
        (Tree.from_branching((3,)), 4, 0.0),
        (Tree.from_branching((2, 1)), 3, 0.0),
        (Tree.from_branching((2, 1)), 3, 0.4),  # q often holds fewer tokens than there are siblings
        (IRREGULAR, 2, 0.0),
        (IRREGULAR, 3, 0.0),
    ],
)
def test_tree_emits_exactly_the_joint_law_of_the_target(tree, vocab, zeros, siblings):
    target = Process.random(vocab, tree.max_depth + 1, seed=1, zeros=zeros)
    draft = Process.random(vocab, tree.max_depth, seed=2, zeros=zeros)
    law = tree_law(verify_tree, tree, target, draft, siblings, replacement=siblings == "replacement")
    assert (law - target.joint(tree.max_depth + 1)).abs().max() < EXACT


def _random_case(tree: Tree, rows: int, vocab: int, seed: int = 0, dtype=torch.float64):
    """Tokens, q, p, coins and residual uniforms; tokens uniform over all of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    size = tree.num_drafts + 1
    p = (2 * torch.randn(rows, size, vocab, generator=generator)).to(dtype).softmax(-1)
    q = (p.log() + torch.randn(rows, size, vocab, generator=generator).to(dtype)).softmax(-1)
    tokens = torch.randint(0, vocab, (rows, tree.num_drafts), generator=generator)
    coins = torch.rand(rows, tree.num_drafts, generator=generator, dtype=torch.float64)
    return tokens, q, p, coins, torch.rand(rows, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_tree_agrees_with_a_plain_implementation_coin_by_coin(replacement, told):
    tree = Tree((-1, 0, 0, 0, 1, 1, 2, 4, 4, 4))
    tokens, q, p, *uniforms = _random_case(tree, 300, 4)
    case = (tree, tokens, q if told else None, p, *uniforms)
    ours, theirs = (verify(*case, replacement=replacement) for verify in (verify_tree, plain_tree))
    assert torch.equal(ours.path, theirs.path)
    assert torch.equal(ours.num_accepted, theirs.num_accepted)
    assert torch.equal(ours.next_token, theirs.next_token)
    assert set(ours.num_accepted.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("replacement", [True, False])
def test_a_tree_of_one_branch_decides_as_a_chain_bit_for_bit(replacement):
    tree = Tree.chain(3)
    tokens, q, p, coins, residual = _random_case(tree, 2000, 9, dtype=torch.float32)
    chain = verify_chain(tokens, q[:, :-1], p, coins, residual)
    branch = verify_tree(tree, tokens, q, p, coins, residual, replacement=replacement)
    target_only = verify_target_only(tokens, None, p, coins, residual)
    one_hot = verify_tree(tree, tokens, None, p, coins, residual, replacement=replacement)
    for ours, theirs in ((branch, chain), (one_hot, target_only)):
        assert torch.equal(ours.num_accepted, theirs.num_accepted)
        assert torch.equal(ours.next_token, theirs.next_token)
        assert torch.equal(ours.accept_prob, theirs.accept_prob)


def test_a_second_independent_sibling_of_the_same_token_is_never_accepted():
    tree = Tree.from_branching((2,))
    tokens, q, p, coins, residual = _random_case(tree, 2000, 4)
    verdict = verify_tree(tree, tokens[:, :1].expand(-1, 2), q, p, coins, residual, replacement=True)
    assert set(verdict.path.flatten().tolist()) == {-1, 1}
    first, second = verdict.accept_prob.unbind(1)
    assert (second[first < 1] == 0).all()


def test_accept_prob_of_a_sibling_is_conditional_on_the_rejection_of_earlier_ones():
    tree = Tree.from_branching((2,))
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.6, 0.2, 0.2])
    rows = [x.expand(1, 3, 3) for x in (q, p)]
    half = torch.full((1, 2), 0.5, dtype=torch.float64)
    told = verify_tree(tree, torch.tensor([[0, 2]]), *rows, half, half[:, 0], replacement=False)
    # r_2 = max(p - q, 0) / 0.1 = [0, 1, 0], so token 2 cannot be accepted; token 1 would be for sure.
    assert told.accept_prob.tolist() == [[pytest.approx(5 / 6), 0.0]]
    other = verify_tree(tree, torch.tensor([[0, 1]]), *rows, half, half[:, 0], replacement=False)
    assert other.accept_prob[0, 1].item() == 1.0


def test_rows_of_leaves_in_the_draft_are_not_read_and_nothing_is_nan_at_exhausted_drafts():
    tree = Tree.from_branching((3,))
    one_hot = torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(1, 4, 4).clone()
    one_hot[:, 1:] = float("nan")
    p = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(1, 4, 4)
    coins = torch.tensor([[0.99, 0.99, 0.99]], dtype=torch.float64)
    verdict = verify_tree(tree, torch.tensor([[1, 1, 3]]), one_hot, p, coins, coins[:, 0], replacement=False)
    assert verdict.accept_prob[0].tolist() == [pytest.approx(0.2), 0.0, pytest.approx(0.5)]
    assert (verdict.num_accepted.item(), verdict.next_token.item()) == (0, 2)


def test_a_zero_coin_does_not_accept_a_forbidden_node_and_an_empty_residual_falls_back_to_the_target():
    tree = Tree.from_branching((2,))
    p = torch.tensor([[0.0, 1.0, 0.0]]).expand(1, 3, 3)
    zero, one = torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    uniform = torch.full((1, 3, 3), 1 / 3)
    verdict = verify_tree(tree, torch.tensor([[0, 2]]), uniform, p, zero, zero[:, 0], replacement=False)
    assert (verdict.num_accepted.item(), verdict.next_token.item()) == (0, 1)
    emptied = verify_tree(tree, torch.tensor([[1, 0]]), None, p, one, one[:, 0] * 0.5, replacement=False)
    assert (emptied.num_accepted.item(), emptied.next_token.item()) == (0, 1)


def _greedy_decoding(next_best, steps: int) -> list[int]:
    """Argmax decoding of a function of the prefix."""
    prefix: list[int] = []
    for _ in range(steps):
        prefix.append(next_best(tuple(prefix)))
    return prefix


def test_greedy_tree_emits_argmax_decoding_and_accepts_all_that_can_be():
    tree = Tree((-1, 0, 0, 0, 1, 1, 2, 4, 4, 4))
    vocab, rows = 3, 400
    target = Process.random(vocab, tree.max_depth + 1, seed=7)
    tokens = torch.randint(0, vocab, (rows, tree.num_drafts), generator=torch.Generator().manual_seed(0))
    paths = tree.paths()
    contexts = [tokens[:, paths[n][paths[n] >= 0] - 1] for n in range(tree.num_drafts + 1)]
    scores = torch.stack([target.law(context) for context in contexts], 1)
    verdict = verify_tree_greedy(tree, tokens, scores.log())
    decoded = _greedy_decoding(
        lambda prefix: int(target.probs[len(prefix)][prefix].argmax()), tree.max_depth + 1
    )
    lengths = set()
    for i in range(rows):
        accepted = int(verdict.num_accepted[i])
        drafted = [int(tokens[i, n - 1]) for n in verdict.path[i].tolist() if n > 0]
        assert [*drafted, int(verdict.next_token[i])] == decoded[: accepted + 1]
        possible = [
            int((paths[n] >= 0).sum())
            for n in range(tree.num_drafts + 1)
            if contexts[n][i].tolist() == decoded[: contexts[n].shape[1]]
        ]
        assert accepted == max(possible)
        lengths.add(accepted)
    assert lengths == {0, 1, 2, 3}


def test_greedy_tree_takes_the_deeper_of_two_branches_that_repeat_a_token():
    tree = Tree((-1, 0, 0, 2))
    scores = torch.eye(4)[[1, 0, 3, 2]].unsqueeze(0)
    verdict = verify_tree_greedy(tree, torch.tensor([[1, 1, 3]]), scores)
    assert verdict.path.tolist() == [[2, 3]]
    assert verdict.next_token.item() == 2
    assert verdict.accept_prob.tolist() == [[1.0, 1.0, 1.0]]


def test_greedy_tree_of_one_branch_is_greedy_chain():
    tokens, _, p, *_ = _random_case(Tree.chain(3), 500, 2)
    tree, chain = verify_tree_greedy(Tree.chain(3), tokens, p), verify_greedy(tokens, p)
    assert torch.equal(tree.num_accepted, chain.num_accepted)
    assert torch.equal(tree.next_token, chain.next_token)


@pytest.mark.parametrize("leading", [(), (3, 2)])
def test_the_accepted_path_lies_behind_the_root_after_rearrangement_and_nothing_else_moves(leading):
    """The cache of each row names node and row in its values; layouts with leading axes move alike."""
    tree, rows, heads, slots, width = IRREGULAR, 3, 2, 12, 4
    base = torch.tensor([0, 4, 6])
    cache = torch.full((rows, heads, slots, width), -1.0)
    for row in range(rows):
        for node in range(tree.num_drafts + 1):
            cache[row, :, base[row] + node] = 100 * row + node
    before = cache.expand(*leading, -1, -1, -1, -1).clone()
    tokens = torch.zeros(rows, tree.num_drafts, dtype=torch.int64)
    scores = torch.zeros(rows, tree.num_drafts + 1, 2)
    tokens[0] = 1  # nothing agrees: nothing moves
    tokens[1, [0, 2]] = 1  # path 2
    tokens[2, 1] = 1  # path 1, 3, 5
    verdict = verify_tree_greedy(tree, tokens, scores)
    assert verdict.path.tolist() == [[-1, -1, -1], [2, -1, -1], [1, 3, 5]]
    assert verdict.kv_source.tolist() == [[1, 2, 3], [2, 2, 3], [1, 3, 5]]
    after = rearrange_kv(before.clone(), base, verdict.kv_source)
    expected = before.clone()
    expected[..., 1, :, 5, :] = 102.0
    expected[..., 2, :, 8, :] = 203.0
    expected[..., 2, :, 9, :] = 205.0
    assert torch.equal(after, expected)
