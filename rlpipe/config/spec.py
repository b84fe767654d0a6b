"""Settings of speculative decoding: drafter, verification rule, number of draft tokens. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpipe.config.choice import Choice
from rlpipe.config.drafters import KINDS, Drafter


class SpecMode(Choice):
    """How draft tokens are verified; every mode emits the target's distribution exactly."""

    NONE = "none"  # no drafts
    TARGET_ONLY = "target_only"  # draft = argmax of q, accepted with probability p(draft)
    REJECTION = "rejection"  # draft sampled from q, accepted with probability min(1, p/q)
    BLOCK = "block"  # as rejection, but verifies all drafts of a step together (accepts at least as many)
    GREEDY = "greedy"  # draft = argmax of q, accepted if it is the argmax of p (only at temperature 0)
    TREE = "tree"  # several draft tokens per position, siblings verified in rounds


@dataclass(slots=True, kw_only=True)
class SpecConfig:
    """Settings of speculative decoding.

    >>> SpecConfig(mode="target_only").mode
    <SpecMode.TARGET_ONLY: 'target_only'>
    >>> SpecConfig(mode="tree", tree=[2, 2, 1]).drafts
    10
    """

    mode: SpecMode = SpecMode.REJECTION
    """Verification rule."""

    gamma: int = 3
    """Number of draft tokens per verify step (gamma = 3 verifies 4 tokens)."""

    adaptive: bool = False
    """Before each step, choose 0 to gamma drafts from measured costs and acceptance. The distribution of
    outputs does not change, but equal seeds no longer give equal tokens."""

    tree: list[int] = field(default_factory=lambda: [2, 2, 1])
    """Number of children of every node, by depth; only for mode tree."""

    drafter: Drafter = Drafter.MTP
    """Source of the draft tokens. Looked-up drafts are deterministic, so rejection and block verify them like
    target_only."""

    draft_path: str = ""
    """Directory of a separate draft model (eagle3); draft.train=online starts from it."""

    draft_vocab: str = ""
    """JSON file {"tokens": [ascending ids]} of the tokens that an MTP layer can draft; `checkpoint` uses
    draft_vocab.json of the model. Empty: all tokens."""

    suffix: int = 4
    """Maximum length of the suffix of the text that the drafter `suffix` looks up, in tokens."""

    def __post_init__(self) -> None:
        self.mode, self.drafter = SpecMode(self.mode), Drafter(self.drafter)
        if self.gamma < 1:
            raise ValueError(
                f"spec.gamma={self.gamma} drafts nothing: gamma must be at least 1. "
                "To decode without speculation set spec.mode=none."
            )

        # Some combinations of drafter and verification do not exist.
        if self.adaptive and self.mode in (SpecMode.NONE, SpecMode.TREE):
            raise ValueError(
                f"spec.adaptive=true needs a chain of drafts, got spec.mode={self.mode}: "
                "use spec.mode=rejection, block, target_only or greedy."
            )
        if not self.drafter.kind.has_model and self.mode is SpecMode.TREE:
            raise ValueError(
                f"spec.drafter={self.drafter} drafts one path, got spec.mode=tree: use target_only or greedy."
            )

        if bool(self.draft_path) != self.drafter.kind.has_directory:
            with_directory = " or ".join(name for name, kind in KINDS.items() if kind.has_directory)
            raise ValueError(
                f"spec.drafter={self.drafter} and spec.draft_path={self.draft_path!r}: the directory of a "
                f"draft belongs to spec.drafter={with_directory}, which needs one. Set both or neither."
            )

        if self.draft_vocab and not self.drafter.kind.reads_head:
            raise ValueError(
                f"spec.draft_vocab={self.draft_vocab!r} cuts the head that an MTP layer drafts with, got "
                f"spec.drafter={self.drafter}: set spec.draft_vocab='' (an EAGLE-3 draft has a vocabulary of "
                "its own, see eagle3.draft_vocab)."
            )

        if self.suffix < 1:
            raise ValueError(f"spec.suffix={self.suffix}: at least the last token is looked up.")
        if not self.tree or min(self.tree) < 1:
            raise ValueError(f"spec.tree={self.tree} must list one or more children for each depth.")

    @property
    def needs_mtp(self) -> bool:
        """Whether an MTP layer generates the drafts."""
        return self.needs_model and not self.drafter.kind.has_directory

    @property
    def needs_draft(self) -> bool:
        """Whether a draft model with a separate directory generates the drafts."""
        return self.mode is not SpecMode.NONE and self.drafter.kind.has_directory

    @property
    def needs_model(self) -> bool:
        """Whether a model generates the drafts, with a distribution q and a KV cache that must be updated."""
        return self.mode is not SpecMode.NONE and self.drafter.kind.has_model

    @property
    def depth(self) -> int:
        """Maximum number of draft tokens that one verify step can accept; 0 without speculation."""
        if self.mode is SpecMode.TREE:
            return len(self.tree)
        return 0 if self.mode is SpecMode.NONE else self.gamma

    @property
    def drafts(self) -> int:
        """Maximum number of draft tokens of one verify step: gamma, or the nodes of the tree."""
        if self.mode is not SpecMode.TREE:
            return self.depth

        # The nodes of a level are the nodes of the level above, times the children of each.
        nodes, level = 0, 1
        for children in self.tree:
            level *= children
            nodes += level
        return nodes
