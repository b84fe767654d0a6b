"""Branches that share prefixes, at random and as in training."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from rlpipe.batching.micro_batch import Branch

DIM = 4


@st.composite
def forests(draw):
    """Branches, each of its own or following any place of an earlier one, through all that one follows."""
    branches: list[Branch] = []
    for _ in range(draw(st.integers(1, 6))):
        context: list[tuple[int, int]] = []
        if branches and draw(st.booleans()):
            parent = draw(st.integers(0, len(branches) - 1))
            count = draw(st.integers(1, branches[parent].length))
            context = [*branches[parent].context, (parent, count)]
        branches.append(Branch(length=draw(st.integers(1, 7)), context=context))
    return branches


def groups_of_answers():
    """Two prompts with eight answers each, of 1 to 60 tokens; some share the first tokens of the first."""
    lengths = torch.randint(1, 60, (14,), generator=torch.Generator().manual_seed(3)).tolist()
    branches: list[Branch] = []
    for first, prompt in ((0, 21), (8, 9)):
        branches.append(Branch(length=prompt + 30, context=[]))
        for k in range(7):
            context = [(first, prompt + (2 if k % 3 == 2 else 0))]
            branches.append(Branch(length=lengths.pop(), context=context))
    return branches
