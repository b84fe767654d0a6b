"""`rlpipe export RUN OUT [--step N] [--without-mtp]`: copies a checkpoint to a Hugging Face directory.

The checkpoints of a run contain a Hugging Face copy of the weights (`checkpoints/step_N/hf`), with LoRA
adapters merged. This command verifies the checkpoint and copies that folder. OUT is either complete or
absent.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rlpipe.loop.checkpoints import CheckpointStore
from rlpipe.models.checkpoint import (
    DRAFT_VOCAB,
    has_mtp,
    is_mtp_weight,
    read_config,
    read_weights,
    write_checkpoint,
)


def export(run_dir: Path, out: Path, *, step: int | None = None, mtp: bool = True) -> Path:
    """Copy the Hugging Face files of a checkpoint to a new directory.

    Args:
        run_dir: directory of a run.
        out: directory to create; it must not exist.
        step: step of the checkpoint; None for the newest.
        mtp: keep the MTP layer. Programs that do not support the layer may reject the checkpoint.

    Returns:
        The checkpoint that was copied.

    Raises:
        ValueError: the checkpoint does not exist, is damaged, or has no Hugging Face files; `mtp` is False
            and it has no MTP layer; or `out` exists.
    """
    checkpoint = checkpoint_of(run_dir, step)
    if out.exists():
        raise ValueError(f"OUT={str(out)!r} exists: name a new directory.")
    if not (checkpoint / "hf" / "config.json").is_file():
        raise ValueError(f"{checkpoint} has no folder `hf`: only checkpoints of a trainer can be exported.")

    if not mtp and not has_mtp(read_config(checkpoint / "hf")):
        raise ValueError(f"{checkpoint} has no MTP layer to leave out: export it without --without-mtp.")

    # Copy to another name and then rename, so that OUT is either complete or absent.
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(checkpoint / "hf", partial)
    if not mtp:
        _remove_mtp(partial)
    partial.rename(out)
    return checkpoint


def _remove_mtp(folder: Path) -> None:
    """Remove the MTP layers from a Hugging Face directory, in both weights and config.json."""
    backbone = {name: w for name, w in read_weights(folder).items() if not is_mtp_weight(name)}
    write_checkpoint(folder, backbone, like=folder)
    (folder / DRAFT_VOCAB).unlink(missing_ok=True)

    # The key for the number of layers depends on the family; in some families it is in `text_config`.
    config = json.loads((folder / "config.json").read_text())
    for settings in (config, config.get("text_config") or {}):
        for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
            settings.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def checkpoint_of(run_dir: Path, step: int | None) -> Path:
    """Return the directory of a complete checkpoint. step: None for the newest. Raises ValueError."""
    store = CheckpointStore(run_dir / "checkpoints", keep=1)
    steps = store.steps()
    if not steps:
        raise ValueError(f"{run_dir} has no checkpoint: name the directory of a run (run.dir).")

    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise ValueError(
            f"{run_dir} has no checkpoint of step {chosen}: choose --step from {', '.join(map(str, steps))}."
        )
    if fault := store.fault(chosen):
        raise ValueError(f"the checkpoint of step {chosen} is damaged ({fault}): choose another --step.")

    return store.path(chosen)


def main(arguments: Sequence[str] | None = None) -> int:
    """Export a checkpoint and print its path; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="rlpipe export", description="Write a checkpoint of a run as a Hugging Face directory."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to create")
    parser.add_argument("--step", type=int, help="step of the checkpoint (the newest)")
    parser.add_argument("--without-mtp", action="store_true", help="leave the MTP layer out")
    options = parser.parse_args(arguments)

    try:
        checkpoint = export(options.run, options.out, step=options.step, mtp=not options.without_mtp)
    except (ValueError, OSError) as error:
        print(f"rlpipe export: {error}", file=sys.stderr)
        return 2

    print(f"exported {checkpoint} to {options.out}")
    return 0
