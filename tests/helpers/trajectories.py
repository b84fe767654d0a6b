"""Made-up trajectories and groups: random tokens, known rewards."""

from __future__ import annotations

import numpy as np

from rlpipe.types import FinishReason, GenerateResult, Group, Prompt, SpecCounts, Trajectory


def make_trajectory(
    rng: np.random.Generator,
    *,
    name: str = "t",
    vocab: int = 64,
    prompt: int = 5,
    turns: tuple[int, ...] = (6,),
    tool: int = 3,
    reward: float | None = 0.0,
) -> Trajectory:
    """A prompt, then turns of sampled tokens with `tool` context tokens after each."""
    trajectory = Trajectory(
        trajectory_id=name, group_id="g", instance_id="i", reward=reward, prompt_length=prompt
    )
    trajectory.append_context(rng.integers(0, vocab, prompt).tolist())
    for size in turns:
        trajectory.append_sampled(
            GenerateResult(
                request_id=name,
                output_ids=rng.integers(0, vocab, size).tolist(),
                logprobs=(-rng.uniform(3.5, 4.5, size)).tolist(),
                entropies=[3.0] * size,
                versions=[0] * size,
                finish_reason=FinishReason.STOP,
                spec=SpecCounts(),
            )
        )
        trajectory.append_context(rng.integers(0, vocab, tool).tolist())
    return trajectory


def make_groups(
    seed: int = 0,
    groups: int = 2,
    siblings: int = 4,
    vocab: int = 64,
    longest: int = 12,
    common: int = 0,
) -> list[Group]:
    """Groups of two-turn trajectories with rewards 0 and 1, at least one of each in a group.

    common: length of the prompt all siblings of a group share (0: each has a prompt of its own). With one,
    the second sibling also starts with the first turn of the first, and the last repeats all of it.
    """
    rng = np.random.default_rng(seed)
    made = []
    for g in range(groups):
        trajectories = [
            make_trajectory(
                rng,
                name=f"g{g}t{i}",
                vocab=vocab,
                prompt=common or int(rng.integers(2, 6)),
                turns=tuple(rng.integers(1, longest, 2).tolist()),
                reward=float(i % 2 if i < 2 else rng.integers(0, 2)),
            )
            for i in range(siblings)
        ]
        if common:
            first, second, *others, last = trajectories
            for t in others:
                _start_like(first, t, tokens=common, instead_of=common)
            _start_like(first, second, tokens=common + _first_turn(first), instead_of=common)
            _start_like(first, last, tokens=len(first.token_ids), instead_of=len(last.token_ids))
        made.append(Group(prompt=Prompt(instance_id=f"i{g}", group_id=f"g{g}"), trajectories=trajectories))
    return made


def _start_like(leader: Trajectory, t: Trajectory, *, tokens: int, instead_of: int) -> None:
    """Replace the start of a trajectory by that of another."""
    for name in Trajectory.COLUMNS:
        setattr(t, name, np.concatenate((getattr(leader, name)[:tokens], getattr(t, name)[instead_of:])))


def _first_turn(trajectory: Trajectory) -> int:
    """Tokens from the end of the prompt to the end of the first tool output."""
    sampled = trajectory.loss_mask[trajectory.prompt_length :].tolist()
    command = sampled.index(0)
    return command + sampled[command:].index(1)
