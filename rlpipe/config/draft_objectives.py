"""Names of the objectives that train a draft model; their losses: `rlpipe.drafts.objectives`. No torch."""

from __future__ import annotations

from rlpipe.config.choice import Choice


class DraftObjective(Choice):
    """The quantity that the training of a draft model minimises."""

    HARD_CE = "hard_ce"  # cross-entropy against the realised token
    KL = "kl"  # KL(target || draft)
    REVERSE_KL = "reverse_kl"  # KL(draft || target)
    TV = "tv"  # rejected mass, depth by depth
    TV_LINEAR = "tv_linear"  # the same, depth k weighted by (K - k + 1) / K
    TV_DECAY = "tv_decay"  # the same, depth k weighted by 0.8^(k - 1)
    LK = "lk"  # KL where the overlap is small, TV where it is large
    E2E_TV = "e2e_tv"  # rejected share of a chain, its overlaps multiplied
    E2E_CHAIN = "e2e_chain"  # rejected share of a chain, exact for tokens of the target
    E2E_BLOCK = "e2e_block"  # rejected share under block verification
    VERIFY_STEPS = "verify_steps"  # expected verify steps per emitted token
    PPOW = "ppow"  # minus the reward of windows that the draft model generates, as published
    PPOW_EXACT = "ppow_exact"  # the same with the term that its gradient misses
    EXACT_WINDOW = "exact_window"  # minus the expected speed-up of such windows, by its exact gradient
    EXACT_BLOCK = "exact_block"  # the same under block verification


WINDOWS = [
    DraftObjective.PPOW,
    DraftObjective.PPOW_EXACT,
    DraftObjective.EXACT_WINDOW,
    DraftObjective.EXACT_BLOCK,
]
"""Objectives that learn from windows that the draft model generates."""

SUPERVISED = [name for name in DraftObjective if name not in WINDOWS]
"""Objectives that learn from a fixed text."""

EXACT_ON_OWN_TOKENS = (DraftObjective.E2E_CHAIN, DraftObjective.E2E_BLOCK, DraftObjective.VERIFY_STEPS)
"""Objectives on a fixed text that are acceptance exactly if the target sampled the text, else biased."""


class AnchorWeighting(Choice):
    """How much each anchor (position where a verify step may start) counts."""

    UNIFORM = "uniform"  # every anchor alike
    VISIT = "visit"  # by the probability that a verify step starts there
