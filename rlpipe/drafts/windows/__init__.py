"""PPOW: reinforcement learning of a drafter on windows of drafts (arXiv 2605.14978).

    windows    which windows are worth training on: criticality, scores, ADAW with its curriculum
    reward     what a verified window earns: accepted tokens per cost, or closeness to the target
    totals     what a step reports

Pure functions over distributions and tokens. The loss is `rlpipe.drafts.objectives.ppow`.
"""
