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
    TV_CLAMP = "tv_clamp"  # rejected mass, at most 0.9: rows that hardly overlap teach nothing
    TV_TOP = "tv_top"  # rejected mass among the draft's 1,000 largest logits
    LK = "lk"  # KL where the overlap is small, TV where it is large
    EAGLE1 = "eagle1"  # distance of hidden states, and a small KL; of an MTP layer
    E2E_TV = "e2e_tv"  # rejected share of a chain, its overlaps multiplied
    E2E_CHAIN = "e2e_chain"  # rejected share of a chain, exact for tokens of the target
    E2E_BLOCK = "e2e_block"  # rejected share under block verification
    VERIFY_STEPS = "verify_steps"  # expected verify steps per emitted token
    PPOW = "ppow"  # minus the reward of windows that the draft model generates, as published
    PPOW_EXACT = "ppow_exact"  # the same with the term that its gradient misses
    PPOW_MEASURED = "ppow_measured"  # as ppow, rewarded by the speed-up of a step that pays for all drafts
    EXACT_WINDOW = "exact_window"  # minus the expected speed-up of such windows, by its exact gradient
    EXACT_BLOCK = "exact_block"  # the same under block verification
    OWN_KL = "own_kl"  # KL(target || draft) along such windows


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
"""Of these, the ones that compare distributions only, so a draft may have another head than its target."""

EXACT_ON_OWN_TOKENS = (DraftObjective.E2E_CHAIN, DraftObjective.E2E_BLOCK, DraftObjective.VERIFY_STEPS)
"""Objectives on a fixed text that are acceptance exactly if the target sampled the text, else biased."""


class AnchorWeighting(Choice):
    """How much each anchor (position where a verify step may start) counts."""

    UNIFORM = "uniform"  # every anchor alike
    VISIT = "visit"  # by the probability that a verify step starts there
