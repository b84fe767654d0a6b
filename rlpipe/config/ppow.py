"""Settings of windows that a draft model generates and learns from: PPOW, and the exact objectives.

`exact_window`, `exact_block` and `own_kl` read only group_size, draft_cost, windows, hard_start, hard_end and
hard_after; the other fields belong to the loss and the reward of `ppow`, `ppow_exact` and `ppow_measured`.

In the available text of the paper, Table 5 (hyperparameters) is empty. So each default is either from the
paper's prose or rlpipe's choice; the field's documentation states which.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.config.limits import at_least, positive, share


@dataclass(slots=True, kw_only=True)
class PpowConfig:
    """Hyperparameters of windows (PPOW, arXiv 2605.14978). A window has `draft.depths` (K) draft tokens."""

    group_size: int = 8
    """G_roll, the number of windows drafted from each prefix. The default is rlpipe's."""

    clip: float = 0.2
    """epsilon_clip of the ratio; the default is PPO's usual value. Windows are drafted again for every
    update, so the ratio is 1 when the gradient is computed, and the clip has no effect."""

    kl_coef: float = 0.02
    """beta, the weight of KL(draft || target). The default is rlpipe's."""

    draft_cost: float = 0.0
    """Cost of a drafted token relative to a verify step, the paper's gamma. 0 means the ratio of
    non-embedding parameters, as in the paper. To train for measured speed-up, set the cost that the report
    measured. The reward of `ppow` charges only accepted drafts, so the cost changes its shape. The rewards of
    `ppow_measured` and `exact_window` charge all drafts, so the cost only scales them."""

    proximity: float = 0.1
    """eta, the reward of a window that is close to the target although none of its tokens is accepted; 0
    disables R_dist."""

    tolerance: float = 1.0
    """epsilon, the largest distance in nats that counts as close. The default is rlpipe's."""

    windows: int = 4
    """Number of windows sampled per trajectory and step. The default is rlpipe's."""

    hard_start: float = 0.3
    """Share of windows sampled by their score (ADAW) at the first step; the others are sampled uniformly. The
    paper raises the share during training, but does not state its range. If both shares are 0, ADAW is
    off."""

    hard_end: float = 0.8
    """Share of windows sampled by their score (ADAW) at the last step."""

    hard_after: int = 0
    """Number of updates of the draft with uniformly sampled windows, before ADAW begins with hard_start. The
    paper switches after 44,000 updates (Fig. 4)."""

    expected_reward: bool = False
    """Reward a drafted window with the exact expectation over verification coins, instead of one sample. This
    is not in the paper."""

    def __post_init__(self) -> None:
        at_least(2, self, "ppow", "group_size", remedy="a window is compared with its siblings")
        at_least(1, self, "ppow", "windows")
        positive(self, "ppow", "clip", "tolerance")
        at_least(0, self, "ppow", "kl_coef", "draft_cost", "proximity", remedy="0 turns it off")
        at_least(0, self, "ppow", "hard_after", remedy="0 begins with ADAW")
        share(self, "ppow", "hard_start", "hard_end")
