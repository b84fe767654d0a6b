"""Selects, by configuration, the draft model, its passes, and the uniforms per position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlpipe.config.drafters import Drafter
from rlpipe.config.paths import resolve
from rlpipe.config.spec import SpecConfig, SpecMode
from rlpipe.rollout.embedded.drafting import (
    ChainDrafting,
    Drafting,
    LookupDrafting,
    TreeDrafting,
    tree_streams,
)
from rlpipe.rollout.embedded.eagle3 import Eagle3Draft
from rlpipe.rollout.embedded.model import DraftModel, Model
from rlpipe.rollout.embedded.rows import RowTable
from rlpipe.spec.sampling import Stream
from rlpipe.spec.tree import Tree

# Readers for drafters with a separate directory: (directory, config.json of the target) -> draft model.
DRAFT_MODELS: dict[Drafter, Callable[[Path, Mapping[str, Any]], DraftModel]] = {
    Drafter.EAGLE3: Eagle3Draft.read,
}


def read_draft_model(spec: SpecConfig, target: Mapping[str, Any]) -> DraftModel | None:
    """Read the draft model of `spec.draft_path`; None if the drafter has no separate directory.

    target: `config.json` of the target. Raises ValueError for a draft of another model.
    """
    if not spec.needs_draft:
        return None
    return DRAFT_MODELS[spec.drafter](resolve(spec.draft_path), target)


def make_drafting(model: Model, table: RowTable, spec: SpecConfig) -> Drafting:
    """Make the drafting that a configuration names."""
    if spec.mode is SpecMode.TREE:
        return TreeDrafting(model, table, Tree.from_branching(spec.tree))

    # A drafter without a model guesses from the text, and always drafts a chain.
    if not spec.drafter.kind.has_model:
        return LookupDrafting(model, table, spec)
    return ChainDrafting(model, table, spec.mode)


def drafting_streams(spec: SpecConfig) -> int:
    """Return the number of uniforms per position; with block verification, enough for a step from there."""
    if spec.mode is SpecMode.TREE:
        return tree_streams(Tree.from_branching(spec.tree))
    return len(Stream) * (spec.gamma if spec.mode is SpecMode.BLOCK and spec.needs_model else 1)
