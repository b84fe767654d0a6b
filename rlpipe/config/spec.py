"""Speculative decoding: which verification, how many drafts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.config.choice import Choice


class SpecMode(Choice):
    """How drafted tokens are verified; every mode emits the target's distribution exactly."""

    NONE = "none"  # no drafts
    TARGET_ONLY = "target_only"  # draft = argmax of q, accepted with probability p(draft)
    REJECTION = "rejection"  # draft sampled from q, accepted with probability min(1, p/q)


@dataclass(slots=True, kw_only=True)
class SpecConfig:
    """Settings of speculative decoding.

    mode: verification rule. gamma: drafted tokens per verify step (gamma = 3 verifies 4 tokens).

    >>> SpecConfig(mode="target_only").mode
    <SpecMode.TARGET_ONLY: 'target_only'>
    """

    mode: SpecMode = SpecMode.REJECTION
    gamma: int = 3

    def __post_init__(self) -> None:
        self.mode = SpecMode(self.mode)
        if self.gamma < 1:
            raise ValueError(
                f"spec.gamma={self.gamma} drafts nothing: gamma must be at least 1. "
                "To decode without speculation set spec.mode=none."
            )

    @property
    def drafts(self) -> int:
        """Drafted tokens per decode step in this mode: gamma, or 0 without speculation."""
        return 0 if self.mode is SpecMode.NONE else self.gamma
