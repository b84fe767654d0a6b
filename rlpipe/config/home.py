"""Provides a temporary home folder for libraries if the user has no writable one. Imports nothing heavy.

mini-swe-agent creates a folder in the home folder when it is imported, and W&B creates one for its files.
Containers and batch systems often run as a user without a home folder.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_FOLDERS = {
    "MSWEA_GLOBAL_CONFIG_DIR": "mini-swe-agent",
    "WANDB_CONFIG_DIR": "wandb-config",
    "WANDB_CACHE_DIR": "wandb-cache",
    "WANDB_DATA_DIR": "wandb-data",
}


def provide_home() -> None:
    """Set variables so that libraries use a temporary folder if the user's home folder is not writable.

    Variables that are already set are not changed. Call this before these libraries are imported.
    """
    if home_is_writable():
        return
    base = Path(tempfile.gettempdir()) / f"rlpipe-home-{os.getuid()}"
    for variable, name in _FOLDERS.items():
        os.environ.setdefault(variable, str(base / name))


def home_is_writable() -> bool:
    """Return whether files can be created under ~/.config, as libraries do."""
    try:
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except (OSError, RuntimeError):
        return False
