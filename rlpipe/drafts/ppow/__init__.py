"""PPOW: reinforcement learning of a drafter on windows of drafts (arXiv 2605.14978).

    windows    which windows are worth training on: criticality, scores, ADAW with its curriculum
    reward     what a verified window earns: accepted tokens per cost, or closeness to the target
    totals     what a step reports

Pure functions over distributions and tokens. The loss is `rlpipe.drafts.objectives.windows.ppow`.
"""

from rlpipe.drafts.ppow.reward import (
    acceptance_law,
    expected_reward,
    proximity_gap,
    proximity_reward,
    speedup_reward,
    window_reward,
)
from rlpipe.drafts.ppow.totals import PpowTotals, Total
from rlpipe.drafts.ppow.windows import (
    confidence,
    criticality,
    hard_share,
    sample_windows,
    window_law,
    window_scores,
)

__all__ = [
    "PpowTotals",
    "Total",
    "acceptance_law",
    "confidence",
    "criticality",
    "expected_reward",
    "hard_share",
    "proximity_gap",
    "proximity_reward",
    "sample_windows",
    "speedup_reward",
    "window_law",
    "window_reward",
    "window_scores",
]
