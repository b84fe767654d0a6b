"""Where libraries write their settings when the user has no writable home folder. Imports nothing heavy.

mini-swe-agent creates a folder there when it is imported, and W&B one for its files. Containers and batch
systems often run as a user without a home.
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
    """Point the libraries that need a home folder to a temporary one if the user's cannot be written to.

    Variables that are already set are not changed. Call this before those libraries are imported.
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
