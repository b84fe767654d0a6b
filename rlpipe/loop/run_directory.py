"""The directory of a run. One process at a time works in it, and a resumed run keeps its settings.

Owns the lock of the directory and the record of the run's settings. `config.yaml` is the current
configuration, and `configs/N.yaml` are the configurations of all starts.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import yaml

from rlpipe.config.renamed import with_current_names
from rlpipe.config.run import Resume, Task

CONFIG, HISTORY, LOCK = "config.yaml", "configs", "lock"

# Settings that do not change the experiment: its length, its location, and what it records.
_RUN = ("dir", "steps", "resume", "save_every", "save_async", "keep_last", "keep_best", "dump")
_ROLLOUT = ("workers", "concurrent_groups", "max_running", "device", "threads", "prefill_tokens", "sglang")
_TRAINER = ("tp", "dp", "layers", "recompute", "distributed_optimizer", "micro_batch_tokens", "threads")
_ADAPT = ("in_domain", "out_of_domain", "eval_modes", "eval_every", "eval_first", "eval_prompts")
_FREE: dict[str, tuple[str, ...] | None] = {
    "run": (*_RUN, "max_masked_share", "masked_window"),
    "rollout": _ROLLOUT,
    "trainer": _TRAINER,
    "env": ("threads", "sandbox", "step_timeout_s"),
    "adapt": (*_ADAPT, "eval_offset", "eval_samples"),
    "val": None,  # all of the section
    "metrics": None,
    "cluster": None,
}
# Settings of an RL run that do not change the distribution of its tokens, because verification is exact for
# any draft. They may change in a resumed run, and the log reports it.
_LOSSLESS = ("mode", "gamma", "adaptive", "tree", "suffix", "draft_vocab")
_SHAPES = ("trainer.lora.rank", "trainer.lora.targets")  # shapes of the tensors in a trainer's checkpoint
_SCHEDULES = ("trainer.lr_schedule", "draft.lr_schedule")  # all kinds except `constant` end with run.steps


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run directory within the context; create the directory if it does not exist.

    The kernel releases the lock when this process ends for any reason. Raises ValueError with the holder.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / LOCK).open("a+") as lock:
        _take(lock, run_dir)

        # For the message to a second process.
        lock.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}, lock)
        lock.flush()
        yield


def check_free(run_dir: Path) -> None:
    """Raise ValueError with the process id if a process works in a run directory. Writes no file."""
    with suppress(FileNotFoundError), (run_dir / LOCK).open() as lock:
        _take(lock, run_dir)


def _take(lock: IO[str], run_dir: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(_holder(run_dir)) from None


def settings_changed(run_dir: Path, resolved: str, *, step: int | None, resume: Resume) -> dict[str, str]:
    """Return the settings that differ from the run's earlier ones, as "old -> new" by name.

    resolved: the composed configuration as YAML. step: step of the checkpoint that the run continues from
    (None: the run begins, and the result is empty). Settings of lossless drafting may differ. Raises
    ValueError when the run would become a different experiment or its old settings are not recorded, unless
    run.resume=anyway; and always when the shape of its LoRA adapters would change.
    """
    if step is None:
        return {}

    begun = _recorded(run_dir)
    if not begun and resume is not Resume.ANYWAY:
        raise ValueError(
            f"run.dir={str(run_dir)!r} holds a run at step {step}, and neither {CONFIG} nor {HISTORY}/ there "
            "can be read, so it is not known whether the settings are the same: restore one, choose another "
            "run.dir, or set run.resume=anyway to continue with these settings."
        )
    new = _flat(resolved)
    changed = differences(begun, new)

    # Weights of another shape can never be loaded, for any run.resume.
    if shapes := {name: change for name, change in changed.items() if name in _SHAPES}:
        shown = "; ".join(f"{name}: {change}" for name, change in shapes.items())
        raise ValueError(
            f"run.dir={str(run_dir)!r} holds a run at step {step} with other LoRA adapters: {shown}. Its "
            "trainer's state does not match, so run.resume=anyway cannot continue it either. Use "
            "the original values, or start another run from its merged weights: model.path="
            f"{run_dir}/checkpoints/step_{step}/hf and another run.dir."
        )
    other = {name: change for name, change in changed.items() if not _is_lossless(name, new)}
    if other and resume is not Resume.ANYWAY:
        shown = "; ".join(f"{name}: {change}" for name, change in other.items())
        raise ValueError(
            f"run.dir={str(run_dir)!r} holds a run at step {step} with other settings: {shown}. Take those "
            "values again, choose another run.dir, or set run.resume=anyway to continue with the new ones."
        )

    return changed


def _is_lossless(name: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a setting changes the speed of decoding in an RL run, but not the distribution."""
    section, _, field = name.partition(".")
    drafting = name == "draft.depths" or (section == "spec" and field in _LOSSLESS)
    return drafting and settings.get("task", Task.RL) == Task.RL


def _recorded(run_dir: Path) -> dict[str, Any]:
    """Return the settings of the newest start with a readable file, by dotted name."""
    numbered = [path for path in (run_dir / HISTORY).glob("*.yaml") if path.stem.isdigit()]
    newest_first = sorted(numbered, key=lambda path: int(path.stem), reverse=True)
    for path in (run_dir / CONFIG, *newest_first):
        with suppress(OSError, UnicodeDecodeError):
            if settings := _flat(path.read_text()):
                return settings
    return {}


def keep_settings(run_dir: Path, resolved: str) -> None:
    """Write the current settings of the run; earlier settings remain in `configs/`."""
    (run_dir / CONFIG).write_text(resolved)

    history = run_dir / HISTORY
    history.mkdir(exist_ok=True)
    (history / f"{len(list(history.iterdir()))}.yaml").write_text(resolved)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that differ and change the experiment; absent settings have their defaults."""
    # The length of a run changes the experiment only through a learning-rate schedule.
    scheduled = any(new.get(name, "constant") != "constant" for name in _SCHEDULES)

    def free(name: str) -> bool:
        if name == "run.steps":
            return not scheduled

        section, _, rest = name.partition(".")
        names = _FREE.get(section, ())
        return names is None or rest.partition(".")[0] in names

    both = (name for name in old if name in new and old[name] != new[name])
    return {name: f"{old[name]} -> {new[name]}" for name in both if not free(name)}


def _flat(text: str) -> dict[str, Any]:
    """Return settings by dotted name; empty for a text that is not YAML."""

    def walk(prefix: str, value: object) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for key, part in value.items():
                yield from walk(f"{prefix}.{key}" if prefix else str(key), part)
        else:
            yield prefix, value

    try:
        settings = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}

    return dict(walk("", with_current_names(settings))) if isinstance(settings, dict) else {}


def _holder(run_dir: Path) -> str:
    """Return the message that names the process using the directory."""
    try:
        holder = json.loads((run_dir / LOCK).read_text())
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        who = f"process {holder['pid']} on {holder['host']} since {since}"
        remedy = f"to take over, stop it first (kill {holder['pid']} there lets it save a checkpoint)"
    except (OSError, ValueError, KeyError):
        who, remedy = "another process", "wait until it ends"
    return f"run.dir={str(run_dir)!r} is in use by {who}: choose another run.dir; {remedy}."
