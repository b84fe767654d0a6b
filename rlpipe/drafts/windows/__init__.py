"""PPOW: reinforcement learning of a drafter on windows of drafts (arXiv 2605.14978).

    selection  windows worth training on: criticality, scores, ADAW with its curriculum
    training   a step: sample windows, draft, verify
    rollout    data of a step, and the Protocol of a drafter
    eagle3     the passes of an EAGLE-3 draft
    reward     reward of a verified window: accepted tokens per cost, or closeness to the target
    totals     sums and metrics of a step

Pure functions over distributions and tokens. The loss is `rlpipe.drafts.objectives.ppow`.
"""
