"""Which drafting a configuration asks for, and how many uniforms a position of it takes."""

from __future__ import annotations

from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.rollout.embedded.drafting import (
    ChainDrafting,
    Drafting,
    LookupDrafting,
    TreeDrafting,
    tree_streams,
)
from rlpipe.rollout.embedded.model import Model
from rlpipe.rollout.embedded.rows import RowTable
from rlpipe.spec.sampling import Stream
from rlpipe.spec.tree import Tree


def make_drafting(model: Model, table: RowTable, spec: SpecConfig) -> Drafting:
    """The drafting that a configuration asks for."""
    if spec.mode is SpecMode.TREE:
        return TreeDrafting(model, table, Tree.from_branching(spec.tree))
    if spec.drafter.kind.guess:
        return LookupDrafting(model, table, spec)
    return ChainDrafting(model, table, spec.mode)


def drafting_streams(spec: SpecConfig) -> int:
    """Uniforms of a position; of a sampled block: those of a whole step that starts there."""
    if spec.mode is SpecMode.TREE:
        return tree_streams(Tree.from_branching(spec.tree))
    return len(Stream) * (spec.gamma if spec.mode is SpecMode.BLOCK and spec.needs_model else 1)
