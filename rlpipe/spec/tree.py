"""The static shape of a tree of draft tokens, without tokens and probabilities.

Node 0 is the root: the pending token, already emitted but not yet in the KV cache. Nodes 1..N are
draft tokens, numbered level by level; children of one node are adjacent, in the order they are verified:

    Tree.from_branching((2, 1))          0
                                       1   2        depth 1: candidates for the token after the root
                                       3   4        depth 2: parents == (-1, 0, 0, 1, 2)

A target pass runs over the N + 1 nodes at once, node n at position base + depths[n], attending to the
prefix and to `ancestor_mask()[n]`. Its keys are stored in slot base + n until `rearrange_kv` moves them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class Tree:
    """The shape of a tree.

    parents: parent of each node 0..N, -1 for the root. Must be non-decreasing, so that levels follow one
    another; raises ValueError otherwise.

    >>> Tree.from_branching((2, 1)).children(0), Tree.chain(3).parents
    ((1, 2), (-1, 0, 1, 2))
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        parents = self.parents
        if len(parents) < 2 or parents[0] != -1:
            raise ValueError(
                f"parents={parents} is not a tree of drafts: "
                "start with -1 for the root, then one entry per draft."
            )
        for node in range(1, len(parents)):
            if not max(parents[node - 1], 0) <= parents[node] < node:
                raise ValueError(
                    f"parents={parents} is not in level order at node {node}: number the nodes level by "
                    "level, children of earlier nodes first, so that parents never decrease."
                )

    @classmethod
    def chain(cls, gamma: int) -> Tree:
        """Create a single path of gamma drafts."""
        return cls.from_branching((1,) * gamma)

    @classmethod
    def from_branching(cls, branching: Sequence[int]) -> Tree:
        """Create a tree in which every node of depth i has branching[i] children.

        Raises ValueError for a count below 1.
        """
        if not branching or min(branching) < 1:
            raise ValueError(
                f"branching={tuple(branching)}: give at least one level, each of 1 child or more."
            )

        parents, level = [-1], [0]
        for children in branching:
            start = len(parents)
            parents += [node for node in level for _ in range(children)]
            level = list(range(start, len(parents)))
        return cls(tuple(parents))

    @property
    def num_drafts(self) -> int:
        """Number N of drafts; the target pass has N + 1 rows."""
        return len(self.parents) - 1

    @property
    def max_depth(self) -> int:
        """The maximum number of drafts one step can accept."""
        return self.depths[-1]

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node, 0 for the root."""
        return _layout(self)[0]

    def children(self, node: int) -> tuple[int, ...]:
        """Return the children of a node in the order they are verified; empty for a leaf."""
        return _layout(self)[1][node]

    def paths(self) -> torch.Tensor:
        """Return [N + 1, max_depth] int64: in row n, the nodes from depth 1 down to node n, then -1."""
        return _paths(self).clone()

    def ancestor_mask(self) -> torch.Tensor:
        """Return [N + 1, N + 1] bool: row n is True at the nodes that n attends to: n and its ancestors."""
        mask = torch.eye(len(self.parents), dtype=torch.bool)
        for node in range(1, len(self.parents)):
            mask[node] |= mask[self.parents[node]]
        return mask


@lru_cache
def _layout(tree: Tree) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the depths and the children of all nodes."""
    depths, children = [0], [[] for _ in tree.parents]
    for node, parent in enumerate(tree.parents[1:], start=1):
        depths.append(depths[parent] + 1)
        children[parent].append(node)
    return tuple(depths), tuple(tuple(nodes) for nodes in children)


@lru_cache
def _paths(tree: Tree) -> torch.Tensor:
    """Compute `Tree.paths` once per tree. All callers share the result, so do not write to it."""
    table = torch.full((len(tree.parents), tree.max_depth), -1)
    for node in range(1, len(tree.parents)):
        table[node] = table[tree.parents[node]]
        table[node, tree.depths[node] - 1] = node
    return table
