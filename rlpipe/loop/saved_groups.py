"""Finished groups as a file: the part of a checkpoint with the contents of the buffer.

Owns the format: gzipped JSON lines, one object per group with its index in the run:

    {"index": n, "prompt": {...}, "trajectories": [...], "gen_seconds": s, "env_seconds": s}

Prompts and trajectories have the fields of `rlpipe.types` by name. JSON preserves every float exactly (Python
writes the shortest text that reads back as the same number), so a restored group equals the saved one. Arrays
(the token columns, routes) are {"shape", "dtype", "data"}, where data is base64 of their zlib-compressed
bytes. Lists, which an earlier version wrote for columns, can also be read.
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe.types import DraftStep, Group, Prompt, SpecCounts, Trajectory, TrajectoryStatus


def write_groups(path: Path, groups: Iterable[tuple[int, Group]]) -> None:
    """Write groups with their indices. Raises TypeError for metadata (`info`) that JSON cannot represent."""
    with gzip.open(path, "wt", compresslevel=1) as file:
        for index, group in groups:
            trajectories = [_fields(t) for t in group.trajectories]
            record = {"index": index, **_shallow(group), "prompt": asdict(group.prompt)}
            file.write(json.dumps(record | {"trajectories": trajectories}, separators=(",", ":")) + "\n")


def read_groups(path: Path) -> list[tuple[int, Group]]:
    """Read the groups that `write_groups` wrote."""
    with gzip.open(path, "rt") as file:
        return [_group(json.loads(line)) for line in file]


def _fields(trajectory: Trajectory) -> dict[str, Any]:
    drafts = trajectory.drafts
    nested = {"drafts": drafts and [_shallow(d) for d in drafts], "spec": _shallow(trajectory.spec)}

    record = _shallow(trajectory) | nested
    return {
        name: _encoded(value) if isinstance(value, np.ndarray) else value for name, value in record.items()
    }


def _encoded(array: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(zlib.compress(array.tobytes(), 1)).decode()
    return {"shape": array.shape, "dtype": array.dtype.str, "data": data}


def _decoded(record: dict[str, Any]) -> np.ndarray:
    flat = np.frombuffer(zlib.decompress(base64.b64decode(record["data"])), record["dtype"])
    return flat.reshape(record["shape"])


def _shallow(item: Any) -> dict[str, Any]:
    """Return a dict like `dataclasses.asdict`, but without copying every token."""
    return {own.name: getattr(item, own.name) for own in fields(item)}


def _group(record: dict[str, Any]) -> tuple[int, Group]:
    index = record.pop("index")
    prompt = Prompt(**record.pop("prompt"))
    trajectories = [_trajectory(fields) for fields in record.pop("trajectories")]
    return index, Group(prompt=prompt, trajectories=trajectories, **record)


def _trajectory(record: dict[str, Any]) -> Trajectory:
    """Return the trajectory of a JSON object."""
    # JSON has no tuples and no dataclasses.
    if record["top_logprobs"] is not None:
        record["top_logprobs"] = [[(token, p) for token, p in top] for top in record["top_logprobs"]]
    if record["drafts"] is not None:
        record["drafts"] = [DraftStep(**step) for step in record["drafts"]]

    # An earlier version wrote these columns as lists, which need no decoding.
    for name in (*Trajectory.COLUMNS, "routes"):
        if isinstance(record.get(name), dict):
            record[name] = _decoded(record[name])

    record["status"] = TrajectoryStatus(record["status"])
    record["spec"] = SpecCounts(**record["spec"])
    return Trajectory(**record)
