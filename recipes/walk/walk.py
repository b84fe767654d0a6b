"""The environment without a server: a walk along a row of cells to a goal."""

from __future__ import annotations

import random
import re

CELLS = 4
STEPS = {"left": -1, "right": 1}


class Walk:
    """One walk. seed: decides where it starts and where the goal is."""

    def __init__(self, seed: int) -> None:
        self.at, self.goal = random.Random(seed).sample(range(CELLS), 2)
        self.steps = 0

    def show(self) -> str:
        """Return the row, with the way from the walker (A) to the goal (G), and the question.

        >>> print(Walk(2).show())
        A > > G
        Does A go left or right to reach G?
        """
        cells = ["."] * CELLS
        between = range(min(self.at, self.goal), max(self.at, self.goal))
        for cell in between:
            cells[cell] = "<" if self.goal < self.at else ">"
        cells[self.at], cells[self.goal] = "A", "G"
        return f"{' '.join(cells)}\nDoes A go {' or '.join(STEPS)} to reach G?"

    def step(self, move: str) -> tuple[float, bool]:
        """Take the last step named in a text; return its reward and whether the goal is reached.

        The goal earns 1; a step away from it or against a wall, or a text without a step, earns -0.1.
        """
        before, self.steps = abs(self.goal - self.at), self.steps + 1
        named = re.findall("|".join(STEPS), move.lower())
        by = STEPS[named[-1]] if named else 0
        self.at = min(max(self.at + by, 0), CELLS - 1)
        left = abs(self.goal - self.at)
        return (1.0 if left == 0 else 0.0 if left < before else -0.1), left == 0
