"""Batches of a run as files: what a rollout-only run leaves, and what a train-only run trains on.

    DUMP/dump.json              what made it: files of the model, sizes, settings of the trainer
    DUMP/step_000001.jsonl.gz   the groups of step 1, token by token (`saved_groups`)
    DUMP/step_000001.json       their prompts; and the trainer's metrics, once it had trained on them

Owns the format (docs/run_directory.md) and whether a dump fits a run. Flow: `Dump.create` -> write ->
trained; `Dump.open` -> check -> prompts, groups, metrics. A step appears complete or not at all: its groups
first, its .json last.
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

from rlpipe.config.paths import resolve
from rlpipe.config.renamed import current_name
from rlpipe.config.run import Config
from rlpipe.loop.saved_groups import read_groups, write_groups
from rlpipe.models.checkpoint import read_config
from rlpipe.types import Group, Prompt

FORMAT = 2
_READABLE = (1, 2)  # format 1 held the token columns as lists of numbers
ABOUT = "dump.json"
_TRAINER = ("algo", "trainer", "draft", "ppow")  # settings that its metrics depend on
_EDGE = 4 << 20  # bytes at either end of a model's file that its sum covers
_KEPT = 8  # steps whose files stay in memory


@dataclass(slots=True, kw_only=True)
class DumpedPrompt(Prompt):
    """A prompt that has been played. members: ids of those of its trajectories that are trained on."""

    members: list[str]

    def trajectory_ids(self, group_size: int) -> list[str]:
        """The recorded groups; there may be fewer than `group_size`."""
        return self.members


class Dump:
    """One folder; steps count from 1. Made by `create` or `open`."""

    def __init__(self, directory: Path, about: dict[str, Any]) -> None:
        self.directory, self.about = directory, about
        self._reading = threading.Lock()
        self._prompts = lru_cache(_KEPT)(self._read_prompts)
        self._groups = lru_cache(_KEPT)(self._read_groups)

    @classmethod
    def create(cls, directory: Path, config: Config, step: int) -> Dump:
        """Begin a dump, or go on with that of this run, behind `step`.

        Raises ValueError when the folder holds the dump of another run.
        """
        own = cls.check_new(directory, config)
        dump = cls(directory, own)
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / ABOUT, own)
        dump.forget_after(step)
        return dump

    @staticmethod
    def check_new(directory: Path, config: Config) -> dict[str, Any]:
        """What identifies the dump that this run would write. Writes nothing.

        Raises ValueError when the folder holds the dump of another run.
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
        """A dump that this run can train on.

        Raises ValueError when there is none, or it is of another model, tokenizer or size, or too short.
        """
        dump = cls(directory, _read(directory))
        _require_fit(dump, config)
        return dump

    def steps(self) -> int:
        """Steps without a gap from the first."""
        known = {int(file.stem.removeprefix("step_")) for file in self.directory.glob("step_*.json")}
        return next(n for n in range(len(known) + 1) if n + 1 not in known)

    def write(self, step: int, groups: Sequence[Group]) -> None:
        """The batch of a step. Raises OSError."""
        part = self._file(step, ".part")
        write_groups(part, enumerate(groups, (step - 1) * self.batch))
        part.replace(self._file(step, ".jsonl.gz"))
        prompts = [
            asdict(group.prompt) | {"members": [t.trajectory_id for t in group.trajectories]}
            for group in groups
        ]
        _write(self._file(step, ".json"), {"step": step, "prompts": prompts})

    def trained(self, step: int, metrics: dict[str, Any]) -> None:
        """What the trainer made of a step that was written. Raises OSError."""
        file = self._file(step, ".json")
        _write(file, json.loads(file.read_text()) | {"metrics": metrics})

    def forget_after(self, step: int) -> None:
        """Remove what a run that continues behind `step` will write again."""
        for file in self.directory.glob("step_*.*"):
            if int(file.name.split(".")[0].removeprefix("step_")) > step:
                file.unlink()

    @property
    def batch(self) -> int:
        """Groups of a step."""
        return self.about["prompts_per_step"]

    def prompt(self, index: int) -> DumpedPrompt:
        """Number `index` (0-based) in the order of training."""
        step, place = divmod(index, self.batch)
        return self._prompts(step + 1)[place]

    def group(self, index: int) -> Group:
        """The group of that prompt; thread-safe."""
        step, place = divmod(index, self.batch)
        with self._reading:
            return self._groups(step + 1)[place]

    def metrics(self, step: int) -> dict[str, Any] | None:
        """What the trainer made of a step; None when none trained on it."""
        return json.loads(self._file(step, ".json").read_text()).get("metrics")

    def settings_changed(self, config: Config) -> list[str]:
        """Settings of the trainer that differ from those of the run that made the dump."""
        now, then = _about(config)["trainer"], self.about["trainer"]
        return sorted(name for name in now.keys() | then.keys() if now.get(name) != then.get(name))

    def _file(self, step: int, suffix: str) -> Path:
        return self.directory / f"step_{step:06d}{suffix}"

    def _read_prompts(self, step: int) -> list[DumpedPrompt]:
        return [DumpedPrompt(**p) for p in json.loads(self._file(step, ".json").read_text())["prompts"]]

    def _read_groups(self, step: int) -> list[Group]:
        return [group for _, group in read_groups(self._file(step, ".jsonl.gz"))]


class DumpedPrompts:
    """The prompts of a dump in the place of a `PromptStream`."""

    def __init__(self, dump: Dump) -> None:
        self._dump = dump

    def __getitem__(self, index: int) -> Prompt:
        """The prompt that was trained on as number `index` (0-based)."""
        return self._dump.prompt(index)


def _about(config: Config) -> dict[str, Any]:
    """What dump.json tells of a run."""
    model = resolve(config.model.path)
    shown = {name: asdict(getattr(config, name)) for name in _TRAINER}
    settings = {f"{name}.{key}": value for name, fields in shown.items() for key, value in fields.items()}
    told = {
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
    return json.loads(json.dumps(told))


def _candidates(config: Config) -> int:
    """Logprobs that are kept beside each sampled token."""
    from rlpipe.algo.correction import top_logprobs

    return top_logprobs(config.algo, int(read_config(resolve(config.model.path))["vocab_size"]))


def _require_fit(dump: Dump, config: Config) -> None:
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

    if dump.about["candidates"] < own["candidates"]:
        raise ValueError(
            f"{where} holds {dump.about['candidates']} candidates beside each token, and "
            f"algo.correction={config.algo.correction} reads {own['candidates']}: make the dump with the "
            "same algo settings, or choose another algo.correction."
        )
    if (held := dump.steps()) < config.run.steps:
        raise ValueError(f"{where} holds {held} steps: set run.steps={held} or less, not {config.run.steps}.")


def edge_sum(file: Path) -> int:
    """CRC-32 of the first and the last 4 MiB: tells models apart at the cost of no long read."""
    with file.open("rb") as opened:
        start = zlib.crc32(opened.read(_EDGE))
        size = os.fstat(opened.fileno()).st_size
        opened.seek(max(min(_EDGE, size), size - _EDGE))
        return zlib.crc32(opened.read(), start)


def _read(directory: Path) -> dict[str, Any]:
    """dump.json of a folder. Raises ValueError."""
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

    # Settings of the trainer are compared by name, and an earlier version may have named them otherwise.
    about["trainer"] = {current_name(name): value for name, value in about.get("trainer", {}).items()}
    return about


def _write(file: Path, item: dict[str, Any]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(item, indent=1))
    part.replace(file)
