"""Batches of a run as files, which a rollout-only run writes and a train-only run reads.

    DUMP/dump.json              its origin: files of the model, sizes, settings of the trainer
    DUMP/step_000001.jsonl.gz   the groups of step 1, token by token (`saved_groups`)
    DUMP/step_000001.json       their prompts and, after training on them, the trainer's metrics

Owns the format (docs/run_directory.md) and the check that a dump fits a run. Flow: `Dump.create` -> write ->
trained; `Dump.open` -> check -> prompts, groups, metrics. A step is complete or does not count: its groups
are written first, its .json last.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlpipe.config.paths import resolve, resolve_model
from rlpipe.config.renamed import current_name
from rlpipe.config.run import Config
from rlpipe.loop.saved_groups import read_groups, write_groups
from rlpipe.models.checkpoint import read_config
from rlpipe.types import Group, Prompt

FORMAT = 2
_READABLE = (1, 2)  # format 1 stored the token columns as lists of numbers
ABOUT = "dump.json"
_TRAINER = ("algo", "trainer", "draft", "ppow")  # settings that the trainer's metrics depend on
_EDGE = 4 << 20  # bytes at each end of a model's file that its checksum covers
_KEPT = 8  # number of steps that stay in memory


@dataclass(slots=True, kw_only=True)
class DumpedPrompt(Prompt):
    """A prompt that has been rolled out. members: ids of those trajectories that are trained on."""

    members: list[str]

    def trajectory_ids(self, group_size: int) -> list[str]:
        """Return the ids of the recorded trajectories; there may be fewer than `group_size`."""
        return self.members


class Dump:
    """One folder of a dump; steps count from 1. Use `create` or `open` to make it."""

    def __init__(self, directory: Path, about: dict[str, Any]) -> None:
        self.directory, self.about = directory, about
        self._reading = threading.Lock()
        self._prompts = lru_cache(_KEPT)(self._read_prompts)
        self._groups = lru_cache(_KEPT)(self._read_groups)

    @classmethod
    def create(cls, directory: Path, config: Config, step: int) -> Dump:
        """Begin a dump, or continue this run's dump after `step`.

        Raises ValueError when the folder has the dump of another run.
        """
        own = cls.check_new(directory, config)

        dump = cls(directory, own)
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / ABOUT, own)

        dump.remove_after(step)
        return dump

    @staticmethod
    def check_new(directory: Path, config: Config) -> dict[str, Any]:
        """Return the metadata of the dump that this run would write, without writing a file.

        Raises ValueError when the folder has the dump of another run.
        """
        made_by = _about(config)
        if (directory / ABOUT).exists():
            recorded = _read(directory)
            differing = [key for key in made_by if key != "trainer" and recorded.get(key) != made_by[key]]
            if differing:
                raise ValueError(
                    f"run.dump={str(directory)!r} holds the dump of another run (it differs in "
                    f"{', '.join(differing)}): name another folder, or remove that one."
                )

        return made_by

    @classmethod
    def open(cls, directory: Path, config: Config) -> Dump:
        """Return a dump that this run can train on.

        Raises ValueError when there is no dump, when its model, tokenizer or sizes differ, or when it is too
        short.
        """
        dump = cls(directory, _read(directory))
        _require_fit(dump, config)
        return dump

    def steps(self) -> int:
        """Return the number of steps without a gap, counted from the first."""
        known = {int(file.stem.removeprefix("step_")) for file in self.directory.glob("step_*.json")}
        return next(n for n in range(len(known) + 1) if n + 1 not in known)

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """Write the batch of a step. Raises OSError."""
        # Write the groups first and the .json last: a step without its .json does not count.
        part = self._file(step, ".part")
        write_groups(part, enumerate(groups, (step - 1) * self.batch))
        part.replace(self._file(step, ".jsonl.gz"))

        prompts = [
            asdict(group.prompt) | {"members": [t.trajectory_id for t in group.trajectories]}
            for group in groups
        ]
        _write(self._file(step, ".json"), {"step": step, "prompts": prompts})

    def trained(self, step: int, metrics: dict[str, Any]) -> None:
        """Add the trainer's metrics to a step that was written. Raises OSError."""
        file = self._file(step, ".json")
        _write(file, json.loads(file.read_text()) | {"metrics": metrics})

    def remove_after(self, step: int) -> None:
        """Remove the files that a run which continues after `step` will write again."""
        for file in self.directory.glob("step_*.*"):
            if int(file.name.split(".")[0].removeprefix("step_")) > step:
                file.unlink()

    @property
    def batch(self) -> int:
        """Number of groups in a step."""
        return self.about["prompts_per_step"]

    def prompt(self, index: int) -> DumpedPrompt:
        """Return the prompt with number `index` (0-based) in the order of training."""
        step, place = divmod(index, self.batch)
        return self._prompts(step + 1)[place]

    def group(self, index: int) -> Group:
        """Return the group of that prompt; thread-safe."""
        step, place = divmod(index, self.batch)
        with self._reading:
            return self._groups(step + 1)[place]

    def metrics(self, step: int) -> dict[str, Any] | None:
        """Return the trainer's metrics of a step; None if it has not been trained on."""
        return json.loads(self._file(step, ".json").read_text()).get("metrics")

    def settings_changed(self, config: Config) -> list[str]:
        """Return the settings of the trainer that differ from the settings recorded in the dump."""
        now, then = _about(config)["trainer"], self.about["trainer"]
        return sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))

    def _file(self, step: int, suffix: str) -> Path:
        return self.directory / f"step_{step:06d}{suffix}"

    def _read_prompts(self, step: int) -> list[DumpedPrompt]:
        return [DumpedPrompt(**p) for p in json.loads(self._file(step, ".json").read_text())["prompts"]]

    def _read_groups(self, step: int) -> list[Group]:
        return [group for _, group in read_groups(self._file(step, ".jsonl.gz"))]


class DumpedPrompts:
    """The prompts of a dump, with the interface of a `PromptStream`."""

    def __init__(self, dump: Dump) -> None:
        self._dump = dump

    def __getitem__(self, index: int) -> Prompt:
        """Return the prompt with number `index` (0-based) in the order of training."""
        return self._dump.prompt(index)


def _about(config: Config) -> dict[str, Any]:
    """Return the content of dump.json for a run."""
    model = resolve_model(config.model.path)
    shown = {name: asdict(getattr(config, name)) for name in _TRAINER}
    settings = {f"{name}.{key}": value for name, fields in shown.items() for key, value in fields.items()}
    description = {
        "format": FORMAT,
        "run": str(resolve(config.run.dir)),
        "half": config.run.half,
        "tokenizer": {file.name: edge_sum(file) for file in sorted(model.glob("tokenizer*"))},
        "model": {f.name: edge_sum(f) for f in sorted([model / "config.json", *model.glob("*.safetensors")])},
        "prompts_per_step": config.pipeline.prompts_per_step,
        "group_size": config.pipeline.group_size,
        "temperature": config.rollout.temperature,
        "candidates": _candidates(config),
        "trainer": settings | {"run.seed": config.run.seed, "run.steps": config.run.steps},
    }
    # Convert as JSON does (tuples to lists), for comparison with a recorded description.
    return json.loads(json.dumps(description))


def _candidates(config: Config) -> int:
    """Return the number of logprobs stored with each sampled token."""
    from rlpipe.algo.correction import top_logprobs

    return top_logprobs(config.algo, int(read_config(resolve_model(config.model.path))["vocab_size"]))


def _require_fit(dump: Dump, config: Config) -> None:
    """Refuse a dump of another model, tokenizer or batch layout. Raises ValueError."""
    # With other files of the model or tokenizer, the tokens or logprobs would have another meaning.
    where, own = f"run.dump={str(dump.directory)!r}", _about(config)
    for what, meaning in (
        ("tokenizer", "its token ids mean other texts"),
        ("model", "its logprobs are another policy's"),
    ):
        then, now = dump.about[what], own[what]
        files = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
        if files:
            raise ValueError(
                f"{where} was made with another {what} than model.path={config.model.path!r} "
                f"({', '.join(files)}): {meaning}. Use the model it was made with."
            )

    # With other sizes, batches and temperatures would not match.
    for key, setting in (
        ("group_size", "pipeline.group_size"),
        ("prompts_per_step", "pipeline.prompts_per_step"),
        ("temperature", "rollout.temperature"),
    ):
        if dump.about[key] != own[key]:
            raise ValueError(
                f"{where} was made with {setting}={dump.about[key]}, and this run has {own[key]}: "
                f"set {setting}={dump.about[key]}."
            )

    # The dump must contain as many logprobs per token as the correction reads.
    if dump.about["candidates"] < own["candidates"]:
        raise ValueError(
            f"{where} holds {dump.about['candidates']} candidates for each token, and "
            f"algo.correction={config.algo.correction} reads {own['candidates']}: make the dump with the "
            "same algo settings, or choose another algo.correction."
        )

    if (held := dump.steps()) < config.run.steps:
        raise ValueError(f"{where} holds {held} steps: set run.steps={held} or less, not {config.run.steps}.")


def edge_sum(file: Path) -> int:
    """Return the CRC-32 of the first and the last 4 MiB, which distinguishes models without a long read."""
    with file.open("rb") as opened:
        start = zlib.crc32(opened.read(_EDGE))
        size = os.fstat(opened.fileno()).st_size

        # The two edges of a short file must not overlap.
        opened.seek(max(min(_EDGE, size), size - _EDGE))
        return zlib.crc32(opened.read(), start)


def _read(directory: Path) -> dict[str, Any]:
    """Read dump.json of a folder. Raises ValueError."""
    try:
        about = json.loads((directory / ABOUT).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"run.dump={str(directory)!r} holds no dump ({ABOUT}: {type(error).__name__}). Name the folder "
            "that a run with run.half=rollout or run.dump=FOLDER wrote."
        ) from error

    if about.get("format") not in _READABLE:
        raise ValueError(
            f"run.dump={str(directory)!r} has format {about.get('format')}, this version reads "
            f"{' and '.join(map(str, _READABLE))}: "
            "train on it with the version that made it."
        )

    # Settings are compared by name, and an earlier version may have used other names.
    about["trainer"] = {current_name(name): value for name, value in about.get("trainer", {}).items()}
    return about


def _write(file: Path, item: dict[str, Any]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(item, indent=1))
    part.replace(file)
