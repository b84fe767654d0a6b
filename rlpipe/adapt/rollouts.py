"""Rollouts of the adapted model, sampled once and stored as JSONL.

Owns the file. Its first line describes the rollouts (backbone, environment, sampling); a file with another
description is refused. Every other line is a trajectory:

    index           number of its prompt in the run's prompt stream; lines may be in any order of prompts
    trajectory_id, group_id, instance_id, status, reward, truncated, prompt_length, num_turns
    token_ids       all its tokens in order
    loss_mask       1 for tokens that the model sampled
    rollout_logprobs, entropies    of the sampled tokens, in order, nats

The lines of one prompt are appended with one write; a prompt with incomplete lines, after a crash, is run
again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.adapt.generation import OnEvent, collect
from rlpipe.batching.packing import trainable
from rlpipe.config.paths import resolve_model
from rlpipe.config.run import Config
from rlpipe.config.spec import SpecMode
from rlpipe.envs.base import Suite
from rlpipe.loop.prompts import PromptStream
from rlpipe.metrics.jsonl import read_jsonl
from rlpipe.models.checkpoint import is_mtp_weight, read_config, read_name
from rlpipe.types import Group, Trajectory, TrajectoryStatus

PLAIN = ("trajectory_id", "group_id", "instance_id", "reward", "truncated", "prompt_length", "num_turns")
SAMPLED = ("rollout_logprobs", "entropies")


def complete_rollouts(
    config: Config, suite: Suite, file: Path, *, stopped: Callable[[], bool], on_event: OnEvent
) -> list[Trajectory]:
    """Generate the rollouts that are missing in `file`, and return all that can be trained on.

    Returns:
        Trainable trajectories of the first `adapt.prompts` prompts, in prompt order. After a stop some are
        missing, and the caller must not train on the result.

    Raises:
        ValueError: if the file has rollouts of another model, environment or sampling.
    """
    wanted = range(config.adapt.prompts)
    stream = PromptStream(suite.instance_ids("train"), seed=config.run.seed)
    groups = _Groups(file, origin(config), config.adapt.samples)
    missing = {stream[index].group_id: index for index in wanted if index not in groups.by_index}
    prompts = [stream[index] for index in missing.values()]
    if prompts:

        def store(group: Group) -> None:
            groups.add(missing[group.prompt.group_id], group)

        # Verification is lossless, so drafts change only the speed, and an untrained draft makes it slower.
        plain = replace(config, spec=replace(config.spec, mode=SpecMode.NONE, adaptive=False))
        collect(plain, suite, prompts, on_group=store, stopped=stopped, on_event=on_event)

    in_order = (t for index in wanted for t in groups.by_index.get(index, []))
    return [trajectory for trajectory in in_order if trainable(trajectory)]


def origin(config: Config) -> dict[str, Any]:
    """Return, as JSON data by setting, all that a rollout depends on except the index of its prompt.

    It does not include the draft, because verification is lossless, nor the engine, nor the code of a user's
    suite.
    """
    # Exclude the environment's held-out sets, and settings that only change how its commands are run.
    env = asdict(config.env)
    sections = {"reasoning", "tools", "gymnasium", "textarena", "verifiers", "openenv", "function"}
    unused = {"held_out_files", "threads", "retries", "step_timeout_s"} | (sections - {config.env.name.value})
    del env["function"]["model"]  # it is a path; a hash of the weights is recorded below

    decides = {"rollouts_of": backbone_digest(resolve_model(config.model.path))}
    decides |= {f"env.{name}": value for name, value in env.items() if name not in unused}
    decides |= {"run.seed": config.run.seed, "adapt.samples": config.adapt.samples}
    sampling = ("temperature", "max_context", "max_new_tokens", "ignore_eos")
    decides |= {f"rollout.{name}": getattr(config.rollout, name) for name in sampling}
    return json.loads(json.dumps(decides))


def backbone_digest(path: Path) -> str:
    """Hash the norms and biases of the backbone: this is cheap, and they differ after any training."""
    from safetensors import safe_open

    digest, config = hashlib.blake2b(digest_size=8), read_config(path)
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                hf_name = read_name(name, config)
                is_vector = len(tensors.get_slice(name).get_shape()) == 1
                if hf_name and not is_mtp_weight(hf_name) and is_vector:
                    values = tensors.get_tensor(name).float().numpy()
                    digest.update(name.encode() + values.tobytes())
    return digest.hexdigest()


class _Groups:
    """The file, which is read once and then appended to. by_index: complete groups."""

    def __init__(self, file: Path, source: dict[str, Any], samples: int) -> None:
        self.by_index: dict[int, list[Trajectory]] = {}
        self._file = file
        lines, _ = read_jsonl(file)  # a line that a crash cut off is omitted
        if not lines:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(source) + "\n")
            return

        _check_origin(file, lines[0], source)

        for line in lines[1:]:
            self.by_index.setdefault(line["index"], []).append(read(line))
        self.by_index = {i: group for i, group in self.by_index.items() if len(group) == samples}

        # Remove lines of incomplete groups, because these groups are generated again.
        complete = [line for line in lines[1:] if line["index"] in self.by_index]
        if len(complete) < len(lines) - 1 or not file.read_bytes().endswith(b"\n"):
            file.write_text(_lines([source, *complete]))

    def add(self, index: int, group: Group) -> None:
        """Store a finished group in the form in which a later run would read it."""
        lines = [write(index, trajectory) for trajectory in group.trajectories]
        with self._file.open("a") as file:
            file.write(_lines(lines))
        self.by_index[index] = [read(line) for line in lines]


def _check_origin(file: Path, recorded: dict[str, Any], source: dict[str, Any]) -> None:
    """Raise ValueError for rollouts with another origin than `source`, or without a known origin."""
    elsewhere = "set adapt.rollouts or run.dir to another path, or delete the file."
    if unknown := [name for name in source if name not in recorded]:
        raise ValueError(
            f"{file} was written by an earlier version, which did not record {', '.join(unknown)}: "
            f"{elsewhere} If its rollouts are of the present settings, replace its first line by:\n"
            f"{json.dumps(source)}"
        )

    if differs := [name for name in source if recorded[name] != source[name]]:
        raise ValueError(f"{file} holds other rollouts ({', '.join(differs)} differ): {elsewhere}")


def write(index: int, trajectory: Trajectory) -> dict[str, Any]:
    """Return the JSON object for a trajectory's line in the file."""
    line = {"index": index, **{name: getattr(trajectory, name) for name in PLAIN}}
    line |= {"status": trajectory.status.value, "token_ids": trajectory.token_ids.tolist()}
    line |= {"loss_mask": trajectory.loss_mask.astype(int).tolist()}
    for name in SAMPLED:
        line[name] = [round(value, 6) for value in getattr(trajectory, name)[trajectory.loss_mask].tolist()]
    return line


def read(line: dict[str, Any]) -> Trajectory:
    """Return the trajectory of a line; versions, counts and the environment's metadata are not stored."""
    mask = np.array(line["loss_mask"], np.bool_)
    columns: dict[str, Any] = {name: np.zeros(len(mask), np.float32) for name in SAMPLED}
    for name, values in columns.items():
        values[mask] = line[name]
    return Trajectory(
        **{name: line[name] for name in PLAIN},
        **columns,
        status=TrajectoryStatus(line["status"]),
        token_ids=line["token_ids"],
        loss_mask=mask,
        versions=np.where(mask, 0, -1),
    )


def _lines(items: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(item) + "\n" for item in items)
