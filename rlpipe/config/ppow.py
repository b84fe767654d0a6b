"""Settings of PPOW, window-level reinforcement learning for a drafter.

The paper's Table 5, its hyperparameters, is empty in the text that is available; what is set here is either
in the prose (said so) or our choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.config.limits import at_least, positive, share


@dataclass(slots=True, kw_only=True)
class PpowConfig:
    """Hyperparameters of PPOW (arXiv 2605.14978). A window is `draft.depths` drafts, the paper's K.

    group_size: windows drafted from each prefix, G_roll. Ours.
    clip: epsilon_clip of the ratio, PPO's customary value. Windows are drafted anew for every update, so the
        ratio is 1 where the gradient is taken, and the clip binds nowhere.
    kl_coef: beta, weight of KL(draft || target). Ours.
    draft_cost: what a drafted token costs against a verify step, the paper's gamma; it takes the ratio of
        non-embedding parameters, and 0 here means that.
    proximity: eta, what a window earns that is close to the target's though nothing of it is accepted; 0
        turns R_dist off. tolerance: epsilon, how close in nats. Ours.
    windows: drawn per trajectory and step. Ours.
    hard_start, hard_end: share of windows drawn by their score (ADAW), at the first step and at the last;
        the rest is drawn evenly. The paper raises it over training and does not say from where to where.
        Both 0: no ADAW.
    expected_reward: reward a drafted window with the expectation over the coins of its verification, exact,
        in place of one draw. Not in the paper.
    """

    group_size: int = 8
    clip: float = 0.2
    kl_coef: float = 0.02
    draft_cost: float = 0.0
    proximity: float = 0.1
    tolerance: float = 1.0
    windows: int = 4
    hard_start: float = 0.3
    hard_end: float = 0.8
    expected_reward: bool = False

    def __post_init__(self) -> None:
        at_least(2, self, "ppow", "group_size", remedy="a window is compared with its siblings")
        at_least(1, self, "ppow", "windows")
        positive(self, "ppow", "clip", "tolerance")
        at_least(0, self, "ppow", "kl_coef", "draft_cost", "proximity", remedy="0 turns it off")
        share(self, "ppow", "hard_start", "hard_end")
