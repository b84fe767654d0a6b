"""Settings of windows that a draft model generates and learns from: PPOW, and the exact objectives.

`exact_window`, `exact_block` and `own_kl` read group_size, draft_cost, windows, hard_start, hard_end and
hard_after; the other fields belong to the loss and the reward of `ppow`, `ppow_exact` and `ppow_measured`.

The paper's Table 5, its hyperparameters, is empty in the text that is available. Each default is either from
its prose or rlpipe's choice; each field says which.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.config.limits import at_least, positive, share


@dataclass(slots=True, kw_only=True)
class PpowConfig:
    """Hyperparameters of windows (PPOW, arXiv 2605.14978), each of `draft.depths` drafts, the paper's K."""

    group_size: int = 8
    """Number of windows drafted from each prefix, G_roll. The default is rlpipe's."""

    clip: float = 0.2
    """epsilon_clip of the ratio, PPO's customary value. Windows are drafted anew for every update, so the
    ratio is 1 where the gradient is taken, and the clip never binds."""

    kl_coef: float = 0.02
    """beta, weight of KL(draft || target). The default is rlpipe's."""

    draft_cost: float = 0.0
    """Cost of a drafted token relative to a verify step, the paper's gamma. The paper takes the ratio of
    non-embedding parameters, and 0 means that ratio; for a measured speed-up, set the cost that the report
    measured. It changes the shape of the reward of `ppow`, which charges only accepted drafts; it only scales
    the rewards of `ppow_measured` and `exact_window`, which charge all drafts."""

    proximity: float = 0.1
    """eta, the reward of a window that is close to the target's although none of its tokens are accepted; 0
    turns R_dist off."""

    tolerance: float = 1.0
    """epsilon, the distance in nats that counts as close. The default is rlpipe's."""

    windows: int = 4
    """Number of windows sampled per trajectory and step. The default is rlpipe's."""

    hard_start: float = 0.3
    """Share of windows sampled by their score (ADAW) at the first step; the remaining ones are sampled
    evenly. The paper raises the share over training and does not give its range. Both shares 0: no ADAW."""

    hard_end: float = 0.8
    """The same share at the last step."""

    hard_after: int = 0
    """Number of updates of the draft with evenly sampled windows, before ADAW begins with hard_start. The
    paper switches after 44,000 (Fig. 4)."""

    expected_reward: bool = False
    """Reward a drafted window with the exact expectation over the coins of its verification, instead of one
    sample. Not in the paper."""

    def __post_init__(self) -> None:
        at_least(2, self, "ppow", "group_size", remedy="a window is compared with its siblings")
        at_least(1, self, "ppow", "windows")
        positive(self, "ppow", "clip", "tolerance")
        at_least(0, self, "ppow", "kl_coef", "draft_cost", "proximity", remedy="0 turns it off")
        at_least(0, self, "ppow", "hard_after", remedy="0 begins with ADAW")
        share(self, "ppow", "hard_start", "hard_end")
