"""The environment `function`: single-turn tasks from a data set and a reward function.

rows.py      reads the data set            signature.py  recognises forms of reward functions
examples.py  rows -> prompts, and checks   rewards.py    calls and weighs them
splits.py    train and held-out rows       ready.py      functions that come with rlpipe (code_tests.py)
suite.py     the environment itself        rehearsal.py  calls the rewards once before a run
"""
