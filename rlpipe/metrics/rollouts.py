"""Writes and reads RUN/rollouts/step_N.jsonl: a few trajectories of every step, token by token.

Owns the format (docs/run_directory.md): tokens with logprob, entropy, version and draft depth, the verify
steps, and the texts of the turns. Flow: `Trajectory` -> `rollout_record` -> file -> `read_rollouts` ->
analysis and viewer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rlpipe.metrics.jsonl import read_jsonl
from rlpipe.types import DraftStep, Group, Trajectory

FOLDER = "rollouts"
DIGITS = 4
_NOT_INFO = ("turns", "token_texts")


class Recorder:
    """Writes JSONL files; after the first disk error it emits one event and stops writing.

    A full disk must not end a run. event: called like `MetricsBus.event`.
    """

    def __init__(self, event: Callable[..., None]) -> None:
        self._event = event
        self._off = False

    def write(self, file: Path, items: Sequence[dict[str, Any]]) -> None:
        """Write one JSON object per line, completely or not at all."""
        if self._off:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)

            # The file gets its final name once it is complete, so that no reader sees an incomplete file.
            part = file.with_suffix(".part")
            lines = (json.dumps(item, separators=(",", ":"), default=str) + "\n" for item in items)
            part.write_text("".join(lines))
            part.replace(file)
        except OSError as error:
            self._off = True
            self._event("recording_off", file=str(file), error=str(error))


class RolloutFiles:
    """Writes `count` trajectories per step: the first attempt of each of the first `count` groups."""

    def __init__(self, run_dir: Path, count: int, recorder: Recorder) -> None:
        self._folder, self._count, self._recorder = run_dir / FOLDER, count, recorder

    def recorded(self, groups: Sequence[Group]) -> list[Trajectory]:
        """Return those trajectories of a step that `write` would record."""
        return [group.trajectories[0] for group in groups[: self._count] if group.trajectories]

    def write(self, step: int, groups: Sequence[Group], trainer_version: int) -> None:
        """Write the file of a step, completely or not at all; with `count` 0, write no file."""
        written = [group.trajectories for group in groups[: self._count] if group.trajectories]
        if written:
            lines = [
                rollout_record(first, step, trainer_version) | {"siblings": [t.reward for t in others]}
                for first, *others in written
            ]
            self._recorder.write(step_file(self._folder, step), lines)

    def remove_after(self, step: int) -> None:
        """Remove the files that a run resumed after `step` will write again."""
        remove_steps_after(self._folder, step)


def rollout_record(trajectory: Trajectory, step: int, trainer_version: int) -> dict[str, Any]:
    """Return a trajectory as one JSON object; see docs/run_directory.md."""
    t = trajectory
    return {
        "step": step,
        "trajectory_id": t.trajectory_id,
        "group_id": t.group_id,
        "prompt_id": t.instance_id,
        "status": str(t.status),
        "reward": t.reward,
        "trainer_version": trainer_version,
        "policy_versions": [[version, len(list(run))] for version, run in groupby(t.versions.tolist())],
        "prompt_length": t.prompt_length,
        "tokens": t.token_ids.tolist(),
        "token_texts": t.info.get("token_texts"),
        "rollout_logprobs": _rounded(t.rollout_logprobs.tolist()),
        "entropies": _rounded(t.entropies.tolist()),
        "accepted": None if t.drafts is None else accepted_depths(t.loss_mask.tolist(), t.drafts),
        "drafts": None if t.drafts is None else [_draft(d) for d in t.drafts],
        "spec": {
            "drafted": t.spec.drafted,
            "accepted": t.spec.accepted,
            "verify_steps": t.spec.verify_steps,
            "proposed": t.spec.proposed,
        },
        "turns": turn_pieces(t),
        "info": {key: value for key, value in t.info.items() if key not in _NOT_INFO},
    }


def accepted_depths(loss_mask: Sequence[int], drafts: Sequence[DraftStep]) -> list[int]:
    """Return for each token its depth as an accepted draft, 0 if the target sampled it, -1 if not sampled.

    >>> step = DraftStep(position=2, tokens=[7, 8], target_probs=[1, 1], draft_probs=[1, 1], num_accepted=1)
    >>> accepted_depths([0, 1, 1, 1], [step])
    [-1, 0, 1, 0]
    """
    depths = [0 if sampled else -1 for sampled in loss_mask]

    for step in drafts:
        for depth, position in enumerate(range(step.position, step.position + step.num_accepted), 1):
            # Drafts after a stop token were accepted but not emitted.
            if position < len(depths) and loss_mask[position]:
                depths[position] = depth
            else:
                break

    return depths


def turn_pieces(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return role, text and token span of every message, in order.

    Messages that the model read at once have one span. A message of the assistant has one only if it was
    sampled as part of the trajectory, so such a span always holds sampled tokens.
    """
    # Consecutive tokens with equal mask values form one span (1: sampled, 0: prompt or observation).
    spans, start = [], 0
    for sampled, run in groupby(trajectory.loss_mask.tolist()):
        length = len(list(run))
        spans.append((sampled, [start, start + length]))
        start += length

    contexts = iter([span for sampled, span in spans if not sampled])
    actions = iter([span for sampled, span in spans if sampled])

    messages: list[dict[str, Any]] = []
    for has_role, run in groupby(trajectory.info.get("turns", []), key=lambda turn: "role" in turn):
        if has_role:
            span = next(contexts, None)
            messages += [
                _message(turn["role"], turn["text"], None if turn["role"] == "assistant" else span)
                for turn in run
            ]
            continue

        for turn in run:
            messages.append(_message("assistant", turn["action"], next(actions, None)))
            if "observation" not in turn:
                continue

            # The answer that ends an episode is followed by neither text nor tokens.
            span = next(contexts, None)
            if turn["observation"] or span is not None:
                messages.append(_message("tool", turn["observation"], span))

    return messages


def read_rollouts(run_dir: Path, last: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of all steps in order, or of the `last` steps; skip lines truncated by a crash."""
    files = step_files(run_dir / FOLDER)
    for _, file in files if last is None else files[max(0, len(files) - last) :]:
        yield from read_jsonl(file)[0]


def step_file(folder: Path, step: int) -> Path:
    """Return the path of a step's file."""
    return folder / f"step_{step:06d}.jsonl"


def step_files(folder: Path) -> list[tuple[int, Path]]:
    """Return the (step, file) pairs of a folder, ascending."""
    named = ((re.fullmatch(r"step_(\d+)\.jsonl", file.name), file) for file in folder.glob("step_*.jsonl"))
    return sorted((int(match[1]), file) for match, file in named if match)


def remove_steps_after(folder: Path, step: int) -> None:
    """Remove the files of later steps."""
    for number, file in step_files(folder):
        if number > step:
            file.unlink()


def _message(role: str, text: str, span: list[int] | None) -> dict[str, Any]:
    return {"role": role, "text": text, "span": span}


def _draft(step: DraftStep) -> list[Any]:
    return [
        step.position,
        step.num_accepted,
        step.tokens,
        _rounded(step.target_probs),
        _rounded(step.draft_probs),
    ]


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(x, DIGITS) for x in values]
