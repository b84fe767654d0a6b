"""A walk along a row of cells to a goal: the environment, without a server."""

from __future__ import annotations

import random

CELLS = 7
LEFT, RIGHT = "4", "6"  # as on a number pad: the shipped model writes digits, but not "left"


class Walk:
    """One walk. seed: decides where it starts and where the goal is."""

    def __init__(self, seed: int) -> None:
        self.at, self.goal = random.Random(seed).sample(range(CELLS), 2)
        self.steps = 0

    def show(self) -> str:
        """Return the row: A is where the walk is, G its goal.

        >>> Walk(0).show()
        '. . . G . . A'
        """
        cells = ["G" if cell == self.goal else "A" if cell == self.at else "." for cell in range(CELLS)]
        return " ".join(cells)

    def step(self, move: str) -> tuple[float, bool]:
        """Take a step; return its reward and whether the goal is reached.

        The goal earns 1; a step away from it, against a wall, or a text that is no step -0.1.
        """
        before, self.steps = abs(self.goal - self.at), self.steps + 1
        by = {LEFT: -1, RIGHT: 1}.get(move.strip(), 0)
        self.at = min(max(self.at + by, 0), CELLS - 1)
        left = abs(self.goal - self.at)
        return (1.0 if left == 0 else 0.0 if left < before else -0.1), left == 0
