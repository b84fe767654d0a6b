"""The static shape of a tree of drafts."""

from __future__ import annotations

import pytest

from rlpipe.spec.tree import Tree

pytestmark = pytest.mark.unit


def test_branching_numbers_nodes_level_by_level():
    tree = Tree.from_branching((2, 1, 2))
    assert tree.parents == (-1, 0, 0, 1, 2, 3, 3, 4, 4)
    assert tree.depths == (0, 1, 1, 2, 2, 3, 3, 3, 3)
    assert [tree.children(node) for node in (0, 1, 3, 8)] == [(1, 2), (3,), (5, 6), ()]
    assert (tree.num_drafts, tree.max_depth) == (8, 3)
    assert Tree.chain(2) == Tree((-1, 0, 1))


def test_nodes_attend_to_their_ancestors_and_themselves_alone():
    tree = Tree((-1, 0, 0, 1, 1, 3))
    mask = tree.ancestor_mask()
    seen = [set(mask[node].nonzero().flatten().tolist()) for node in range(6)]
    assert seen == [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 1, 3, 5}]
    assert tree.paths()[5].tolist() == [1, 3, 5]
    assert tree.paths()[2].tolist() == [2, -1, -1]


def test_what_is_given_out_can_be_written_to():
    tree = Tree.chain(2)
    tree.paths().zero_()
    tree.ancestor_mask().zero_()
    assert tree.paths()[2].tolist() == [1, 2]
    assert tree.ancestor_mask()[2].all()


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((), "start with -1"),
        ((-1,), "one entry per draft"),
        ((0, 0), "start with -1"),
        ((-1, 0, 1, 0), "not in level order at node 3"),
        ((-1, 1), "not in level order at node 1"),
        ((-1, -1), "not in level order at node 1"),
        ((-1, 0, 0, 4, 1), "not in level order at node 3"),
    ],
)
def test_what_is_no_tree_in_level_order_is_refused(parents, message):
    with pytest.raises(ValueError, match=message):
        Tree(parents)


def test_branching_without_children_is_refused():
    with pytest.raises(ValueError, match=r"branching=\(2, 0\)"):
        Tree.from_branching((2, 0))
    with pytest.raises(ValueError, match="at least one level"):
        Tree.chain(0)
