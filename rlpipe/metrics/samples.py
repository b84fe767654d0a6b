"""One answer of the model from each held-out set, for display. Imports no torch.

Owns the fields of the event `sample`. The instance is always the first of its set, so that the model's
answers before and after training can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TypedDict

from rlpipe.types import Trajectory, TrajectoryStatus

_MAX_CHARACTERS = 600  # limit for the prompt, and also for the answer


class Sample(TypedDict):
    """One answer of a held-out set.

    split: held-out set. prompt: last message of the user before the model's first turn. answer: model's last
    turn. reward: attempt's reward.
    """

    split: str
    prompt: str
    answer: str
    reward: float


def first_sample(split: str, trajectories: Sequence[Trajectory]) -> Sample | None:
    """Return the first finished attempt of a held-out set that has texts; None if there is none."""
    for trajectory in trajectories:
        turns = trajectory.info.get("turns", [])
        opening = takewhile(lambda turn: "action" not in turn, turns)
        prompts = [turn["text"] for turn in opening if turn.get("role") == "user"]
        answers = [turn["action"] for turn in turns if "action" in turn]
        if trajectory.status is TrajectoryStatus.COMPLETE and trajectory.reward is not None and answers:
            return Sample(
                split=split,
                prompt=prompts[-1][:_MAX_CHARACTERS] if prompts else "",
                answer=answers[-1][:_MAX_CHARACTERS],
                reward=float(trajectory.reward),
            )
    return None
