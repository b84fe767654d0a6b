"""The environment `function`: single-turn tasks from a data set and a reward function.

rows.py      reads the data set            signature.py  recognises forms of reward functions
examples.py  rows -> prompts, and checks   rewards.py    calls reward functions, adds weighted rewards
splits.py    train and held-out rows       ready.py      built-in reward functions (code_tests.py)
suite.py     the environment itself        rehearsal.py  calls the rewards once before a run
"""
