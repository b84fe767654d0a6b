"""Names of the objectives that train a draft model. `rlpipe.drafts.objectives` has the losses. No torch."""

from __future__ import annotations

from rlpipe.config.choice import Choice


class DraftObjective(Choice):
    """The quantity that the training of a draft model minimises."""

    HARD_CE = "hard_ce"  # cross-entropy with the sampled token as label
    KL = "kl"  # KL(target || draft)
    REVERSE_KL = "reverse_kl"  # KL(draft || target)
    TV = "tv"  # total variation, which is the rejected mass, at each depth
    TV_LINEAR = "tv_linear"  # as tv, with weight (K - k + 1) / K for depth k
    TV_DECAY = "tv_decay"  # as tv, with weight 0.8^(k - 1) for depth k
    TV_CLAMP = "tv_clamp"  # as tv, clamped to 0.9: rows with little overlap have no gradient
    TV_TOP = "tv_top"  # as tv, but only over the draft's 1,000 largest logits
    LK = "lk"  # KL if the overlap is small, TV if it is large
    EAGLE1 = "eagle1"  # distance of hidden states, plus a small KL, only for an MTP layer
    E2E_TV = "e2e_tv"  # rejected share of a chain, from the product of overlaps
    E2E_CHAIN = "e2e_chain"  # rejected share of a chain, exact for tokens that the target sampled
    E2E_BLOCK = "e2e_block"  # rejected share under block verification
    VERIFY_STEPS = "verify_steps"  # expected verify steps per emitted token
    PPOW = "ppow"  # minus the reward of windows that the draft model generates, as published
    PPOW_EXACT = "ppow_exact"  # as ppow, plus the term that its gradient lacks
    PPOW_MEASURED = "ppow_measured"  # as ppow, with the speed-up of a step that pays for all drafts as reward
    EXACT_WINDOW = "exact_window"  # minus the expected speed-up of generated windows, with its exact gradient
    EXACT_BLOCK = "exact_block"  # as exact_window, under block verification
    OWN_KL = "own_kl"  # KL(target || draft) along generated windows


WINDOWS = [
    DraftObjective.PPOW,
    DraftObjective.PPOW_EXACT,
    DraftObjective.PPOW_MEASURED,
    DraftObjective.EXACT_WINDOW,
    DraftObjective.EXACT_BLOCK,
    DraftObjective.OWN_KL,
]
"""Objectives that learn from windows that the draft model generates."""

SUPERVISED = [name for name in DraftObjective if name not in WINDOWS]
"""Objectives that learn from a fixed text."""

FROM_LOGITS = [name for name in SUPERVISED if name is not DraftObjective.EAGLE1]
"""The objectives in SUPERVISED that compare only distributions; the draft may have a head that differs from
the target's."""

EXACT_ON_OWN_TOKENS = (DraftObjective.E2E_CHAIN, DraftObjective.E2E_BLOCK, DraftObjective.VERIFY_STEPS)
"""Objectives on a fixed text that equal acceptance if the target sampled the text, and are biased
otherwise."""


class AnchorWeighting(Choice):
    """Weight of each anchor (a position where a verify step may start)."""

    UNIFORM = "uniform"  # the same for every anchor
    VISIT = "visit"  # the probability that a verify step starts at the anchor
