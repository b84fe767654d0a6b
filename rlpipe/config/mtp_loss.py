"""Names of the objectives that can train a draft. Equations: rlpipe.drafts.loss, .ppow. No torch."""

from __future__ import annotations

from rlpipe.config.choice import Choice


class MtpObjective(Choice):
    """What a draft is trained to minimise."""

    HARD_CE = "hard_ce"  # cross-entropy against the realised token
    KL = "kl"  # KL(target || draft), the gradient of soft cross-entropy: Bebop's "CE"
    REVERSE_KL = "reverse_kl"  # KL(draft || target)
    TV = "tv"  # rejected mass, depth by depth
    E2E_TV = "e2e_tv"  # rejected share of a chain, overlaps multiplied: Bebop Eq. 13
    E2E_CHAIN = "e2e_chain"  # the same, exact for tokens sampled from the target
    E2E_BLOCK = "e2e_block"  # the same for block verification
    LK = "lk"  # KL where the overlap is small, TV where it is large
    VERIFY_STEPS = "verify_steps"  # exact expected verify steps per emitted token
    PPOW = "ppow"  # reinforcement learning on windows of its own drafts; settings: PpowConfig


SUPERVISED = [kind for kind in MtpObjective if kind is not MtpObjective.PPOW]  # teacher-forced ones


class AnchorWeighting(Choice):
    """How much each anchor (place where a verify step may start) counts."""

    UNIFORM = "uniform"  # every anchor alike
    VISIT = "visit"  # by the probability that a verify step starts there
